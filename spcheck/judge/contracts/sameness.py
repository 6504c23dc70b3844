"""Probes at which nothing was compared: the reference has zeros in all rows, or one value for different tokens.

Two implementations that do the wrong thing with such a value are as equal as two that do the right thing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spcheck.families.deepseek.rows import phases_of_probe
from spcheck.plan.phases import layer_of
from spcheck.plan.plan import Plan

Reports = Sequence[dict[str, Any]]

ZERO, ALIKE = "zero", "alike"

_FEW_TOKENS = 8  # in a vocabulary: a handful of chosen keys may all hold the same one
_FEW_KEYS = 2
_BITS = {"exact": 12, "float64": 52, "float32": 23, "bfloat16": 7}  # that two values of a type have to differ in
_CHANCE = 40  # bits that agree by chance in no run


@dataclass(frozen=True)
class SameRows:
    """A probe whose rows are all equal, over the whole case and all ranks.

    ``tokens`` and ``histories`` count the different tokens, and sequences of tokens, of its rows: 2 are two or more.
    """

    probe: str
    rows: int
    width: int
    zero: bool
    tokens: int
    histories: int

    @property
    def state(self) -> str:
        """``zero`` or ``alike``."""
        return ZERO if self.zero else ALIKE


@dataclass(frozen=True)
class Degenerate:
    """A probe at which nothing was compared, and why: its rows are ``zero``, or ``alike``."""

    probe: str
    rows: int
    state: str


@dataclass(frozen=True)
class Excuse:
    """Why a healthy reference may have equal rows at the probes that ``pattern`` finds."""

    pattern: str
    state: str
    holds: Callable[[Plan, SameRows], bool]
    reason: str

    def covers(self, plan: Plan, same: SameRows) -> bool:
        """Whether it does for this probe in this case."""
        if same.state != self.state or not re.search(self.pattern, same.probe):
            return False
        return self.holds(plan, same)


def degenerate_probes(plan: Plan, reports: Reports) -> tuple[Degenerate, ...]:
    """In the order of execution; without those that have an excuse."""
    return tuple(
        Degenerate(same.probe, same.rows, same.state)
        for same in same_rows(reports)
        if not any(excuse.covers(plan, same) for excuse in EXCUSES)
    )


def same_rows(reports: Reports) -> Iterator[SameRows]:
    """The probes whose rows are equal on every rank, and from rank to rank."""
    logs = [report.get("sameness", {}) for report in reports]
    varied = {probe for log in logs for probe in log.get("varied", ())}
    by_probe: dict[str, list[dict[str, Any]]] = {}
    for log in logs:
        for probe, known in log.get("alike", {}).items():
            by_probe.setdefault(probe, []).append(known)
    for probe, known in by_probe.items():
        if probe not in varied and len({rank["digest"] for rank in known}) == 1:
            yield _over_ranks(probe, known)


def _over_ranks(probe: str, known: Sequence[dict[str, Any]]) -> SameRows:
    tokens, histories = ({x for rank in known for x in rank[name]} for name in ("tokens", "histories"))
    rows, width = sum(rank["rows"] for rank in known), max(rank["width"] for rank in known)
    return SameRows(probe, rows, width, known[0]["zero"], len(tokens), len(histories))


def _always(_: Plan, __: SameRows) -> bool:
    return True


def _at_position_0(plan: Plan, same: SameRows) -> bool:
    """Every row of an MTP layer stands at position 0, and the config zeroes its embedding."""
    phases = [phase for d in range(plan.case.dp) for phase in phases_of_probe(same.probe, plan, d)]
    return plan.config.mtp_zero_first_embedding and all(position == 0 for p in phases for _, position in p.rows)


def _one_key(plan: Plan, same: SameRows) -> bool:
    layer = layer_of(same.probe)
    later_mtp = layer is not None and layer > plan.config.num_hidden_layers
    return plan.config.index_topk == 1 or later_mtp or _most_keys(plan, same.probe) == 1


def _most_keys(plan: Plan, probe: str) -> int:
    return max((phase.keys for d in range(plan.case.dp) for phase in phases_of_probe(probe, plan, d)), default=0)


def _top_1(plan: Plan, _: SameRows) -> bool:
    return plan.config.num_experts_per_tok == 1 and plan.config.norm_topk_prob


def _one_token(_: Plan, same: SameRows) -> bool:
    return same.tokens < 2


def _one_history(_: Plan, same: SameRows) -> bool:
    return same.histories < 2


def _few_choices(plan: Plan, _: SameRows) -> bool:
    """Rows leave keys out, and the few that they keep may all be of one token."""
    most = max((phase.keys for phases in plan.phases for phase in phases), default=0)
    k = plan.config.index_topk
    return k is not None and k < most and (k <= _FEW_KEYS or plan.config.vocab_size <= _FEW_TOKENS)


def _one_token_of_few(plan: Plan, same: SameRows) -> bool:
    return _few_choices(plan, same) and _one_token(plan, same)


def _by_chance(plan: Plan, same: SameRows) -> bool:
    return same.width * (same.rows - 1) * _BITS[plan.case.numerics] < _CHANCE


EXCUSES = (
    Excuse(
        r"\.indexer\.choose\.in$",
        ZERO,
        _always,
        "index scores pass a ReLU: a score is zero where no head's product is positive",
    ),
    Excuse(
        r"\.\d+\.(embed_tokens|enorm)\.out$",
        ZERO,
        _at_position_0,
        "the config zeroes an MTP layer's embedding at position 0, and there is no other row",
    ),
    Excuse(r"\.softmax\.out$", ALIKE, _one_key, "the probability of an only key is 1"),
    Excuse(
        r"\.(indexer\.choose\.in|o_proj\.in|self_attn\.out)$",
        ALIKE,
        _few_choices,
        "rows may keep the same few keys, or keys of one token",
    ),
    Excuse(r"\.gate\.weigh\.out$", ALIKE, _top_1, "a single expert's weight is normalised to 1"),
    Excuse(
        r"""(?x) (^model|\.\d+)\.embed_tokens\.out$ | \.enorm\.out$ | ^model\.aux\.0$
            | ^model\.layers\.0\.(input_layernorm\.|self_attn\.(q_a_layernorm|kv_a_layernorm|k_rope|q_split|q_rope)\.)
            | ^model\.layers\.0\.self_attn\.indexer\.(k_norm|k_rope|q_rope|head_weights)\.""",
        ALIKE,
        _one_token,
        "up to the first attention a row follows from its own token, and all rows have the same one",
    ),
    Excuse(
        r"",
        ALIKE,
        _one_history,
        "all rows have the same tokens before them, or one token throughout, as in a vocabulary of one",
    ),
    Excuse(r"", ALIKE, _one_token_of_few, "all rows have the same token, and may keep only keys of one other token"),
    Excuse(r"", ALIKE, _by_chance, "so few numbers may agree by chance"),
)
"""Every case in which equal rows are right, each with its reason."""
