"""What a run that did not come to its end is told as: which rank, how, where, and what the others did. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spcheck.comm.divergence import Divergence, find_divergence
from spcheck.comm.trace import OWN_GROUP, collective_text, last_collective

Report = Mapping[str, Any]

_NO_TRACE: dict[str, Any] = {
    "began": True,
    "subject": "",
    "step": "",
    "module": "",
    "last_probe": None,
    "waits": False,
    "collectives": [],
}
_OVERDUE = {"RankHung": "hangs", "RankStopped": "is stopped by a signal", "RankWaits": "waits"}


@dataclass(frozen=True)
class RankState:
    """One rank at the end of a failed run; what is empty it had not come to."""

    rank: int
    state: str
    subject: str
    step: str
    module: str
    last_probe: str
    last_collective: str
    stack: str = ""


@dataclass(frozen=True)
class Failure:
    """All there is to say about a failed run. ``first`` is the rank to look at first."""

    ranks: tuple[RankState, ...]
    first: int
    divergence: Divergence | None

    @property
    def stack(self) -> str:
        """The traceback, or the stack, of rank ``first``."""
        return next(state.stack for state in self.ranks if state.rank == self.first)

    @property
    def shown(self) -> list[RankState]:
        """Ranks whose stacks tell something: the first, and where ranks part one for each different call."""
        calls = self.divergence.calls if self.divergence else {}
        texts = call_texts(calls)
        by_call = {texts.get(s.rank, ""): s for s in reversed(self.ranks) if s.stack}
        first = [state for state in self.ranks if state.rank == self.first and state.stack]
        others = [s for s in reversed(by_call.values()) if calls and s.rank != self.first]
        return (first + others)[:2]


def explain(reports: Sequence[Report], tp: int | None = None) -> Failure | None:
    """From the reports of all ranks, ``tp`` of them in a data-parallel rank; None where each came to its end."""
    first = _first(reports)
    if first is None:
        return None
    states = tuple(_state(report) for report in reports)
    divergence = find_divergence(reports, tp)
    shown = _astray(reports, divergence) or first
    return Failure(states, shown["rank"], divergence)


def internal_error(reports: Sequence[Report]) -> tuple[str, str] | None:
    """Sentence and traceback of a rank on which spcheck itself broke, if that is what failed first."""
    first = _first(reports)
    if first is None or not first["error"].get("internal"):
        return None
    error = first["error"]
    return f"rank {first['rank']} raised {error['type']}: {_line(error['message'])}", error["traceback"]


def _astray(reports: Sequence[Report], divergence: Divergence | None) -> Report | None:
    """Where ranks part: the first that is inside a collective of a subject, where the others are in the tool's own."""
    if divergence is None:
        return None
    calls = {rank: call for rank, call in divergence.calls.items() if call and call["group"] != OWN_GROUP}
    inside = [r for r in reports if r["rank"] in calls and "error" in r]
    return inside[0] if inside and len(calls) < len(divergence.calls) else None


def failure_sentence(reports: Sequence[Report]) -> str | None:
    """Which rank failed first, how and where; None if every rank came to its end."""
    first = _first(reports)
    if first is None:
        return None
    kind, message = first["error"]["type"], _line(first["error"]["message"])
    if kind in _OVERDUE:
        return f"{message}: {_who_waits_for_whom(reports)}"
    what = message if kind == "RankDied" else f"raised {kind}: {message}"
    return f"rank {first['rank']} {what}{_in(first)}{_after(first)}"


def divergence_sentence(divergence: Divergence) -> str:
    """``the ranks part at collective 12 of the run: rank 0 calls ..., rank 1 calls ...``; equal calls are told once."""
    ranks: dict[str, list[int]] = {}
    for rank, text in call_texts(divergence.calls).items():
        ranks.setdefault(text, []).append(rank)
    parts = [f"{_ranks(group, 'calls')} {text}" for text, group in ranks.items()]
    which = "that joins data-parallel ranks" if divergence.across else "of the run"
    return f"the ranks part at collective {divergence.number + 1} {which}: {'; '.join(parts)}"


def call_texts(calls: Mapping[int, Mapping[str, Any] | None]) -> dict[int, str]:
    """Rank -> its call in words; calls that are alike but for the step that they belong to are told with it."""
    texts = {rank: call_text(call) for rank, call in calls.items()}
    steps: dict[str, set[tuple[str, str]]] = {}
    for rank, call in calls.items():
        if call is not None:
            steps.setdefault(texts[rank], set()).add((call["subject"], call["step"]))
    return {
        rank: f"{text}, {call['subject'] or 'spcheck'}, {call['step']}" if call and len(steps[text]) > 1 else text
        for (rank, text), call in zip(texts.items(), calls.values(), strict=True)
    }


def call_text(call: Mapping[str, Any] | None) -> str:
    """``all_gather [9, 768] float64 on tp in model.layers.2.self_attn``."""
    if call is None:
        return "nothing more: it ended"
    where = f" in {call['module']}" if call["module"] else ""
    return f"{collective_text(call)}{where}"


def _first(reports: Sequence[Report]) -> Report | None:
    """The rank to blame: a cause before a consequence, then the first in time."""
    failed = [r for r in reports if "error" in r]
    return min(failed, key=lambda r: (_weight(r), r.get("failed_at", float("inf"))), default=None)


def _weight(report: Report) -> int:
    if report["error"]["type"] == "RankWaits":
        return 2
    return 1 if report.get("lost_peer") else 0


def _who_waits_for_whom(reports: Sequence[Report]) -> str:
    by_type: dict[str, list[Report]] = {}
    for report in reports:
        by_type.setdefault(report.get("error", {}).get("type", "finished"), []).append(report)
    waiting = by_type.pop("RankWaits", [])
    waits = [f"rank {r['rank']} waits in {_waits_in(r)}" for r in waiting]
    at_fault = [r for kind in ("RankStopped", "RankHung") for r in by_type.get(kind, ())]
    if not at_fault:
        ended = [f"rank {r['rank']} has ended" for r in by_type.get("finished", ())]
        return f"no rank can go on: {'; '.join(waits + ended)}"
    stuck = [f"rank {r['rank']} {_OVERDUE[r['error']['type']]}{_in(r)}{_after(r)}" for r in at_fault]
    too_short = [] if waits else ["or --timeout is too short"]
    return "; ".join(stuck + waits + too_short)


def _state(report: Report) -> RankState:
    trace = report.get("trace", _NO_TRACE)
    last = last_collective(trace)
    return RankState(
        rank=report["rank"],
        state=_state_text(report),
        subject=trace["subject"],
        step=trace["step"],
        module=trace["module"],
        last_probe=trace["last_probe"] or "",
        last_collective=call_text(last) if last else "",
        stack=report.get("error", {}).get("traceback") or "",
    )


def _state_text(report: Report) -> str:
    error = report.get("error")
    if error is None:
        return "finished"
    kind = error["type"]
    if kind == "RankDied":
        return str(error["message"])
    if kind == "RankWaits":
        return f"waits in {collective_text(report['trace']['collectives'][-1])}"
    if kind == "RankHung" and not report.get("trace", _NO_TRACE)["began"]:
        return "has not begun"
    if kind == "RankHung" and report.get("lost_peer"):
        return "was still running"
    lost = ", as another rank was lost" if report.get("lost_peer") else ""
    return _OVERDUE.get(kind, f"raised {kind}{lost}")


def _waits_in(report: Report) -> str:
    calls = report.get("trace", _NO_TRACE)["collectives"]
    return call_text(calls[-1]) if calls else "a collective"


def _in(report: Report) -> str:
    where = _where(report.get("trace", _NO_TRACE))
    return f" in {where}" if where else ""


def _where(trace: Mapping[str, Any]) -> str:
    """``model.layers.2.mlp of optimized.subject, target step 0``."""
    if not trace["subject"]:
        return {"start": "its start", "": ""}.get(trace["step"], f"spcheck's own {trace['step']}")
    if trace["module"]:
        return f"{trace['module']} of {trace['subject']}, {trace['step']}"
    return f"{trace['subject']}, {trace['step']}"


def _after(report: Report) -> str:
    trace = report.get("trace", _NO_TRACE)
    last = last_collective(trace)
    if last is None or trace["step"] == "build":  # then it was another subject's
        return ""
    inside = trace["waits"] and last is trace["collectives"][-1]
    return f", {'in' if inside else 'after'} {collective_text(last)}"


def _ranks(ranks: Sequence[int], verb: str) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} {verb}"
    return f"ranks {', '.join(map(str, ranks))} {verb.removesuffix('s')}"


def _line(message: str) -> str:
    return (message.splitlines() or [""])[0]  # torch adds its own stack to some
