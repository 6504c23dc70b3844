"""The edge towards the user: stdout, stderr, the progress line, and the file a result is written to."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import click

from spcheck.errors import UsageError
from spcheck.launch.parent import Progress

_LONGEST_NAME = 240  # bytes, with room for what a file beside it adds


class JsonTarget:
    """Where ``--json`` writes: ``-`` is stdout. Checked before the run, so that no result is lost after it.

    Raises:
        UsageError: it cannot be written.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_stdout = name == "-"
        self._path = Path(name)
        if not self.is_stdout and not self._writable():
            raise UsageError(f"--json {name} cannot be written")

    def write(self, text: str) -> None:
        """Writes the whole text, or nothing: a reader never sees half a file.

        Raises:
            UsageError: it cannot be written after all.
        """
        if self.is_stdout:
            echo(text)
            return
        try:
            if self._is_file():
                self._replace(text)
            else:
                self._path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--json {self.name} cannot be written: {error.strerror}") from error

    def _writable(self) -> bool:
        folder = os.path.dirname(os.path.realpath(self._path))
        into = os.path.isdir(folder) and os.access(folder, os.W_OK)
        if not os.path.exists(self._path):
            return into and len(os.fsencode(self._path.name)) < _LONGEST_NAME
        return not os.path.isdir(self._path) and os.access(self._path, os.W_OK) and (into or not self._is_file())

    def _is_file(self) -> bool:
        """A device or pipe is written into; to rename a file over it would destroy it."""
        return not self._path.exists() or stat.S_ISREG(self._path.stat().st_mode)

    def _replace(self, text: str) -> None:
        path = self._path.resolve()  # a link stays one
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            beside.write_text(text, encoding="utf-8")
            if path.exists():
                shutil.copymode(path, beside)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


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
def progress() -> Iterator[Progress]:
    """One line on stderr that is rewritten, on a terminal only."""
    shown = _is_terminal(sys.stderr)

    def say(text: str) -> None:
        if shown:
            echo(f"\r\033[K{text} ...", err=True)

    try:
        yield say
    finally:
        if shown:
            echo("\r\033[K", err=True)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
