"""The reference as a subject: request state, taps, collectives, working types, refusals."""

import pytest
import torch
from reference_engines import RAW, Alone, close, engine_of, keep

from reference import subject
from reference.checkpoint import CheckpointError, RandomWeights
from reference.config import parse_config
from reference.engine import Chunk
from reference.layout import optional_copies
from spcheck.comm.loopback import run_loopback


@pytest.fixture
def ids():
    return torch.randint(250, (21,), generator=torch.Generator().manual_seed(0))


def prefill(engine, ids, cuts=()):
    logits = keep(engine, "lm_head")
    engine.start([len(ids)])
    for first, last in zip((0, *cuts), (*cuts, len(ids)), strict=True):
        engine.step([(0, first, ids[first:last])])
    return torch.cat(logits)


@pytest.mark.parametrize("cuts", [(7,), (1, 2, 13), tuple(range(10, 21))])
@pytest.mark.parametrize("model_type", ["deepseek_v32", "deepseek_v3"])
def test_chunked_prefill_and_decode_are_one_prefill(ids, cuts, model_type):
    whole, chunked = engine_of(model_type=model_type), engine_of(model_type=model_type)
    assert close(prefill(chunked, ids, cuts), prefill(whole, ids))
    expected = whole.state()
    assert all(close(rows[0], expected[name][0]) for name, rows in chunked.state().items())


def test_requests_do_not_see_each_other(ids):
    together, alone = engine_of(), engine_of()
    logits, expected = keep(together, "lm_head"), keep(alone, "lm_head")
    together.start([9, 12])
    together.step([(0, 0, ids[:9]), (1, 0, ids[9:])])
    alone.start([12])
    alone.step([(0, 0, ids[9:])])
    assert torch.equal(logits[1], expected[0])
    assert set(together.state()["model.layers.0.self_attn.cache.rope_key"]) == {0, 1}
    together.start([1])
    assert together.state() == {}


def test_the_latent_norms_have_an_epsilon_of_their_own():
    attention = engine_of(rms_norm_eps=3e-5).model.layers[0].self_attn
    assert (attention.q_a_layernorm.epsilon, attention.kv_a_layernorm.epsilon) == (2e-6, 2e-6)
    assert engine_of(rms_norm_eps=3e-5).model.layers[0].input_layernorm.epsilon == 3e-5
    assert engine_of(latent_norm_eps=1e-5).model.layers[0].self_attn.q_a_layernorm.epsilon == 1e-5


def test_auxiliary_states_come_in_the_order_asked(ids):
    engine = engine_of(aux_layers=(3, 0))
    outputs, embedded = keep(engine, "model"), keep(engine, "model.embed_tokens")
    streams = []
    engine.model.norm.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
    engine.start([21])
    engine.step([(0, 0, ids)])
    _, last, first = outputs[0]
    assert torch.equal(first, embedded[0])
    assert torch.equal(last, streams[0])


@pytest.mark.parametrize("model_type", ["deepseek_v32", "deepseek_v3"])
def test_every_tap_fires(ids, model_type):
    engine = engine_of(model_type=model_type, aux_layers=(1, 3))
    taps = subject.taps(engine.config, scheme="reference", aux_layers=(1, 3))
    fired = set()
    for probe, (module, side, index, _, _) in taps.items():
        target = engine.get_submodule(module)
        if side == "in":
            target.register_forward_pre_hook(lambda _, args, p=probe, i=index: fired.add((p, type(args[i]))))
        else:
            target.register_forward_hook(
                lambda _, __, out, p=probe, i=index: fired.add((p, type(out[i] if isinstance(out, tuple) else out)))
            )
    engine.start([21])
    engine.step([Chunk(0, 0, ids, drafts=0)])
    engine.draft([0], 0)
    assert fired == {(probe, torch.Tensor) for probe in taps}
    assert ("model.layers.0.self_attn.indexer.choose.in" in taps) == (model_type == "deepseek_v32")
    assert subject.padding_inputs(engine.config) == []


def test_the_collectives_of_the_protocol(ids):
    group = Alone()
    engine = engine_of(group=group)
    engine.start([21])
    engine.step([(0, 0, ids)])
    assert group.calls == [("all_reduce", (21, 96))] * 7 + [("all_gather", (250, 21))]
    group.calls.clear()
    engine.draft([0], 0)
    assert group.calls == [("all_reduce", (21, 96))] * 3 + [("all_gather", (250, 21))]


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_every_world_size_computes_the_same(ids, tp):
    """A vocabulary of 250 is padded for 3 and 4 ranks."""

    def rank(world):
        engine = engine_of(group=world.group("tp", range(world.size)))
        logits = prefill(engine, ids)
        engine.draft([0], 0)
        return logits, engine.state()

    expected = prefill(engine_of(), ids)
    for logits, state in run_loopback(tp, rank):
        assert close(logits, expected)
        assert state["model.layers.3.self_attn.cache.latent"][0].shape == (21, 32)


def types_of(engine, ids) -> dict[str, torch.dtype]:
    types = {}

    def note(name, out):
        for value in out if isinstance(out, tuple) else (out,):
            if value.is_floating_point():
                types[name] = value.dtype

    for name, module in engine.named_modules():
        module.register_forward_hook(lambda _, __, out, name=name: note(name, out))
    engine.start([21])
    engine.step([(0, 0, ids)])
    engine.draft([0], 0)
    return types


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_working_type_throughout(ids, dtype):
    assert set(types_of(engine_of(dtype=dtype), ids).values()) == {dtype}


def test_what_stays_float32_in_bfloat16(ids):
    types = types_of(engine_of(dtype=torch.bfloat16), ids)
    wide = {name.split(".", 3)[-1] for name, dtype in types.items() if dtype == torch.float32}
    parts = {"mlp.gate.score", "mlp.gate.weigh", "mlp.gate", "self_attn.softmax", "self_attn.indexer.head_weights"}
    assert wide == parts
    assert types["model"] == types["lm_head"] == torch.bfloat16


def test_bfloat16_is_near_float64(ids):
    """Sparse choices flip in bfloat16, so this is the model without them."""
    sizes = {"model_type": "deepseek_v3", "num_experts_per_tok": 12, "topk_group": 6}
    exact = prefill(engine_of(**sizes), ids)
    rounded = prefill(engine_of(**sizes, dtype=torch.bfloat16), ids)
    assert (rounded - exact).abs().max() / exact.abs().max() < 0.05


def test_a_router_is_not_rounded_to_bfloat16():
    gate = engine_of(dtype=torch.bfloat16).model.layers[1].mlp.gate
    assert gate.weight.dtype == gate.e_score_correction_bias.dtype == torch.float32


class Lean:
    """Random weights without some tensors, or with others in their place."""

    def __init__(self, config, hidden=(), changed=None):
        self.inner, self.hidden, self.changed = RandomWeights(config, 0), set(hidden), changed or {}

    def names(self):
        return [name for name in self.inner.names() if name not in self.hidden]

    def shape(self, name):
        return tuple(self.tensor(name).shape)

    def tensor(self, name):
        if name in self.hidden:
            raise CheckpointError(f"no {name}")
        return self.changed.get(name, self.inner.tensor(name))


def test_missing_copies_fall_back_to_the_main_tables(ids):
    config = parse_config(RAW)
    lean, whole = engine_of(reader=Lean(config, optional_copies(config))), engine_of()
    logits, expected = (keep(engine, "model.layers.3.shared_head.head") for engine in (lean, whole))
    for engine in (lean, whole):
        engine.start([21])
        engine.step([(0, 0, ids)])
        engine.draft([0], 0)
    assert torch.equal(logits[0], expected[0])


def test_the_mtp_tables_are_read_if_they_are_there():
    """A checkpoint may train them apart from the main ones."""
    config = parse_config(RAW)
    table = torch.ones(250, 96)
    engine = engine_of(reader=Lean(config, changed={"model.layers.3.embed_tokens.weight": table}))
    assert torch.equal(engine.model.layers[3].embed_tokens.weight, table.double())
    assert not torch.equal(engine.model.embed_tokens.weight, table.double())


def test_weights_that_do_not_fit():
    config = parse_config(RAW)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \(3,\)"):
        engine_of(reader=Lean(config, changed={"model.norm.weight": torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=r"no model\.norm\.weight"):
        engine_of(reader=Lean(config, ["model.norm.weight"]))


def test_weights_are_copied():
    config = parse_config(RAW)
    reader = RandomWeights(config, 0)
    engine = engine_of(reader=reader, dtype=torch.bfloat16)
    before = reader.tensor("model.norm.weight").clone()
    engine.model.norm.weight.zero_()
    assert torch.equal(reader.tensor("model.norm.weight"), before)


def test_refusals(ids):
    five = Alone()
    five.size = 5
    with pytest.raises(ValueError, match="tensor-parallel size 5 does not divide num_attention_heads 12"):
        engine_of(group=five)
    with pytest.raises(ValueError, match=r"auxiliary layer 4 is not in 0 \.\. 3"):
        engine_of(aux_layers=(4,))
    engine = engine_of()
    engine.start([21])
    with pytest.raises(ValueError, match="needs a target step before it"):
        engine.draft([0], 0)
    plain = engine_of(num_nextn_predict_layers=0)
    plain.start([21])
    with pytest.raises(ValueError, match="without MTP layers"):
        plain.draft([0], 0)
