"""Files without a name: nothing is left of them, however their processes end."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from spcheck.errors import UsageError

_HANDLES = Path("/proc/self/fd")


def nameless_file() -> IO[Any]:
    """An open file, read and written as bytes, that exists in memory where the system can do that.

    Raises:
        UsageError: it needs a temporary folder and there is none.
    """
    if _in_memory():
        return os.fdopen(os.memfd_create("spcheck"), "w+b")
    try:
        return tempfile.TemporaryFile(prefix="spcheck-")
    except OSError as error:
        raise _no_folder(error) from error


@contextmanager
def meeting_place() -> Iterator[tuple[Path, tuple[int, ...]]]:
    """Where forked ranks find each other, for a FileStore, and the descriptors that a child process must inherit.

    Raises:
        UsageError: it needs a temporary folder and there is none.
    """
    if _in_memory():
        with nameless_file() as file:
            yield _HANDLES / str(file.fileno()), (file.fileno(),)
        return
    try:
        folder = Path(tempfile.mkdtemp(prefix="spcheck-"))  # mkdtemp's mode is 0700
    except OSError as error:
        raise _no_folder(error) from error
    try:
        yield folder / "rendezvous", ()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _in_memory() -> bool:
    return hasattr(os, "memfd_create") and _HANDLES.is_dir()


def _no_folder(error: OSError) -> UsageError:
    return UsageError(f"no temporary file can be made: {error.strerror}; set TMPDIR to a folder that can be written")
