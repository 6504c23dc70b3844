"""The parameter contract: what a subject holds is what the checkpoint says, on every rank and in every numerics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spcheck.judge.contracts.check import Breach, Checked, Reports, first_of_each_place
from spcheck.judge.contracts.memory import parameter_bytes
from spcheck.plan.phases import module_of
from spcheck.plan.plan import Plan
from spcheck.plan.schemes import SidePlan

RULE = "parameters"

Log = Mapping[str, Any]


def check_parameters(plan: Plan, reports: Reports) -> Checked:
    """What every rank found when it compared its parameters, and whether ranks that hold the same agree."""
    checked = 0
    breaches: list[Breach] = []
    for subject, side in plan.sides:
        logs = {report["rank"]: report[subject] for report in reports if "loading" in report.get(subject, {})}
        for rank, log in logs.items():
            checked += log["loading"]["checked"]
            breaches += _unknown(plan, side, rank, log)
        breaches += _faults(subject, logs)
        breaches += _other_replicas(plan, subject, logs)
    return Checked(checked, first_of_each_place(breaches))


def _faults(subject: str, logs: Mapping[int, Log]) -> Iterator[Breach]:
    """One for each parameter: what is wrong on the first rank, and on which other ranks it is wrong as well."""
    found: dict[str, list[tuple[int, Log]]] = {}
    for rank, log in sorted(logs.items()):
        for fault in log["loading"]["faults"]:
            found.setdefault(fault["parameter"], []).append((rank, fault))
    for name, ((rank, fault), *others) in found.items():
        ranks = ", ".join(str(other) for other, _ in others)
        also = f"; on rank{'s' if len(others) > 1 else ''} {ranks} too" if others else ""
        yield Breach(RULE, f"{name} {_sentence(fault, rank)}{also}", subject, name, None, rank)


def _sentence(fault: Log, rank: int) -> str:
    """What is wrong, behind the parameter's name."""
    what = fault["what"]
    if what == "changed":
        return f"changed during the run on rank {rank}"
    when = " after the run, and did not before" if fault.get("later") else ""
    differs = f"differs from the checkpoint on rank {rank}{when}"
    if what == "missing":
        return f"{differs}: it is not there"
    if what == "shape":
        return f"{differs}: its shape is {fault['got']}, not {fault['wanted']}"
    if what == "type":
        return f"{differs}: its type is {fault['got']}, not {fault['wanted']}"
    got, wanted = _numbers(fault["got"], fault["wanted"])
    place = f"first at {fault['index']}{_source(fault)}, {got} for {wanted}"
    hint = f"; {fault['hint']}" if fault.get("hint") else ""
    return f"{differs}: {place}; {fault['count']} of {fault['elements']} elements differ{hint}"


def _source(fault: Log) -> str:
    """The tensor in a fused or packed parameter, by what its name has beside the module's."""
    if not fault["of"]:
        return " (padding)"
    if fault["of"] == fault["parameter"]:
        return ""
    return f" ({fault['of'].removeprefix(module_of(fault['parameter']) + '.')})"


def _numbers(got: float, wanted: float) -> tuple[str, str]:
    """Six digits, or as many as tell them apart."""
    short = f"{got:.6g}", f"{wanted:.6g}"
    return short if short[0] != short[1] else (repr(got), repr(wanted))


def _unknown(plan: Plan, side: SidePlan, rank: int, log: Log) -> Iterator[Breach]:
    """Where a module holds as many bytes as it must; if not, the memory contract says so."""
    names = log["loading"]["unknown"]
    wanted = parameter_bytes(plan, side) if names else {}
    for name in names:
        module = module_of(name)
        if log.get("parameters", {}).get(module, 0) == wanted.get(module, 0):
            message = f"{name} differs from the checkpoint on rank {rank}: no tensor of it belongs there"
            yield Breach(RULE, message, side.role, name, None, rank)


def _other_replicas(plan: Plan, subject: str, logs: Mapping[int, Log]) -> Iterator[Breach]:
    """Ranks that hold the same parameters and hold other values, though each holds what it read itself."""
    faulty = {module_of(f["parameter"]) for log in logs.values() for f in log["loading"]["faults"]}
    firsts: dict[tuple[str, str, int], tuple[int, int]] = {}
    for rank, log in logs.items():
        for divided, marks in log["loading"]["replicas"].items():
            share = plan.place(rank).tp_rank if divided else 0
            for module, mark in marks.items():
                other, expected = firsts.setdefault((divided, module, share), (rank, mark))
                if mark != expected and module not in faulty:
                    message = f"{module}: parameters on rank {rank} differ from those on rank {other}"
                    message += ", and each is what that rank read from the checkpoint"
                    yield Breach(RULE, message, subject, module, None, rank)
