"""The edge towards the user: stdout, stderr, the progress line, and the file a result is written to."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from spcheck.errors import UsageError

if TYPE_CHECKING:
    from spcheck.launch.interface import Progress


class JsonTarget:
    """Where ``--json`` writes: ``-`` is stdout. Checked before the run, so that no result is lost after it.

    Raises:
        UsageError: it cannot be written; the message says why.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_stdout = name == "-"
        self._path = Path(os.path.realpath(name))  # a link stays one, and what it leads to is written
        if self.is_stdout:
            return
        with self._told():
            self._into_place = self._is_file_or_new()
            self._check()

    def write(self, text: str) -> None:
        """Writes the whole text, or nothing: a reader never sees half a file.

        Raises:
            UsageError: it cannot be written after all.
        """
        if self.is_stdout:
            echo(text)
            return
        with self._told():
            if self._into_place:
                self._replace(text)
            else:
                Path(self.name).write_text(text, encoding="utf-8")  # /dev/stdout leads to what has no path

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UsageError(f"--json {self.name} cannot be written: {error.strerror}") from error

    def _is_file_or_new(self) -> bool:
        """A device or a pipe is written into: to rename a file over it would destroy it."""
        try:
            mode = os.stat(self.name).st_mode
        except FileNotFoundError:
            if self.name.endswith("/") or not self.name:
                raise OSError(errno.EISDIR, "it names no file") from None
            return True
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, "it is a folder")
        if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)):
            raise OSError(errno.EINVAL, "it is neither a file nor a pipe")
        return stat.S_ISREG(mode)

    def _check(self) -> None:
        """Tries what :meth:`write` will do, as far as that leaves no trace."""
        if os.path.exists(self.name) and not os.access(self.name, os.W_OK):
            raise OSError(errno.EACCES, "it may not be written")
        if self._into_place:
            if not os.path.isdir(self._path.parent):
                raise OSError(errno.ENOENT, "there is no such folder")
            with self._beside():
                pass

    def _replace(self, text: str) -> None:
        with self._beside() as beside:
            beside.write_text(text, encoding="utf-8")
            if self._path.exists():
                shutil.copymode(self._path, beside)
            beside.replace(self._path)

    @contextmanager
    def _beside(self) -> Iterator[Path]:
        """A new file in the target's folder, gone at the end unless it was renamed."""
        path = self._path.with_name(f".spcheck-{os.getpid()}-{os.urandom(4).hex()}.tmp")
        path.touch(exist_ok=False)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


def echo(text: str, *, err: bool = False) -> None:
    """Prints, with what the stream cannot show replaced.

    A reader that has gone away (``| head``) changes nothing about the verdict and its exit code, nor does a stderr
    that takes no more.

    Raises:
        UsageError: stdout cannot be written (a full disk): its text would be lost unseen.
    """
    stream = sys.stderr if err else sys.stdout
    if stream is None:  # closed by the caller
        return
    try:
        click.echo(text.encode(stream.encoding, "replace").decode(stream.encoding), file=stream, nl=False)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # the rest of the buffer goes there at exit
        if not (err or isinstance(error, BrokenPipeError)):
            raise UsageError(f"stdout cannot be written: {error.strerror}") from error


def wants_color(stream: TextIO | None) -> bool:
    """On a terminal, unless NO_COLOR or a dumb terminal says otherwise."""
    return _is_terminal(stream) and not os.environ.get("NO_COLOR")


def width() -> int:
    """Columns of the terminal, 80 where there is none."""
    return max(80, shutil.get_terminal_size().columns)


@contextmanager
def progress(steps: int, *, quiet: bool = False) -> Iterator[Progress]:
    """One line on stderr that is rewritten at each of so many steps, on a terminal only."""
    shown = _is_terminal(sys.stderr) and not quiet
    number = 0

    def say(text: str, *, again: bool = False) -> None:
        nonlocal number
        number += not again
        if shown:  # a line that is too long could not be taken back
            room = shutil.get_terminal_size().columns - len(f"[{number}/{steps}]  ...") - 1
            echo(f"\r\033[K[{number}/{steps}] {text[:room]} ...", err=True)

    try:
        yield say
    finally:
        if shown:
            echo("\r\033[K", err=True)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
