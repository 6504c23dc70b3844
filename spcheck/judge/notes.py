"""What a case's settings come to: the rows that its ranks run, and settings that nothing in it exercises. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from spcheck.plan.phases import DUMMY_ROWS, Phase
from spcheck.plan.plan import NO_ADAPTER, Plan
from spcheck.plan.schemes import SidePlan


def batch_text(plan: Plan) -> str:
    """``batch 6/11/idle rows, graph 16, shards of 8, 31 rows padded (nan, not routed)``, of the case's target step."""
    targets = _targets(plan)
    words = [f"batch {'/'.join(str(p.real) if p.real else 'idle' for p in targets)} rows"]
    if plan.case.pad_to is not None or any(p.padded > (p.real or DUMMY_ROWS) for p in targets):
        words.append(f"graph {_each(p.padded for p in targets)}")
    if plan.candidate.sharded:
        words.append(f"shards of {_each(p.shard_rows(plan.case.tp) for p in targets)}")
    padded = sum(_rows_of(plan.candidate, phase, plan.case.tp) - phase.real for phase in targets)
    if not plan.candidate.plain and padded:
        graph = any(p.padded > p.real for p in targets)
        content = f"{plan.case.padding_content}, " if graph else ""
        words.append(f"{padded} padded ({content}{'not routed' if plan.case.skip_padding else 'routed'})")
    return ", ".join(words)


def weights_text(plan: Plan) -> str:
    """``random weights, seed 0``, or which folder they are from."""
    return f"random weights, seed {plan.case.seed}" if plan.folder is None else f"weights of {plan.folder}"


def notes(plan: Plan) -> list[str]:
    """Settings of the case that change nothing in it, each as a sentence: a pass says nothing about them."""
    return [sentence for _, sentence in _notes(plan)]


def idle_settings(plan: Plan) -> list[str]:
    """The same settings by name: options, and keys of the model's config."""
    return [setting for setting, _ in _notes(plan) if setting]


def _notes(plan: Plan) -> Iterator[tuple[str, str]]:
    """(setting, sentence); the setting is empty where only a part of it changes nothing."""
    yield from _padding_notes(plan)
    yield from _world_notes(plan)
    yield from _prompt_notes(plan)
    yield from _config_notes(plan)


def _padding_notes(plan: Plan) -> Iterator[tuple[str, str]]:
    case = plan.case
    phases = [phase for phases in plan.phases for phase in phases]
    if plan.model.ignores_quantization:
        yield "", "the weights are random: quantization_config is ignored"
    if case.padding_content != "zero" and not any(p.padded > p.real for p in phases):
        yield "--padding-content", f"no row is padded: --padding-content {case.padding_content} changes nothing"
    unpadded = all(p.padded == (p.real or DUMMY_ROWS) for p in phases)
    if case.graph_sizes and unpadded:
        yield "--graph-sizes", "no captured size adds a row: --graph-sizes changes nothing"
    if case.pad_to is not None and unpadded:
        yield "--pad-to", f"no row is added: --pad-to {case.pad_to} changes nothing"
    routed = [_rows_of(side, phase, case.tp) > phase.real for side in _packed(plan) for phase in phases]
    if not case.skip_padding and not (plan.has_moe and any(routed)):
        yield "--no-skip-padding", "no padded row could be routed: --no-skip-padding changes nothing"


def _world_notes(plan: Plan) -> Iterator[tuple[str, str]]:
    case, sides = plan.case, _packed(plan)
    if case.all2all_backend != "allgather_reducescatter" and not any(s.sharded or case.dp > 1 for s in sides):
        yield "--all2all-backend", f"no row is dispatched: --all2all-backend {case.all2all_backend} changes nothing"
    if not case.expert_parallel and not (sides and plan.has_moe and case.ranks > 1):
        yield "--no-expert-parallel", "no expert is divided: --no-expert-parallel changes nothing"
    if case.reference_world == 1 and case.tp == 1:
        yield "--reference-world", "a DP rank has one rank: --reference-world 1 changes nothing"


def _prompt_notes(plan: Plan) -> Iterator[tuple[str, str]]:
    case = plan.case
    if case.prefill_chunk is not None:
        longest = max(n for here in case.requests for n in here)
        if longest <= case.prefill_chunk:
            yield "--prefill-chunk", f"no prompt is longer: --prefill-chunk {case.prefill_chunk} changes nothing"
        elif -(-longest // case.prefill_chunk) - 1 > case.generate:
            yield "", f"--generate {case.generate} ends before a prompt of {longest} new tokens is whole"
    used = {adapter for dp_rank in range(case.dp) for adapter in plan.adapters(dp_rank)} - {NO_ADAPTER}
    if case.lora_adapters and (unused := sorted(set(range(case.lora_adapters)) - used)):
        which = f"LoRA adapter{'s' if len(unused) > 1 else ''} {', '.join(map(str, unused))}"
        yield f"--lora-adapters ({which})", f"no request uses {which}"
    drafting = {phase.draft for phases in plan.phases for phase in phases if phase.kind == "draft" and phase.real}
    if idle := sorted(set(range(case.mtp_steps)) - drafting):
        yield f"--mtp-steps (draft step {idle[0]})", f"no request has a position left for draft step {idle[0]}"


def _config_notes(plan: Plan) -> Iterator[tuple[str, str]]:
    config = plan.config
    if plan.has_moe and 1 < config.n_group == config.topk_group:
        yield "n_group", f"no expert group is left out: n_group {config.n_group} changes nothing"
    drafts = [phase for phases in plan.phases for phase in phases if phase.kind == "draft"]
    if config.mtp_zero_first_embedding and not any(position == 0 for p in drafts for _, position in p.rows):
        yield "mtp_zero_first_embedding", "no draft has position 0: mtp_zero_first_embedding changes nothing"


def _packed(plan: Plan) -> list[SidePlan]:
    """The sides that pad, dispatch and divide experts."""
    return [side for _, side in plan.sides if not side.plain]


def padded_rows(plan: Plan, phase: Phase) -> int:
    """Rows of a forward that are no token, on the side that has most of them; a plain side has none."""
    return max((_rows_of(side, phase, plan.case.tp) - phase.real for side in _packed(plan)), default=0)


def _rows_of(side: SidePlan, phase: Phase, tp: int) -> int:
    """Rows of one forward of a side on a data-parallel rank, padded ones included."""
    return phase.shard_rows(tp) * tp if side.sharded else phase.padded


def _targets(plan: Plan) -> list[Phase]:
    """The case's own target step on every data-parallel rank."""
    targets = [[phase for phase in phases if phase.kind == "target"] for phases in plan.phases]
    return [phases[plan.own_step] for phases in targets]


def _each(numbers: Iterator[int]) -> str:
    """One number where all are the same."""
    words = [str(n) for n in numbers]
    return words[0] if len(set(words)) == 1 else "/".join(words)
