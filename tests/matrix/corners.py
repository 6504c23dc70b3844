"""Named cases that pairs of values do not single out: each is a place where a parallel dataflow is easily wrong."""

from __future__ import annotations

from typing import Any

from tests.matrix.worlds import GRAPH_SIZES, Requests


def _case(scheme: str, tp: int, requests: Requests, mtp_steps: int = 2, **more: Any) -> dict[str, Any]:
    """The fields of a case with expert parallelism on ranks that are threads."""
    common = {"scheme": scheme, "tp": tp, "requests": requests, "mtp_steps": mtp_steps}
    return {**common, "expert_parallel": True, "backend": "loopback", **more}


CORNERS = {
    # Three of the four shards hold only a row that SP added, in the target and in every draft.
    "one token on four ranks": _case("full-sp", 4, ((1,),), mtp_steps=3, aux_layers=(0, 5)),
    # m = n for one row at every tp: a layout guessed from a row count is wrong at each border.
    "one token, SP in MoE layers only": _case("moe-sp", 4, ((1,),), model="dsv32-alternating"),
    # The idle rank issues every collective of the target and of each draft, with a row of no request.
    "an idle rank drafts": _case("full-sp", 2, ((5, 1, 11), ()), mtp_steps=3),
    # Without SP the dispatch runs over the DP group; the idle rank's row is no work. Nothing may be taken from rank 0.
    "an idle first rank without SP": _case("tp", 1, ((), (17,))),
    # Two dummy batches at once, one of them on the first rank.
    "all but the last idle": _case("full-sp", 2, ((), (), (5,))),
    # The sizes of a step are repeated four times for each DP rank, and each rank holds two experts.
    "twelve ranks": _case("full-sp", 4, ((33,), (1,), (5, 2)), mtp_steps=1),
    # Shards of one row everywhere, and most of these rows were added: eight ranks, three tokens.
    "more ranks than rows": _case("full-sp", 4, ((1,), (2,))),
    # Shards of 17, 1 and 1 rows: ceil by DP rank, where the mean over the world is 6.
    "uneven as can be": _case("full-sp", 2, ((33,), (1,), ()), aux_layers=(1, 3)),
    # The same batches through the other two dataflows: whole in one, cut inside MoE layers alone in the other.
    "uneven without SP": _case("tp", 2, ((33,), (1,), ())),
    "uneven, SP in MoE layers only": _case("moe-sp", 2, ((33,), (1,), ())),
    # Dense and MoE layers alternate: rows become shards and whole again, and a state is taken at each border.
    "both borders with all states": _case(
        "moe-sp", 2, ((17,),), model="dsv32-alternating", aux_layers=(0, 1, 2, 3, 4, 5, 6)
    ),
    # The same borders where two DP ranks add different counts of rows.
    "both borders with dp": _case(
        "moe-sp", 3, ((5,), (16,)), model="dsv32-alternating", aux_layers=(0, 1, 2, 3, 4, 5, 6)
    ),
    # The gather at the exit at its widest: the final hidden and every state.
    "all states in one gather": _case("full-sp", 3, ((5, 1, 11),), aux_layers=(0, 1, 2, 3, 4, 5)),
    # Requests of one batch take different adapters, and the DP ranks hold different mixtures.
    "mixed adapters": _case("tp", 2, ((5, 1, 11), (2, 3)), lora_adapters=2, lora_rank=4),
    # Every padded row is routed; a NaN times a weight of zero would be a NaN in each sum over ranks.
    "routed NaN rows, naive": _case(
        "full-sp", 2, ((5,), (1,)), all2all_backend="naive", pad_to=8, padding_content="nan", skip_padding=False
    ),
    # The same where rows travel: their NaN must come back to them alone.
    "routed NaN rows, all to all": _case(
        "full-sp", 2, ((5,), (1,)), all2all_backend="all_to_all", pad_to=8, padding_content="nan", skip_padding=False
    ),
    # All rows of the idle rank are masked: it sends none, and takes part in the exchange all the same.
    "nothing to send": _case("full-sp", 2, ((3,), ()), all2all_backend="all_to_all"),
    # One buffer, two masks: rows that were padding in the earlier step hold tokens now.
    "a mask that shrinks": _case("full-sp", 2, ((17,),), previous=((9,),), pad_to=32, padding_content="stale"),
    # The reverse: tokens of the earlier step lie in what is padding now.
    "a mask that grows": _case("full-sp", 2, ((9,),), previous=((17,),), pad_to=32, padding_content="stale"),
    # A DP rank goes idle and its buffer is full of the earlier step's rows, while the other one wakes.
    "stale rows on a rank gone idle": _case(
        "full-sp", 2, ((9,), ()), previous=((), (17,)), graph_sizes=GRAPH_SIZES, padding_content="stale"
    ),
    # A captured size that tp does not divide: SP adds two rows behind seven of the graph.
    "both paddings": _case("full-sp", 3, ((9,),), graph_sizes=GRAPH_SIZES, padding_content="random"),
    # No rounding to a grid hides an error below it: held to the bound of plain float64.
    "plain float64": _case("full-sp", 2, ((17,), (5,)), numerics="float64"),
    # The same for the sum that is fused with the norm.
    "plain float64 without SP": _case("tp", 2, ((17,), (5,)), numerics="float64"),
    # The only token's experts are on the idle rank, and its own rank's experts see nothing but a dummy row of zeros.
    "a reference whose token travels": _case(
        "auto",
        1,
        ((1,), ()),
        reference="optimized:tp",
        candidate="reference",
        skip_padding=False,
        mtp_steps=0,
        seed=2,
    ),
    # Below float64 choices are replayed: onto shards, and back onto requests one by one.
    "replayed choices, all to all": _case(
        "full-sp", 2, ((17, 2), (5,)), all2all_backend="all_to_all", numerics="float32"
    ),
    "replayed choices onto the plain model": _case(
        "auto", 2, ((9, 8),), reference="optimized:full-sp", candidate="reference", numerics="float32"
    ),
}
