"""Which backends should work here, and one small real case on each of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from spcheck.case import Case
from spcheck.doctor.machine import Machine, look
from spcheck.doctor.torch_facts import Torch, ask
from spcheck.errors import SpcheckError
from spcheck.launch.parent import ProcessHost, terminable
from spcheck.run import run

_RANKS = 2
_TOKENS = 3  # the smallest step that two ranks share unevenly
_FAILED = 4


@dataclass(frozen=True)
class Backend:
    """One backend. ``reason`` says why it cannot work here; else ``outcome`` is what the case on it gave."""

    name: str
    ranks: int
    reason: str | None = None
    outcome: str | None = None
    problem: str | None = None
    seconds: float = 0.0

    @property
    def works(self) -> bool:
        """Whether a case ran on it and passed."""
        return self.outcome in ("EQUAL", "EQUIVALENT")


@dataclass(frozen=True)
class Diagnosis:
    """All that was found."""

    machine: Machine
    torch: Torch
    backends: tuple[Backend, ...]

    @property
    def exit_code(self) -> int:
        """0 if there is a backend, and every one that should work did."""
        tried = [b for b in self.backends if b.reason is None]
        return 0 if tried and all(b.works for b in tried) else _FAILED


def examine(say: Callable[[str], None]) -> Diagnosis:
    """Gathers the facts, then runs the cases; ``say`` gets a short text at each step."""
    say("looking at the machine")
    machine = look()
    say("asking torch")
    torch = ask()
    backends = []
    for name, ranks, reason in expected(machine, torch):
        say(f"trying {name}")
        backends.append(Backend(name, ranks, reason) if reason else attempt(name, ranks))
    return Diagnosis(machine, torch, tuple(backends))


def expected(machine: Machine, torch: Torch) -> list[tuple[str, int, str | None]]:
    """(backend, ranks to try it with, why it cannot work here)."""
    gpus = len(torch.gpus)
    whole = torch.problem or (machine.temporary.problem and f"no temporary file: {machine.temporary.problem}")
    gloo = None if torch.gloo else "this torch is built without gloo"
    return [
        ("loopback", _RANKS, whole),
        ("gloo", _RANKS, whole or gloo or machine.network),
        ("nccl", max(min(gpus, _RANKS), 1), whole or _why_no_nccl(torch)),
    ]


def _why_no_nccl(torch: Torch) -> str | None:
    if torch.nccl is None:
        return "this torch is built without nccl" + ("" if torch.cuda else " and without CUDA")
    return None if torch.gpus else "it needs one GPU per rank, and torch finds none"


def attempt(name: str, ranks: int) -> Backend:
    """Runs the case."""
    start = time.monotonic()
    case = Case(requests=((_TOKENS,),), tp=ranks, backend=name)
    try:
        with terminable(), ProcessHost() as host:
            verdict = run(case, host).verdict
    except SpcheckError as error:
        return Backend(name, ranks, outcome="FAILED", problem=str(error), seconds=time.monotonic() - start)
    problem = verdict.findings[0].message if verdict.findings else None
    return Backend(name, ranks, outcome=verdict.outcome, problem=problem, seconds=time.monotonic() - start)
