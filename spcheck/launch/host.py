"""The process that imports torch once and holds the ranks. It speaks JSON lines with the parent.

In: one request, ``{"case": ..., "store": ..., "traces": ..., "deadline": ...}``. Out:
``{"event": "ready", "environment": ...}``, then ``{"event": "done", "reports": [...]}``, or instead
``{"event": "refused", "message": ...}``, or ``{"event": "broken", "traceback": ...}`` where spcheck itself is at fault.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

from spcheck.launch.lifetime import die_with_parent
from spcheck.launch.patience import earlier
from spcheck.launch.stacks import StackFile


def main() -> None:
    """Serves one request from stdin."""
    die_with_parent()
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not enter the conversation
    try:
        _serve(json.loads(sys.stdin.readline()), channel)
    except Exception:
        _say(channel, {"event": "broken", "traceback": traceback.format_exc()})
    sys.stderr.flush()
    os._exit(0)  # threads of ranks that hang must not keep the process


def _serve(request: dict[str, Any], channel: TextIO) -> None:
    # Imported late: the parent may still be busy, and a bad request needs no torch.
    import torch

    from reference.checkpoint import CheckpointError
    from spcheck.case import Case
    from spcheck.errors import UsageError
    from spcheck.launch.ranks import run_processes, run_threads
    from spcheck.memory import memory
    from spcheck.plan import make_plan
    from spcheck.worker.weights import check_room, check_weights

    gc.freeze()  # the half million objects of the imports live as long as the process: no need to visit them again
    plan = make_plan(Case.from_json(request["case"]))
    try:
        gpus = _gpus() if torch.version.cuda and plan.case.backend in ("auto", "nccl") else 0
        backend = _backend(plan.case.backend, plan.case.ranks, gpus)
        check_weights(plan)
        if backend != "nccl":  # weights on GPUs are not in this memory
            check_room(plan, memory().usable)
    except (UsageError, CheckpointError) as error:
        _say(channel, {"event": "refused", "message": str(error)})
        return
    _say(channel, {"event": "ready", "environment": _environment(torch.__version__, backend)})
    threads = backend == "loopback"
    deadline, traces = request["deadline"], request["traces"]
    patience = earlier(plan.case.timeout)
    if threads:
        StackFile(sys.stderr).answer_here()
        reports = run_threads(plan, deadline=deadline, traces=traces, patience=patience)
    else:
        reports = run_processes(plan, backend, Path(request["store"]), deadline, traces, patience)
    _say(channel, {"event": "done", "reports": reports})


def _gpus() -> int:
    """GPUs of this machine, counted in a child: a process that has called CUDA cannot fork ranks that use it."""
    import torch

    child = os.fork()
    if child == 0:
        os._exit(min(torch.cuda.device_count(), 255))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _backend(asked: str, ranks: int, gpus: int) -> str:
    from spcheck.errors import UsageError

    if asked == "nccl" and gpus < ranks:
        raise UsageError(f"--backend nccl needs one GPU per rank: {ranks} ranks, {gpus} GPUs found")
    if asked != "auto":
        return asked
    return "nccl" if gpus >= ranks else "gloo"


def _environment(torch_version: str, backend: str) -> dict[str, Any]:
    return {
        "torch": torch_version,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "backend": backend,
        "code": str(Path(__file__).resolve().parents[2]),
    }


def _say(channel: TextIO, message: dict[str, Any]) -> None:
    channel.write(json.dumps(message) + "\n")
    channel.flush()


if __name__ == "__main__":
    main()
