"""Runs cases in the source tree it stands in, one for each line it reads, and answers with what a user would read.

In: ``{"command": [...]}``, the words behind ``spcheck diff``, or ``{"sweep": i}``, a case of the covering arrays; and
``"seconds"``, what it may take. Out: ``{}`` once all is imported, then for each line ``{"outcome": ..., "first": ...,
"text": [...]}`` with the sentences of all findings, ``{"error": ...}`` where there was no verdict, or ``{"end": true}``
behind the last case of the arrays. A case that hangs is the caller's to end.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from spcheck.case import Case
from spcheck.cli.diff import diff
from spcheck.cli.options import case_of
from spcheck.errors import HostFailed, SpcheckError
from spcheck.launch.threads import ThreadHost
from spcheck.run import run
from spcheck.worker.built import EnginePool
from tests.matrix.decoding import DECODING
from tests.matrix.prompts import PROMPTS

Answer = dict[str, Any]
_SHOWN = ("verbose", "quiet", "collectives", "json_target")


def command_case(words: list[str]) -> Case:
    """The case of a command line, its ranks as threads."""
    options = diff.make_context("diff", list(words)).params
    for name in _SHOWN:
        options.pop(name)
    return replace(case_of(options), backend="loopback")


@cache
def sweep() -> list[dict[str, Any]]:
    """The fields of every case of the covering arrays, cheap ones of both first."""
    return [space.case_of(row) for space in (PROMPTS, DECODING) for row in space.read()]


def answer(case: Case, pool: EnginePool, seconds: float) -> Answer:
    """Runs one case; threads that hang for ``seconds`` are reported by the tool itself."""
    try:
        comparison = run(case, ThreadHost(pool, seconds))
    except HostFailed as broken:
        return {"error": f"internal error: {broken}"}
    at = comparison.verdict.first_divergence
    return {
        "outcome": comparison.verdict.outcome,
        "first": None if at is None else f"{at['probe']}#{at['call']}",
        "text": [f"{f.kind}  {f.message}" for f in comparison.verdict.findings],
        "case": comparison.plan.case.id,
    }


def _case(request: Mapping[str, Any]) -> Case | None:
    if "command" in request:
        return command_case(request["command"])
    cases = sweep()
    return Case(**cases[request["sweep"]]) if request["sweep"] < len(cases) else None


def _answered(request: Mapping[str, Any], pool: EnginePool) -> Answer:
    try:
        case = _case(request)
        return {"end": True} if case is None else answer(case, pool, request["seconds"])
    except SpcheckError as error:
        return {"error": str(error)}
    except Exception as error:  # the judging side broke on what a fault made of a run
        return {"error": f"internal error: {type(error).__name__}: {error}"}


def main() -> None:
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a subject prints must not enter the conversation
    torch.set_num_threads(1)
    pool = EnginePool()
    channel.write("{}\n")
    channel.flush()
    for line in sys.stdin:
        channel.write(json.dumps(_answered(json.loads(line), pool)) + "\n")
        channel.flush()
    os._exit(0)  # threads that hang must not keep the process


if __name__ == "__main__":
    main()
