"""The space of cases with whole prompts: its axes, and the case that a row of values stands for."""

from __future__ import annotations

from typing import Any

from tests.matrix.space import Row, Rule, Space, Value
from tests.matrix.worlds import GRAPH_SIZES, RULES, Requests, sides_of, world

AXES: dict[str, tuple[Value, ...]] = {
    "tp": (1, 2, 3, 4),
    "dp": (1, 2, 3),
    "scheme": ("tp", "moe-sp", "full-sp"),
    "expert_parallel": (True, False),
    "lora_adapters": (0, 1, 2),
    "all2all_backend": ("allgather_reducescatter", "naive", "all_to_all"),
    "first": ("1", "2", "3", "5", "16", "17", "33", "5,1,11", "-"),
    "others": ("alone", "equal", "idle", "one", "other"),
    "previous": ("none", "few", "many"),
    "padding": ("none", "snug", "loose", "wide", "sizes"),
    "padding_content": ("zero", "random", "nan", "stale"),
    "skip_padding": (True, False),
    "mtp_steps": (0, 1, 2, 3),
    "aux_layers": ("none", "first", "some", "all"),
    "model": ("dsv32-tiny", "dsv32-alternating"),
    "router": ("groups", "one-group", "unnormalised"),
    "pair": ("plain", "alone", "from-tp", "from-full-sp", "swapped"),
}

DEEP: tuple[tuple[str, ...], ...] = (
    ("tp", "dp", "scheme", "all2all_backend", "skip_padding", "padding_content"),
    ("tp", "scheme", "first"),
)
"""Axes whose values meet in threes: where sequence parallelism broke most often in the field."""

_ROOM = {"snug": 0, "loose": 1, "wide": 6}  # rows that pad_to has over the largest DP rank's
# An earlier step, cut to the DP ranks there are. No first rank of AXES has as many rows, and other ranks idle.
_PREVIOUS: dict[Value, Requests] = {"few": ((4,), (), (1,)), "many": ((7, 13), (6,), ())}
_NOT_FIELDS = {
    "dp",
    "first",
    "others",
    "previous",
    "padding",
    "aux_layers",
    "router",
    "pair",
    "scheme",
}  # axes that a field is made from
_LAYERS = {"dsv32-tiny": 5, "dsv32-alternating": 6}
_AUX = {"none": (), "first": (0,), "some": (1, 3)}
_ROUTERS: dict[Value, dict[str, Value]] = {
    "groups": {},
    "one-group": {"n_group": 1, "topk_group": 1},
    "unnormalised": {"norm_topk_prob": False},
}


_RULES = (
    *RULES,
    Rule(("dp", "first", "others"), lambda row: any(requests_of(row))),
    # Content that no row takes would be a value in name only.
    Rule(("padding_content", "previous"), lambda row: row["padding_content"] != "stale" or row["previous"] != "none"),
    Rule(
        ("dp", "first", "others", "previous", "padding", "padding_content"),
        lambda row: row["padding_content"] == "zero" or has_padding(row),
    ),
)


def requests_of(row: Row) -> Requests:
    """New tokens of each request, by DP rank; () is an idle rank."""
    first = () if row["first"] == "-" else tuple(map(int, str(row["first"]).split(",")))
    few_or_many = (33,) if sum(first) < 16 else (2,)
    rest: dict[Value, Requests] = {
        "alone": (),
        "equal": (first, first),
        "idle": ((), first),
        "one": ((1,), ()),
        "other": (few_or_many, (1,)),
    }
    return (first, *rest[row["others"]])[: int(row["dp"])]


def previous_of(row: Row) -> Requests | None:
    """The requests of the earlier step, by DP rank, or None."""
    return None if row["previous"] == "none" else _PREVIOUS[row["previous"]][: int(row["dp"])]


def has_padding(row: Row) -> bool:
    """Whether a DP rank's step holds rows of no request; an idle rank's dummy batch is one such row."""
    counts = [sum(requests) for requests in requests_of(row)]
    return 0 in counts if row["padding"] == "none" else min(counts) < _padded(row, max(counts))


def _padded(row: Row, largest: int) -> int:
    pad_to = _pad_to(row)
    return pad_to if pad_to is not None else next(size for size in GRAPH_SIZES if size >= largest)


def _pad_to(row: Row) -> int | None:
    """A size that both steps fit in."""
    if row["padding"] not in _ROOM:
        return None
    return max(map(sum, (*requests_of(row), *(previous_of(row) or ())))) + _ROOM[str(row["padding"])]


def case_of(row: Row) -> dict[str, Any]:
    """The fields of the case that a valid row stands for."""
    return {
        **{name: row[name] for name in AXES if name not in _NOT_FIELDS},
        **sides_of(row),
        "requests": requests_of(row),
        "previous": previous_of(row),
        "pad_to": _pad_to(row),
        "graph_sizes": GRAPH_SIZES if row["padding"] == "sizes" else (),
        "aux_layers": _AUX.get(str(row["aux_layers"]), tuple(range(_LAYERS[str(row["model"])] + 1))),
        "lora_rank": 4 if row["lora_adapters"] else 0,
        "overrides": tuple({**_ROUTERS[row["router"]], **_sizes_for(row)}.items()),
        "numerics": "exact",
        "backend": "loopback",
        "seed": 0,
    }


def _sizes_for(row: Row) -> dict[str, Value]:
    """Nine ranks divide neither the presets' experts nor their width."""
    if world(row) != 9:
        return {}
    experts: dict[str, Value] = {"n_routed_experts": 72}
    return experts if row["expert_parallel"] else {**experts, "moe_intermediate_size": 144}


def _cost(row: Row) -> int:
    """Ranks, and two more for what a case costs whatever its size."""
    return world(row) + 2


PROMPTS = Space("covering", AXES, _RULES, DEEP, _cost, case_of)
