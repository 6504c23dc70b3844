"""The space of cases that decode: cached tokens, drafts, verification, generation, and limits that end them.

The models have few layers: what repeats over layers is for cases with whole prompts.
"""

from __future__ import annotations

from typing import Any

from tests.matrix.space import Row, Rule, Space, Value
from tests.matrix.worlds import GRAPH_SIZES, RULES, Batches, requests_of, sides_of, world

AXES: dict[str, tuple[Value, ...]] = {
    "tp": (1, 2, 3, 4),
    "dp": (1, 2),
    "scheme": ("tp", "moe-sp", "full-sp"),
    "expert_parallel": (True, False),
    "lora_adapters": (0, 2),
    "all2all_backend": ("allgather_reducescatter", "naive", "all_to_all"),
    "mix": ("one decode", "decode", "prefill", "chunked", "mixed", "wide"),
    "others": ("alone", "same", "idle", "idle first", "one decode", "prefill", "other"),
    "padding": ("none", "snug", "wide", "sizes"),
    "padding_content": ("zero", "random", "nan", "stale"),
    "skip_padding": (True, False),
    "mtp_steps": (0, 1, 2, 3, 4),
    "mtp_layers": (1, 2),
    "generate": (0, 1, 3),
    "vocabulary": (250, 2, 1),
    "index_topk": (8, 64, 2),
    "room": ("plenty", "two", "one"),
    "model": ("dsv32-tiny", "dsv32-alternating"),
    "fused_eh_norm": (False, True),
    "pair": ("plain", "alone", "from-tp", "swapped"),
}
"""Of a vocabulary of one every draft is accepted, of two some are. The longest prompt has 40 tokens: at ``index_topk``
64 all keys are chosen everywhere. ``room``: positions that the model has behind the longest prompt."""

DEEP: tuple[tuple[str, ...], ...] = (
    ("mix", "scheme", "mtp_steps"),
    ("mix", "generate", "room"),
    ("scheme", "mtp_steps", "generate", "vocabulary"),
)
"""Axes whose values meet in threes: what decides how many rows each forward has."""

_DECODE = ((1, 40), (1, 3), (1, 17))
_MIXED = ((1, 40), (5, 0), (3, 12))
_BATCHES: dict[Value, tuple[tuple[int, int], ...]] = {
    "one decode": ((1, 9),),
    "decode": _DECODE,
    "prefill": ((5, 0), (1, 0), (11, 0)),
    "chunked": ((3, 12), (8, 5)),
    "mixed": _MIXED,
    "wide": tuple((1, held) for held in (2, 31, 4, 16, 1, 7, 8, 24, 3, 15, 5, 9)),
}
"""(New, cached) tokens of each request of one data-parallel rank."""

_WIDE = 12  # rows that a wide pad_to has over the largest rank's: a step that verifies drafts fits mostly, too
_POSITIONS = {"plenty": 1000, "two": 2, "one": 1}
_FIELDS = (
    *("tp", "expert_parallel", "lora_adapters", "all2all_backend", "padding_content", "skip_padding"),
    *("mtp_steps", "generate", "model"),
)
_KEYS = {
    "vocabulary": "vocab_size",
    "mtp_layers": "num_nextn_predict_layers",
    "index_topk": "index_topk",
    "fused_eh_norm": "fused_eh_norm",
}
"""Axes that are config keys."""


def _batches_of(row: Row) -> Batches:
    own = _BATCHES[row["mix"]]
    by_ranks: dict[Value, Batches] = {
        "alone": (own,),
        "same": (own, own),
        "idle": (own, ()),
        "idle first": ((), own),
        "one decode": (own, ((1, 23),)),
        "prefill": (own, ((7, 0), (2, 0))),
        "other": (own, _DECODE if row["mix"] == "mixed" else _MIXED),
    }
    return by_ranks[row["others"]]


def _rows(row: Row) -> list[int]:
    """Rows of the case's own step by DP rank."""
    return [sum(new for new, _ in here) for here in _batches_of(row)]


def _has_padding(row: Row) -> bool:
    """Whether a DP rank's own step holds rows of no request; an idle rank's dummy batch is one such row."""
    counts = _rows(row)
    most = max(counts)
    graphs: dict[Value, int] = {
        "none": 0,
        "snug": most,
        "wide": most + _WIDE,
        "sizes": min(size for size in GRAPH_SIZES if size >= most),
    }
    return 0 in counts or min(counts) < graphs[row["padding"]]


def _meets_limit(row: Row) -> bool:
    """Whether the longest request wants positions behind the last one, even if none of its drafts is accepted."""
    drafts, generated = int(row["mtp_steps"]), int(row["generate"])
    return (generated + drafts if generated else drafts - 1) > _POSITIONS[str(row["room"])]


_RULES = (
    *RULES,
    # Values in name only: a layer that never drafts, a limit out of reach, content that no row takes.
    Rule(("mtp_steps", "mtp_layers"), lambda row: int(row["mtp_layers"]) <= max(1, int(row["mtp_steps"]))),
    Rule(("mtp_steps", "fused_eh_norm"), lambda row: not row["fused_eh_norm"] or bool(row["mtp_steps"])),
    Rule(("mtp_steps", "generate", "room"), lambda row: row["room"] == "plenty" or _meets_limit(row)),
    Rule(
        ("mix", "others", "padding", "padding_content"),
        lambda row: row["padding_content"] == "zero" or _has_padding(row),
    ),
)


def case_of(row: Row) -> dict[str, Any]:
    """The fields of the case that a valid row stands for."""
    batches = _batches_of(row)
    longest = max(sum(tokens) for here in batches for tokens in here)
    sizes = {"num_hidden_layers": 4, "max_position_embeddings": longest + _POSITIONS[str(row["room"])]}
    extra = {"snug": 0, "wide": _WIDE}.get(str(row["padding"]))
    return {
        **{name: row[name] for name in _FIELDS},
        **sides_of(row),
        **requests_of(batches),
        "pad_to": None if extra is None else max(_rows(row)) + extra,
        "graph_sizes": GRAPH_SIZES if row["padding"] == "sizes" else (),
        "lora_rank": 4 if row["lora_adapters"] else 0,
        "overrides": tuple({**sizes, **{key: row[axis] for axis, key in _KEYS.items()}}.items()),
        "numerics": "exact",
        "backend": "loopback",
        "seed": 0,
    }


def _cost(row: Row) -> int:
    """By forwards and ranks: a draft step is one layer, a target step four, and building an engine like another."""
    step = 3 + int(row.get("mtp_steps", 0))
    return 12 + world(row) * (6 + step * (1 + int(row.get("generate", 0))))


DECODING = Space("decoding", AXES, _RULES, DEEP, _cost, case_of)
