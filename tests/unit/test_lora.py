"""Adapters in both subjects: against models whose weights have the adapter added, and in exact mode."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import optimized.subject
import reference.subject
from reference.checkpoint import CheckpointError, RandomWeights
from reference.config import parse_config
from spcheck.comm.loopback import run_loopback
from spcheck.plan.grid import GRIDS
from spcheck.worker.adapters import WithAdapters
from spcheck.worker.snap import Snapper
from spcheck.worker.weights import Snapped

PRESET = Path(__file__).parents[2] / "spcheck" / "families" / "deepseek" / "presets" / "dsv32-tiny.json"
CONFIG = parse_config(json.loads(PRESET.read_text()) | {"num_hidden_layers": 3, "first_k_dense_replace": 1})
BASE = RandomWeights(CONFIG, 0, own_tables=True)
ADAPTED = WithAdapters(BASE, CONFIG, 4, 2, 4)
SUBJECTS = [reference.subject, optimized.subject]
F64 = torch.float64
MTP = f"model.layers.{CONFIG.num_hidden_layers}"
PROBED = ["model", "lm_head", "sampler", f"{MTP}.shared_head.head", f"{MTP}.shared_head.sampler"]

both_subjects = pytest.mark.parametrize("subject", SUBJECTS, ids=["reference", "optimized"])
ranks = pytest.mark.parametrize("tp", [1, 2, 3])


class Merged:
    """The tensors of a model that is what adapter ``number`` makes of the base: W + s B A in the place of each W."""

    def __init__(self, number):
        self.prefix = f"adapters.{number}"
        self.scale = float(ADAPTED.tensor(f"{self.prefix}.lora_alpha")) / 4

    def names(self):
        return BASE.names()

    def shape(self, name):
        return BASE.shape(name)

    def tensor(self, name):
        plain = BASE.tensor(name).double()
        pair = f"{self.prefix}.base_model.model.{name.removesuffix('.weight')}"
        if f"{pair}.lora_A.weight" not in ADAPTED.names():
            return plain
        a, b = (ADAPTED.tensor(f"{pair}.lora_{x}.weight").double() for x in "AB")
        return plain + self.scale * b @ a


def build(world, subject, *, reader=ADAPTED, lora_adapters=2, dtype=F64, scheme="auto", pad_to=None):
    setup = SimpleNamespace(
        config=CONFIG,
        weights=reader,
        groups={name: world.group(name, range(world.size)) for name in ("tp", "ep")},
        dtype=dtype,
        device=torch.device("cpu"),
        scheme=scheme,
        aux_layers=(),
        pad_to=pad_to,
        graph_sizes=(),
        skip_padding=True,
        expert_parallel=True,
        all2all_backend="naive",
        lora_adapters=lora_adapters,
    )
    return subject.build(setup)


def watch(engine):
    """What the probed modules give, call by call."""
    seen = {name: [] for name in PROBED}

    def keep(name, module, args, output):
        seen[name].append(output[0] if name == "model" else output)

    for name in PROBED:
        engine.get_submodule(name).register_forward_hook(functools.partial(keep, name))
    return seen


def tokens(count, seed):
    return torch.randint(CONFIG.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


def run(engine, lengths, adapters, cut=None):
    """A prefill of requests of these lengths, whole or in two pieces, and a draft: rows by probe, then the caches."""
    seen = watch(engine)
    engine.start([*lengths], adapters)
    ids = [tokens(n, seed) for seed, n in enumerate(lengths)]
    if cut is not None:
        engine.step([(r, 0, x[:cut]) for r, x in enumerate(ids)])
        for outputs in seen.values():
            outputs.clear()
    start = cut or 0
    engine.step([(r, start, x[start:]) for r, x in enumerate(ids)])
    engine.draft([*range(len(lengths))], 0)
    rows = sum(lengths) - start * len(lengths)
    return {name: torch.cat(outputs)[:rows] for name, outputs in seen.items()}, engine.state()


def on_ranks(tp, main):
    def quiet(world):
        with torch.no_grad():
            return main(world)

    return run_loopback(tp, quiet)


@functools.cache
def alone(request, length, adapter):
    """One request in the reference with the adapter added to the weights."""
    reader = BASE if adapter is None else Merged(adapter)

    def main(world):
        engine = build(world, reference.subject, reader=reader, lora_adapters=0)
        seen = watch(engine)
        engine.start([length])
        engine.step([(0, 0, tokens(length, request))])
        engine.draft([0], 0)
        return {name: torch.cat(outputs) for name, outputs in seen.items()}, engine.state()

    return on_ranks(1, main)[0]


def check(result, lengths, adapters, start=0):
    """Every request is what it is alone in the model of its adapter; a draft layer needs to have seen all of it."""
    rows, caches = result
    expected = [alone(r, n, adapter) for r, (n, adapter) in enumerate(zip(lengths, adapters, strict=True))]
    for name in PROBED if start == 0 else PROBED[:3]:
        first = 0 if name.endswith("sampler") else start
        close(rows[name], torch.cat([values[name][first:] for values, _ in expected]))
    for name, by_request in caches.items():
        for r, held in by_request.items():
            if start == 0 or not name.startswith(MTP):
                close(held, expected[r][1][name][0])


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


LENGTHS, ADAPTERS = (5, 3, 4, 1), (1, None, 0, 1)


@both_subjects
@ranks
def test_each_request_is_the_model_of_its_adapter(subject, tp):
    for result in on_ranks(tp, lambda world: run(build(world, subject), LENGTHS, ADAPTERS)):
        check(result, LENGTHS, ADAPTERS)


@both_subjects
def test_a_chunk_goes_on_with_the_adapter_of_its_request(subject):
    lengths, adapters = LENGTHS[:3], ADAPTERS[:3]
    for result in on_ranks(2, lambda world: run(build(world, subject), lengths, adapters, cut=2)):
        check(result, lengths, adapters, start=2)


@both_subjects
@pytest.mark.parametrize("adapters", [None, (None, -1)])
def test_without_an_adapter_it_is_the_plain_model_to_the_bit(subject, adapters):
    with_adapters = on_ranks(2, lambda world: run(build(world, subject), (5, 3), adapters))
    options = {"reader": BASE, "lora_adapters": 0, "scheme": "tp"}
    plain = on_ranks(2, lambda world: run(build(world, subject, **options), (5, 3), None))
    for (rows, caches), (expected, held) in zip(with_adapters, plain, strict=True):
        assert all(torch.equal(rows[name], expected[name]) for name in PROBED)
        assert all(torch.equal(caches[name][r], held[name][r]) for name in held for r in (0, 1))


def test_adapters_change_every_row():
    for number in (0, 1):
        ours, plain = alone(0, 5, number)[0]["model"], alone(0, 5, None)[0]["model"]
        assert bool(((ours - plain).norm(dim=1) > 0.2 * plain.norm(dim=1)).all())


@pytest.mark.parametrize("content", [0.0, float("nan")])
def test_padding_rows_have_no_adapter(content):
    """Nor do they change a real row; what an adapted matrix gives them is what the matrix alone gives."""

    def main(world):
        engine = build(world, optimized.subject, pad_to=16)
        engine.model.embed_tokens.register_forward_hook(lambda _, __, out: _filled(out, content))
        engine.model.layers[3].register_forward_pre_hook(lambda _, a: (a[0], _filled(a[1], content), *a[2:]))
        matrix, given = engine.model.layers[0].self_attn.fused_qkv_a_proj, []
        matrix.register_forward_hook(lambda module, args, out: given.append((args[0] @ module.weight.T, out)))
        result = run(engine, LENGTHS, ADAPTERS)
        return result, given[0]

    for result, (plain, out) in on_ranks(2, main):
        check(result, LENGTHS, ADAPTERS)
        torch.testing.assert_close(out[13:], plain[13:], equal_nan=True)
        torch.testing.assert_close(out[5:8], plain[5:8])
        assert not torch.isclose(out[:5], plain[:5]).all(dim=1).any()


def _filled(x, content):
    x = x.clone()
    x[sum(LENGTHS) :] = content
    return x


class Counted:
    """A group that counts its calls."""

    def __init__(self, inner, calls):
        self.inner, self.calls, self.rank, self.size = inner, calls, inner.rank, inner.size

    def __getattr__(self, name):
        def call(x, *args):
            self.calls.append((name, tuple(x.shape)))
            return getattr(self.inner, name)(x, *args)

        return call


@both_subjects
def test_adapters_add_no_collective(subject):
    def main(world, adapters):
        calls = []
        counted = type("World", (), {"size": 2, "group": lambda _, name, r: Counted(world.group(name, r), calls)})()
        run(build(counted, subject, lora_adapters=adapters, scheme="tp"), (4,), [0] if adapters else None)
        return calls

    assert on_ranks(2, lambda world: main(world, 2)) == on_ranks(2, lambda world: main(world, 0))


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_exact_arithmetic_makes_both_subjects_equal_to_the_bit(tp):
    grid, lengths = GRIDS["A"], (9, 3, 4, 1)  # of up to 8 keys all are chosen, and no score is made

    def main(world, subject):
        engine = build(world, subject, reader=Snapped(ADAPTED, grid))
        snapper = Snapper(engine, CONFIG, grid, watch=False)
        rows, caches = run(engine, lengths, ADAPTERS)
        return rows, caches, snapper.off_grid, snapper.silent()

    ours = on_ranks(tp, lambda world: main(world, optimized.subject))
    theirs = on_ranks(1, lambda world: main(world, reference.subject))
    for rows, caches, *doubts in ours:
        assert doubts == [*theirs[0][2:]] == [None, []]
        assert all(torch.equal(rows[name], theirs[0][0][name]) for name in PROBED)
        assert all(torch.equal(held[r], theirs[0][1][name][r]) for name, held in caches.items() for r in held)


@both_subjects
def test_bfloat16_stays_bfloat16(subject):
    def main(world):
        engine = build(world, subject, dtype=torch.bfloat16)
        return run(engine, (5, 3), (0, 1)), {p.dtype for n, p in engine.named_parameters() if "lora_" in n}

    for (rows, _), types in on_ranks(2, main):
        assert types == {rows["model"].dtype} == {torch.bfloat16}
        expected = torch.cat([alone(0, 5, 0)[0]["model"], alone(1, 3, 1)[0]["model"]])
        distance = (rows["model"].double() - expected).norm(dim=1) / expected.norm(dim=1)
        assert float(distance.median()) < 0.2


@both_subjects
@pytest.mark.parametrize("adapters", [(0,), (0, 1, 1), (0, 2), (-2, 0)])
def test_adapters_that_do_not_exist_are_refused(subject, adapters):
    def main(world):
        with pytest.raises(ValueError, match=r"adapter|argument"):
            build(world, subject).start([3, 3], adapters)

    on_ranks(1, main)


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_the_reference_refuses_a_tensor_of_another_shape(part, monkeypatch):
    name = f"adapters.1.base_model.model.model.layers.2.self_attn.o_proj.{part}.weight"
    plain = WithAdapters.shape
    monkeypatch.setattr(WithAdapters, "shape", lambda self, n: (3, 5) if n == name else plain(self, n))

    def main(world):
        with pytest.raises(CheckpointError, match=f"{part}.weight has shape"):
            build(world, reference.subject)

    on_ranks(1, main)


@both_subjects
def test_a_missing_adapter_is_an_error(subject):
    def main(world):
        with pytest.raises(CheckpointError, match=r"no tensor adapters\.2"):
            build(world, subject, lora_adapters=3)

    on_ranks(1, main)


def test_adapters_exclude_sequence_parallelism():
    def main(world):
        assert build(world, optimized.subject).scheme == "tp"
        with pytest.raises(ValueError, match="LoRA"):
            build(world, optimized.subject, scheme="full-sp")

    on_ranks(2, main)
