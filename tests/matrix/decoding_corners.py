"""Named cases that decode, each at a place where drafts, limits and caches meet a parallel dataflow."""

from __future__ import annotations

from typing import Any

from tests.matrix.worlds import Batches, requests_of


def _case(scheme: str, tp: int, batches: Batches, mtp_steps: int = 2, **more: Any) -> dict[str, Any]:
    """The fields of a case that generates, on ranks that are threads; config keys among ``more`` are in ``config``."""
    config = {"num_hidden_layers": 4, "vocab_size": 2, **more.pop("config", {})}
    common = {"scheme": scheme, "tp": tp, **requests_of(batches), "mtp_steps": mtp_steps, "generate": 2}
    return {**common, "overrides": tuple(config.items()), "backend": "loopback", **more}


_THREE = ((1, 40), (1, 3), (1, 17))
_MANY = tuple((1 + (i % 5 == 0) * (i % 3), (i * 7) % 20 + 1) for i in range(64))

DECODING_CORNERS = {
    # A prompt is fed in three pieces beside requests whose drafts are verified; so are drafts that nobody asked for.
    "pieces of a prompt beside verification": _case(
        "full-sp",
        2,
        (((9, 0), (1, 40), (2, 0)), ((5, 3),)),
        prefill_chunk=4,
        mtp_steps=3,
        config={"num_nextn_predict_layers": 2},
    ),
    # Without drafts, and with an idle rank; the last piece is one token.
    "pieces of a prompt, plain greedy": _case("moe-sp", 2, (((7, 2), (1, 1)), ()), prefill_chunk=3, mtp_steps=0),
    # The request that goes on drafting is not the first one of the batch.
    "the first request stops drafting": _case(
        "tp", 1, (((3, 3), (1, 2)),), mtp_steps=4, config={"vocab_size": 250, "max_position_embeddings": 7}
    ),
    # Two ranks of other row counts, and a fixed size that a step fills just: it runs a graph all the same.
    "a step that fills its graph": _case("tp", 1, (((2, 0),), ((2, 0), (2, 0))), pad_to=4, mtp_steps=3),
    # Draft steps of one and of two rows: the ranks agree on two, as both run captured graphs.
    "draft steps agree on the larger graph": _case(
        "tp", 1, (((1, 0),), ((1, 0), (2, 0))), graph_sizes=(1, 2, 4), mtp_steps=3
    ),
    # The last request has the fewest keys, the first more than are chosen: top-k must run for all.
    "scored for the sake of one request": _case("full-sp", 2, (((1, 9), (1, 0)),), config={"index_topk": 4}),
    # Three of four shards hold only a row that SP added; when two drafts are verified one still does.
    "one decode row on four ranks": _case("full-sp", 4, (((1, 40),),), mtp_steps=3),
    # The same where rows become shards and whole again inside a layer.
    "one decode row, SP in MoE layers only": _case("moe-sp", 4, (((1, 40),),), model="dsv32-alternating"),
    # The idle rank issues every collective of each verification and draft, and verifies nothing itself.
    "an idle rank beside one that decodes": _case("full-sp", 2, (((1, 9), (1, 3)), ()), mtp_steps=3),
    # Without SP over DP alone, on the first rank; its draft step 0 has other rows than its target step's context.
    "an idle first rank without SP": _case("tp", 1, ((), ((1, 9), (1, 3))), mtp_steps=3),
    # All requests of the first rank are at the limit: from draft step 2 on it runs a dummy row, the other drafts on.
    "a rank at the limit beside one that drafts": _case(
        "full-sp", 2, (((1, 20), (1, 20)), ((1, 3), (1, 7))), mtp_steps=4, config={"max_position_embeddings": 22}
    ),
    # One rank's only request has filled the last position: it is gone when the other rank's drafts are verified.
    "a rank that ends while the other verifies": _case(
        "moe-sp", 2, (((1, 20),), ((1, 3),)), mtp_steps=3, config={"max_position_embeddings": 21}
    ),
    # Of two requests on a rank the first ends: the second one's rows move to the front of every batch.
    "a request that ends before its neighbour": _case(
        "tp", 2, (((1, 20), (1, 3)),), mtp_steps=3, generate=3, config={"max_position_embeddings": 22}
    ),
    # The last position is sampled for and no draft has one left: a verification of no draft.
    "verification without drafts": _case("full-sp", 2, (((1, 20),),), config={"max_position_embeddings": 22}),
    # Every draft holds: five rows a request in each step, and layer 5 has holes where layer 4 drafted.
    "all drafts accepted, two MTP layers": _case(
        "full-sp",
        2,
        (_THREE, ((1, 9),)),
        mtp_steps=4,
        generate=3,
        config={"vocab_size": 1, "num_nextn_predict_layers": 2},
    ),
    # The layer of the last draft step is the first one's again; what the middle one keeps is a row a step.
    "three MTP layers in four draft steps": _case(
        "moe-sp", 2, (_THREE,), mtp_steps=4, config={"num_nextn_predict_layers": 3}
    ),
    # One graph and five masks in it: three rows of the step before, five of this one, more when drafts are verified.
    "a decode graph whose mask shrinks over stale rows": _case(
        "full-sp",
        2,
        (((1, 9), (1, 3), (1, 12), (1, 1), (1, 5)),),
        previous=((2, 1),),
        graph_sizes=(8, 16),
        padding_content="stale",
    ),
    # Graphs only for the case's own step: verification has more rows and runs without one.
    "a verification that no graph holds": _case("full-sp", 2, (_THREE, ((1, 9),)), pad_to=3, padding_content="random"),
    # Every padded row of drafts and verifications is routed, and its NaN comes back to it alone.
    "routed NaN rows in decode graphs": _case(
        "full-sp",
        2,
        (_THREE, ((1, 9),)),
        all2all_backend="all_to_all",
        graph_sizes=(8, 16),
        padding_content="nan",
        skip_padding=False,
    ),
    # Far more requests than a shard has rows, decodes and chunks, uneven over the ranks.
    "64 requests of mixed length": _case(
        "full-sp", 2, (_MANY[:41], _MANY[41:]), generate=1, reference_world=1, config={"num_hidden_layers": 3}
    ),
    # Two of four ranks have no token of the vocabulary at all.
    "a vocabulary smaller than tp": _case("full-sp", 4, (_THREE,)),
    # Four ranks hold three tokens and one row of padding, which a sampler must never choose.
    "a vocabulary that tp does not divide": _case("tp", 4, (_THREE,), config={"vocab_size": 3}),
    # The first forwards choose all keys unscored; one row later they score, over keys that were kept unscored.
    "the first key too many": _case("full-sp", 2, (((1, 5),),), mtp_steps=4, config={"index_topk": 8}),
    # The rows of one adapter are several in a verification, and none of them are its drafts' in the MTP layer.
    "adapters of rows that are verified": _case("tp", 2, (_THREE, ((1, 9), (4, 3))), lora_adapters=2, lora_rank=4),
    # One MTP norm makes both inputs, of rows that were sharded in none of the steps before.
    "the fused norm of one row": _case("full-sp", 3, (((1, 9),),), config={"fused_eh_norm": True}),
    # A reference that has fewer ranks tells all of them what it accepted.
    "a reference alone, two DP ranks": _case("full-sp", 2, (_THREE, ((1, 9),)), reference_world=1),
    # The plain model goes on with what the packed one drafted.
    "the plain model verifies the packed one's drafts": _case(
        "auto", 2, (_THREE, ((1, 9),)), reference="optimized:full-sp", candidate="reference"
    ),
    # No drafts: each step is one row a request, and the tokens are the model's own.
    "plain greedy decoding": _case("full-sp", 2, (_THREE, ((1, 9),)), mtp_steps=0, generate=3),
    # No grid: held to the bound of plain float64.
    "plain float64": _case("full-sp", 2, (_THREE, ((1, 9),)), numerics="float64"),
    # Choices and tokens are replayed in every step.
    "replayed choices": _case("full-sp", 2, (_THREE, ((1, 9),)), numerics="float32", config={"vocab_size": 250}),
}
