"""Where a rank stands that does not answer: its Python stack, taken from outside."""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import signal
import sys
import threading
import time
import traceback
from typing import IO, Any

from spcheck.launch.files import nameless_file

# A signal that hardly any library uses; where there are no realtime signals, one that programs may have.
_ASK = int(getattr(signal, "SIGRTMAX", signal.SIGUSR2))
_PATIENCE = 0.5  # seconds; a dump takes microseconds, a starved machine longer
_TICK = 0.01
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')


class StackFile:
    """What one forked rank's stack is written to. Made before the fork; the rank answers, the host asks.

    The answer is written by C code in a signal handler: it comes from a sleep and from a call into C as well, though
    not from a stopped process.
    """

    def __init__(self, file: IO[Any] | None = None) -> None:
        self._file = nameless_file() if file is None else file
        self._begin = 0

    def answer_here(self) -> None:
        """Called in the rank. A crash in C code (a segmentation fault, an abort) leaves its stack there too."""
        faulthandler.enable(self._file, all_threads=True)
        faulthandler.register(_ASK, file=self._file, all_threads=True)

    def ask(self, process: int) -> None:
        """Called in the host for a rank that is alive; :meth:`wait` for the answer."""
        self._begin = self._size()
        os.kill(process, _ASK)

    def read(self, thread: int | None = None) -> str:
        """The stack of a thread, by default of the main one, innermost call last; empty where there is none."""
        dump = os.pread(self._file.fileno(), 1 << 20, self._begin).decode(errors="replace")
        return readable(dump, thread)

    def wait(self) -> None:
        """Until an answer is there, or for a moment."""
        end = time.monotonic() + _PATIENCE
        seen = self._begin
        while time.monotonic() < end:
            size = self._size()
            if size == seen > self._begin:
                break
            seen = size
            time.sleep(_TICK)

    def close(self) -> None:
        """Gives the memory back."""
        self._file.close()

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size


def readable(dump: str, thread: int | None = None) -> str:
    """A faulthandler dump in the order and with the source lines of a traceback; of one thread, else of the oldest."""
    parts = dump.split("\n\n")
    if thread is not None:
        parts = [part for part in parts if re.search(f"hread 0x0*{thread:x} ", part)]
    sections = [[m for line in part.splitlines() if (m := _FRAME.fullmatch(line))] for part in parts]
    frames = next(filter(None, reversed(sections)), [])
    if not frames:
        return ""
    lines = ["Stack (most recent call last):"]
    for frame in reversed(frames):
        lines.append(f'  File "{frame["file"]}", line {frame["line"]}, in {frame["name"]}')
        if source := linecache.getline(frame["file"], int(frame["line"])).strip():
            lines.append(f"    {source}")
    return "\n".join(lines)


def thread_stack(name: str) -> str:
    """The stack of this process's thread of that name, innermost call last; empty where there is none."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread.name == name and thread.ident in frames:
            return "Stack (most recent call last):\n" + "".join(traceback.format_stack(frames[thread.ident])).rstrip()
    return ""
