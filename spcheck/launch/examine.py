"""What the traces say of ranks whose host does not answer: it is dead, starved, or held by a thread that hangs in C."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from spcheck.comm.trace import SIZE, Trace
from spcheck.launch.files import nameless_file
from spcheck.launch.reports import overdue
from spcheck.launch.stacks import StackFile


@contextmanager
def trace_file(ranks: int) -> Iterator[int]:
    """A file for the traces of all ranks, as a descriptor for the host to inherit."""
    with nameless_file() as file:
        os.ftruncate(file.fileno(), ranks * SIZE)
        yield file.fileno()


def examine(
    file: int, ranks: int, stack: StackFile | None, host: subprocess.Popen[bytes], why: str
) -> list[dict[str, Any]]:
    """One report per rank, empty where none of them began. ``stack`` is where a host with threads answers."""
    traces = [Trace(file, rank) for rank in range(ranks)]
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
