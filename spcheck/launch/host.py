"""The process that imports torch once and holds the ranks. It speaks JSON lines with the parent.

In: one request a line, ``{"case": ..., "store": ..., "traces": ..., "deadline": ...}``. Out, for each:
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
from typing import TYPE_CHECKING, Any, TextIO

from spcheck.launch.lifetime import die_with_parent
from spcheck.launch.patience import earlier
from spcheck.launch.stacks import StackFile

if TYPE_CHECKING:
    from spcheck.plan.plan import Plan

_SIDES = 2


def main() -> None:
    """Serves requests from stdin, one after the other, until there are no more or one breaks."""
    die_with_parent()
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not enter the conversation
    try:
        line = sys.stdin.readline()
        server = _Server(channel)
        while line:
            server.serve(json.loads(line))
            line = sys.stdin.readline()
    except Exception:
        _say(channel, {"event": "broken", "traceback": traceback.format_exc()})
    sys.stderr.flush()
    os._exit(0)  # threads of ranks that hang must not keep the process


class _Server:
    """What stays from case to case: the imports, and with threads the engines of the last case."""

    def __init__(self, channel: TextIO) -> None:
        # Imported late: the parent may still be busy, and without a request no torch is needed.
        import torch

        from spcheck.launch import ranks
        from spcheck.worker.built import EnginePool

        self._channel = channel
        self._torch = torch
        self._ranks = ranks
        self._pool = EnginePool()
        StackFile(sys.stderr).answer_here()
        gc.freeze()  # the half million objects of the imports live as long as the process: no need to visit them again

    def serve(self, request: dict[str, Any]) -> None:
        """Answers one request."""
        from spcheck.case import Case
        from spcheck.plan.plan import make_plan

        plan = make_plan(Case.from_json(request["case"]))
        backend = self._checked(plan)
        if backend is None:
            return
        _say(self._channel, {"event": "ready", "environment": _environment(self._torch.__version__, backend)})
        deadline, traces = request["deadline"], request["traces"]
        patience = earlier(plan.case.timeout)
        if backend == "loopback":
            self._pool.keep(_SIDES * plan.case.ranks)
            reports = self._ranks.run_threads(plan, self._pool, deadline, traces, patience)
        else:
            reports = self._ranks.run_processes(plan, backend, Path(request["store"]), deadline, traces, patience)
        _say(self._channel, {"event": "done", "reports": reports})

    def _checked(self, plan: Plan) -> str | None:
        """The backend; None where this machine cannot run the case, and the parent was told why."""
        from reference.checkpoint import CheckpointError
        from spcheck.errors import UsageError
        from spcheck.launch.memory import memory
        from spcheck.worker.weights import check_room, check_weights

        try:
            counted = self._torch.version.cuda and plan.case.backend in ("auto", "nccl")
            backend = _backend(plan.case.backend, plan.case.ranks, _gpus() if counted else 0)
            check_weights(plan)
            if backend != "nccl":  # weights on GPUs are not in this memory
                check_room(plan, memory().usable)
        except (UsageError, CheckpointError) as error:
            _say(self._channel, {"event": "refused", "message": str(error)})
            return None
        return backend


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
