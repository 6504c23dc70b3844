"""Files without a name: nothing is left of them, however their processes end."""

from __future__ import annotations

import os
import shutil
import tempfile
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


class MeetingPlace:
    """Where forked ranks find each other, for a FileStore: a new place for each case.

    ``handles`` are the descriptors that a child process must inherit.

    Raises:
        UsageError: it needs a temporary folder and there is none.
    """

    def __init__(self) -> None:
        self._number = 0
        self._file = nameless_file() if _in_memory() else None
        self._folder = _private_folder() if self._file is None else None

    @property
    def handles(self) -> tuple[int, ...]:
        """To be inherited."""
        return () if self._file is None else (self._file.fileno(),)

    def fresh(self) -> Path:
        """An empty place; ranks of an earlier case must have ended."""
        self._number += 1
        if self._folder is not None:
            return self._folder / f"rendezvous-{self._number}"
        (handle,) = self.handles
        os.ftruncate(handle, 0)
        return _HANDLES / str(handle)

    def close(self) -> None:
        """Leaves nothing behind."""
        if self._file is not None:
            self._file.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _private_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="spcheck-"))  # mkdtemp's mode is 0700
    except OSError as error:
        raise _no_folder(error) from error


def _in_memory() -> bool:
    return hasattr(os, "memfd_create") and _HANDLES.is_dir()


def _no_folder(error: OSError) -> UsageError:
    return UsageError(f"no temporary file can be made: {error.strerror}; set TMPDIR to a folder that can be written")
