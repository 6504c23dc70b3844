"""What all spaces say alike: which ranks and dataflows there are, and who is compared with whom."""

from __future__ import annotations

from typing import Any

from tests.matrix.space import Row, Rule

Requests = tuple[tuple[int, ...], ...]
Batches = tuple[tuple[tuple[int, int], ...], ...]
"""(New, cached) tokens of each request, by DP rank; () is an idle rank."""

GRAPH_SIZES = (1, 2, 4, *range(8, 65, 8))

# The tool refuses these, or a value would be one in name only; that it refuses is for other tests.
RULES = (
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
)


def sides_of(row: Row) -> dict[str, Any]:
    """Who is compared with whom.

    ``pair`` is a plain reference on all ranks or on the first of each DP rank, an optimized one in ``tp`` or
    ``full-sp``, or an optimized reference in ``scheme`` with the plain model as candidate.
    """
    scheme = str(row["scheme"])
    if row["pair"] == "swapped":
        return {"reference": f"optimized:{scheme}", "candidate": "reference"}
    world = 1 if row["pair"] == "alone" else None
    reference = f"optimized:{str(row['pair']).removeprefix('from-')}"
    plain = not str(row["pair"]).startswith("from-")
    return {"reference": "reference" if plain else reference, "reference_world": world, "scheme": scheme}


def requests_of(batches: Batches) -> dict[str, Requests]:
    """The fields of a case that has these batches."""
    new, cached = (tuple(tuple(tokens[i] for tokens in here) for here in batches) for i in (0, 1))
    return {"requests": new, "cached": cached}


def world(row: Row) -> int:
    """Ranks of the case, dp times tp; of one not chosen yet there is one."""
    return int(row.get("dp", 1)) * int(row.get("tp", 1))
