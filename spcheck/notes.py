"""What a case's settings come to: the rows that its ranks run, and settings that nothing in it exercises. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from spcheck.phases import DUMMY_ROWS, Phase
from spcheck.plan import NO_ADAPTER, Plan


def batch_text(plan: Plan) -> str:
    """``batch 6/11/idle rows, graph 16, shards of 8, 31 rows padded (nan, not routed)``, of the case's target step."""
    targets = _targets(plan)
    words = [f"batch {'/'.join(str(p.real) if p.real else 'idle' for p in targets)} rows"]
    if plan.case.pad_to is not None or any(p.padded > (p.real or DUMMY_ROWS) for p in targets):
        words.append(f"graph {_each(p.padded for p in targets)}")
    if plan.candidate.sharded:
        words.append(f"shards of {_each(p.shard_rows(plan.case.tp) for p in targets)}")
    padded = sum(_padded(plan, phase) for phase in targets)
    if not plan.candidate.plain and padded:
        graph = any(p.padded > p.real for p in targets)
        content = f"{plan.case.padding_content}, " if graph else ""
        words.append(f"{padded} padded ({content}{'not routed' if plan.case.skip_padding else 'routed'})")
    return ", ".join(words)


def weights_text(plan: Plan) -> str:
    """``random weights, seed 0``, or which folder they are from."""
    return f"random weights, seed {plan.case.seed}" if plan.folder is None else f"weights of {plan.folder}"


def notes(plan: Plan) -> list[str]:
    """What was set and changes nothing in this case, each as a sentence: a pass says nothing about it."""
    return list(_notes(plan))


def _notes(plan: Plan) -> Iterator[str]:
    case = plan.case
    sides = [side for _, side in plan.sides if not side.plain]
    phases = [phase for phases in plan.phases for phase in phases]
    if plan.model.ignores_quantization:
        yield "the weights are random: quantization_config is ignored"
    if case.padding_content != "zero" and not any(p.padded > p.real for p in phases):
        yield f"no row is padded: --padding-content {case.padding_content} changes nothing"
    if case.graph_sizes and all(p.padded == (p.real or DUMMY_ROWS) for p in phases):
        yield "no captured size adds a row: --graph-sizes changes nothing"
    if case.all2all_backend != "allgather_reducescatter" and not any(s.sharded or case.dp > 1 for s in sides):
        yield f"no row is dispatched: --all2all-backend {case.all2all_backend} changes nothing"
    if case.prefill_chunk is not None:
        longest = max(n for here in case.requests for n in here)
        if longest <= case.prefill_chunk:
            yield f"no prompt is longer: --prefill-chunk {case.prefill_chunk} changes nothing"
        elif -(-longest // case.prefill_chunk) - 1 > case.generate:
            yield f"--generate {case.generate} ends before a prompt of {longest} new tokens is whole"
    used = {adapter for dp_rank in range(case.dp) for adapter in plan.adapters(dp_rank)} - {NO_ADAPTER}
    if case.lora_adapters and (unused := sorted(set(range(case.lora_adapters)) - used)):
        yield f"no request uses LoRA adapter{'s' if len(unused) > 1 else ''} {', '.join(map(str, unused))}"


def _targets(plan: Plan) -> list[Phase]:
    """The case's own target step on every data-parallel rank."""
    targets = [[phase for phase in phases if phase.kind == "target"] for phases in plan.phases]
    return [phases[plan.own_step] for phases in targets]


def _padded(plan: Plan, phase: Phase) -> int:
    rows = phase.shard_rows(plan.case.tp) * plan.case.tp if plan.candidate.sharded else phase.padded
    return rows - phase.real


def _each(numbers: Iterator[int]) -> str:
    """One number where all are the same."""
    words = [str(n) for n in numbers]
    return words[0] if len(set(words)) == 1 else "/".join(words)
