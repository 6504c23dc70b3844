"""The axes of the case matrix, which of their values may meet, and the case that a row of values stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Value = int | str | bool
Row = dict[str, Value]
Requests = tuple[tuple[int, ...], ...]

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
"""``pair``: a plain reference on all ranks or on the first of each DP rank, an optimized one in ``tp`` or ``full-sp``,
or an optimized reference in ``scheme`` with the plain model as candidate."""

DEEP: tuple[tuple[str, ...], ...] = (
    ("tp", "dp", "scheme", "all2all_backend", "skip_padding", "padding_content"),
    ("tp", "scheme", "first"),
)
"""Axes whose values meet in threes: where sequence parallelism broke most often in the field."""

GRAPH_SIZES = (1, 2, 4, *range(8, 65, 8))
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


class Rule(NamedTuple):
    """What a row must hold, told from the axes it reads alone."""

    axes: tuple[str, ...]
    holds: Callable[[Row], bool]


RULES = (
    # The tool refuses these; that it does is for other tests.
    Rule(("scheme", "tp"), lambda row: row["scheme"] == "tp" or row["tp"] != 1),
    Rule(("scheme", "expert_parallel"), lambda row: row["scheme"] == "tp" or bool(row["expert_parallel"])),
    Rule(("scheme", "lora_adapters"), lambda row: row["scheme"] == "tp" or not row["lora_adapters"]),
    # Without dispatch the backend is not used: one value is enough.
    Rule(
        ("all2all_backend", "dp", "scheme"),
        lambda row: row["all2all_backend"] == "allgather_reducescatter" or row["dp"] != 1 or row["scheme"] != "tp",
    ),
    Rule(("pair", "scheme"), lambda row: row["pair"] != f"from-{row['scheme']}"),  # a pair needs two
    Rule(("pair", "tp"), lambda row: row["pair"] != "from-full-sp" or row["tp"] != 1),
    Rule(("pair", "tp"), lambda row: row["pair"] != "alone" or row["tp"] != 1),  # one rank is always alone
    Rule(("pair", "expert_parallel"), lambda row: row["pair"] != "from-full-sp" or bool(row["expert_parallel"])),
    Rule(("pair", "lora_adapters"), lambda row: row["pair"] != "from-full-sp" or not row["lora_adapters"]),
    Rule(("dp", "others"), lambda row: (row["dp"] == 1) == (row["others"] == "alone")),
    Rule(("dp", "first", "others"), lambda row: any(requests_of(row))),
    # Content that no row takes would be a value in name only.
    Rule(("padding_content", "previous"), lambda row: row["padding_content"] != "stale" or row["previous"] != "none"),
    Rule(
        ("dp", "first", "others", "previous", "padding", "padding_content"),
        lambda row: row["padding_content"] == "zero" or has_padding(row),
    ),
)


def is_valid(row: Row) -> bool:
    """Whether a full row is a case that can exist and in which every value means something."""
    return all(rule.holds(row) for rule in RULES)


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


def sides_of(row: Row) -> dict[str, Any]:
    """Who is compared with whom."""
    scheme = str(row["scheme"])
    if row["pair"] == "swapped":
        return {"reference": f"optimized:{scheme}", "candidate": "reference"}
    world = 1 if row["pair"] == "alone" else None
    reference = f"optimized:{str(row['pair']).removeprefix('from-')}"
    plain = not str(row["pair"]).startswith("from-")
    return {"reference": "reference" if plain else reference, "reference_world": world, "scheme": scheme}


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


def world(row: Row) -> int:
    """Ranks of the case: dp times tp."""
    return int(row["dp"]) * int(row["tp"])


def completions(fixed: Row) -> Iterator[Row]:
    """Every valid row that holds ``fixed``, depth first: a rule broken by the values so far stays broken."""
    if not all(rule.holds(fixed) for rule in RULES if fixed.keys() >= set(rule.axes)):
        return
    axis = next((name for name in AXES if name not in fixed), None)
    if axis is None:
        yield fixed
        return
    for value in AXES[axis]:
        yield from completions({**fixed, axis: value})
