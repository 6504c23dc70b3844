"""Random weights with exact ties, and with channels a hundred times larger."""

import pytest
import torch

from reference.checkpoint import RandomWeights
from spcheck.case import Case
from spcheck.errors import UsageError
from spcheck.plan.model import load_model, preset_names
from spcheck.plan.plan import make_plan
from spcheck.worker.hard_weights import OUTLIER, outlier_channels, with_outliers, with_ties
from spcheck.worker.weights import open_weights

GATE = "model.layers.3.mlp.gate"


def plain_of(name="dsv32-tiny"):
    config = load_model(Case(((1,),), 1, model=name))
    return config, RandomWeights(config, 0, own_tables=True)


def twins(rows):
    """Pairs of equal rows, each once."""
    return {(i, j) for i in range(len(rows)) for j in range(i + 1, len(rows)) if torch.equal(rows[i], rows[j])}


def changed_names(reader, plain):
    return {name for name in plain.names() if not torch.equal(reader.tensor(name), plain.tensor(name))}


def test_experts_have_twins_in_their_group_and_on_other_ranks():
    """24 experts in groups of 4: the second of each repeats the first; 20..23 repeat 0..3, on any two ranks or more."""
    config, plain = plain_of()
    ties = with_ties(plain, config)
    weight, bias = (ties.tensor(f"{GATE}.{x}") for x in ("weight", "e_score_correction_bias"))
    neighbours = {(first, first + 1) for first in range(0, 24, 4)}
    across = {(0, 20), (0, 21), (1, 20), (1, 21), (2, 22), (3, 23)}
    assert twins(weight) == twins(bias) == neighbours | across


def test_experts_of_one_group_are_all_in_pairs():
    config, plain = plain_of("dsv32-two-mtp")
    weight = with_ties(plain, config).tensor(f"{GATE}.weight")
    assert twins(weight) == {(i, i + 1) for i in range(0, 24, 2)} | {(0, 22), (0, 23), (1, 22), (1, 23)}


@pytest.mark.parametrize("table", ["lm_head.weight", "model.layers.5.shared_head.head.weight"])
def test_every_token_has_a_twin_beside_it_and_one_half_a_vocabulary_away(table):
    """250 rows: 125 is the first of the second half, and of the second of two ranks."""
    config, plain = plain_of()
    head = with_ties(plain, config).tensor(table)
    assert torch.equal(head[0], head[1])
    assert torch.equal(head[:125], head[125:])
    assert all(any(i in pair for pair in twins(head)) for i in range(250))


def test_index_heads_are_twins():
    config, plain = plain_of()
    queries = with_ties(plain, config).tensor("model.layers.0.self_attn.indexer.wq_b.weight").view(16, 24, -1)
    assert torch.equal(queries, queries[:1].expand(16, -1, -1))


@pytest.mark.parametrize("name", ["dsv3-tiny", "dsv32-alternating", "dsv32-tiny", "dsv32-two-mtp"])
def test_shapes_and_stored_types_stay_and_other_tensors_too(name):
    config, plain = plain_of(name)
    for reader in (with_ties(plain, config), with_outliers(plain)):
        assert reader.names() == plain.names()
        assert all(reader.shape(n) == tuple(reader.tensor(n).shape) == plain.shape(n) for n in plain.names())
        assert all(reader.tensor(n).dtype == plain.tensor(n).dtype for n in plain.names())
    for name in changed_names(with_ties(plain, config), plain):
        assert name.endswith((".weight", ".e_score_correction_bias"))
        assert ".mlp.gate." in name or "head.weight" in name or name.endswith("indexer.wq_b.weight")


def test_outliers_are_two_channels_a_hundred_times_larger():
    _, plain = plain_of()
    outliers = with_outliers(plain)
    for name, width in (("model.embed_tokens.weight", 96), ("model.layers.1.self_attn.q_a_layernorm.weight", 36)):
        channels = outlier_channels(width)
        assert len(channels) == 2
        ratio = outliers.tensor(name).double() / plain.tensor(name).double()
        assert ratio[..., channels].sub(OUTLIER).abs().max() < 1  # bfloat16 rounds the product
        others = [i for i in range(width) if i not in channels]
        assert torch.equal(outliers.tensor(name)[..., others], plain.tensor(name)[..., others])
    parts = {name.split(".")[-2] for name in changed_names(outliers, plain)}
    assert parts == {"embed_tokens", "input_layernorm", "q_a_layernorm"}


def test_a_vocabulary_of_one_and_experts_of_odd_number():
    case = Case(((3,),), 1, overrides=(("vocab_size", 1), ("n_routed_experts", 15), ("n_group", 1), ("topk_group", 1)))
    config = load_model(case)
    reader = with_ties(RandomWeights(config, 0), config)
    assert reader.tensor("lm_head.weight").shape == (1, 96)
    assert reader.tensor(f"{GATE}.weight").shape == (15, 96)


@pytest.mark.parametrize("kind", ["plain", "ties", "outliers"])
def test_a_case_gets_the_weights_it_asks_for(kind):
    config, plain = plain_of()
    readers = {"plain": plain, "ties": with_ties(plain, config), "outliers": with_outliers(plain)}
    got = open_weights(make_plan(Case(((3,),), 2, weights=kind, numerics="float64")))
    assert all(torch.equal(got.tensor(name), readers[kind].tensor(name)) for name in plain.names())


def test_the_id_names_them_only_where_they_are_not_the_usual_ones():
    assert "--weights" not in Case(((3,),), 2).id
    assert "--model dsv32-tiny --weights ties --mtp-steps" in Case(((3,),), 2, weights="ties").id


def test_a_checkpoint_has_weights_of_its_own():
    folder = "fixtures/golden/deepseek_v32"
    with pytest.raises(UsageError, match=r"^--weights ties is for random weights, and .* has stored ones$"):
        make_plan(Case(((3,),), 2, model=folder, weights="ties"))
    make_plan(Case(((3,),), 2, model=folder))
    assert "deepseek_v32" not in preset_names()
