"""What the traces say of ranks whose host does not answer: it is dead, starved, or held by a thread that hangs in C."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import Any

from spcheck.comm.trace import SIZE, Trace
from spcheck.launch.files import nameless_file
from spcheck.launch.reports import overdue
from spcheck.launch.stacks import StackFile


class TraceFile:
    """A file for the traces of all ranks of one case after the other; ``handle`` is for the host to inherit."""

    def __init__(self) -> None:
        self._file = nameless_file()

    @property
    def handle(self) -> int:
        """The descriptor."""
        return self._file.fileno()

    def fresh(self, ranks: int) -> list[Trace]:
        """Empty traces of so many ranks; those of an earlier case are gone."""
        os.ftruncate(self.handle, 0)
        os.ftruncate(self.handle, ranks * SIZE)
        return [Trace(self.handle, rank) for rank in range(ranks)]

    def close(self) -> None:
        """Gives the memory back."""
        self._file.close()


def examine(
    traces: Sequence[Trace], stack: StackFile | None, host: subprocess.Popen[bytes], why: str
) -> list[dict[str, Any]]:
    """One report per rank, empty where none of them began. ``stack`` is where a host with threads answers."""
    seen = [trace.read() for trace in traces]
    if not any(trace["began"] for trace in seen):
        return []
    alive = host.poll() is None
    if stack is not None and alive:
        stack.ask(host.pid)
        stack.wait()
    reports = []
    for rank, (trace, what) in enumerate(zip(traces, seen, strict=True)):
        text = "" if stack is None else stack.read(trace.thread_id)
        error = overdue(what, why, stack=text)
        reports.append({"rank": rank, "error": error, "lost_peer": not alive, "trace": what})
    return reports
