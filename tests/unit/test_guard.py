"""The guard's bounds against the true sums, with whole numbers, on a model whose weights are made to be awkward."""

import functools
import math
import re
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

import reference.subject
import spcheck.worker.weights
from reference.checkpoint import RandomWeights
from reference.layout import adapted_modules
from spcheck.case import Case
from spcheck.comm.loopback import run_loopback
from spcheck.families.deepseek.guard import Product, merge_norms, products
from spcheck.judge.contracts.exactness import check_exactness
from spcheck.judge.verdict import conclude
from spcheck.launch.ranks import run_threads
from spcheck.plan.grid import GRIDS
from spcheck.plan.plan import make_plan
from spcheck.worker.adapters import WithAdapters
from spcheck.worker.weights import Snapped
from tests.conftest import compare_case

CASE = {"tp": 2, "requests": ((17, 4),), "mtp_steps": 2, "backend": "loopback"}


@pytest.fixture
def scaled(monkeypatch):
    """Weights larger by a gain, with rows and columns that stand out; caches of norms know nothing of it."""
    plain = RandomWeights.tensor

    def use(gain=1.0, outliers=False, only=""):
        def tensor(self, name):
            x = plain(self, name)
            if x.ndim < 2 or only not in name:
                return x
            x = x.double() * gain  # a new tensor: the reader keeps its own
            if outliers:
                x[:, ::17] *= 6
                x[::13] *= 3
            return x

        monkeypatch.setattr(RandomWeights, "tensor", tensor)
        spcheck.worker.weights.weight_norms.cache_clear()

    yield use
    spcheck.worker.weights.weight_norms.cache_clear()


def watched(monkeypatch, plan):
    """The largest sum of positive terms, or of negative ones, of every linear product of the reference."""
    largest = {}
    plain = torch.nn.functional.linear

    def linear(x, weight, bias=None):
        for name in names_of.get(weight.data_ptr(), ()):
            parts = x.clamp(min=0) @ weight.clamp(min=0).T + x.clamp(max=0) @ weight.clamp(max=0).T
            largest[name] = max(largest.get(name, 0.0), float(parts.max()))
        return plain(x, weight, bias)

    names_of, kept = {}, []
    original = spcheck.worker.built.Snapper.__init__

    def remember(self, root, config, grid, *, watch):
        original(self, root, config, grid, watch=watch)
        if watch:  # the reference, whose modules have the published names
            for name, parameter in root.named_parameters():
                kept.append(parameter)  # or the candidate's weights may take its place in memory
                short = re.sub(r"\.experts\.\d+\.", ".experts.", name.removesuffix(".weight"))
                names_of.setdefault(parameter.data_ptr(), []).append(short)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    monkeypatch.setattr(spcheck.worker.built.Snapper, "__init__", remember)
    reports = run_threads(plan)
    return reports, largest


@pytest.mark.parametrize("gain", [1.0, 4.0])
@pytest.mark.parametrize("outliers", [False, True])
def test_no_sum_of_a_product_is_larger_than_its_bound(gain, outliers, scaled, monkeypatch):
    scaled(gain, outliers)
    plan = make_plan(Case(**CASE))
    reports, largest = watched(monkeypatch, plan)
    norms = merge_norms([r["reference"]["norms"] for r in reports]) | merge_norms([r["weight_norms"] for r in reports])
    made = {p.name: p for p in products(plan.config, plan.grid, norms, defaultdict(lambda: 21))}
    unit = plan.grid.activation + plan.grid.weight
    checked = [name for name in largest if name in made]
    assert len(checked) > 60
    for name in checked:
        needed = math.log2(largest[name]) + unit
        assert needed <= made[name].bits < needed + 8, name
    fits = all(p.exact for p in made.values())
    assert conclude(plan, reports, {}, None).verdict.outcome == ("EQUAL" if fits else "INCONCLUSIVE")


def table(**changes):
    """Bits of one layer's products where every norm is 8, unless it says otherwise."""
    plan = make_plan(Case(**CASE))
    norms = dict.fromkeys(_names(plan), 8.0) | changes
    return {p.name: p.bits for p in products(plan.config, GRIDS["A"], norms, defaultdict(lambda: 17))}, plan.config


def _names(plan):
    report = run_threads(plan)[0]
    return [*report["reference"]["norms"], *spcheck.worker.weights.weight_norms(plan, 0, 1)]


def test_units_and_bounds_of_the_other_products_by_hand():
    bits, config = table()
    layer = "model.layers.2"
    assert bits[f"{layer}.self_attn.q_a_proj"] == 6 + 26
    assert bits[f"{layer}.self_attn q.k"] == math.log2(8**3 + 8**2) + 40
    assert bits[f"{layer}.self_attn p.v"] == pytest.approx(6 + 46, abs=1e-4)
    assert bits[f"{layer}.self_attn.indexer scores"] == math.log2(math.sqrt(config.index_n_heads) * 8**3) + 34
    # The shared expert, and sqrt(10 experts) times the weights' norm times an expert's output.
    combine = 8**2 + math.sqrt(10) * 8 * 8**2
    assert bits[f"{layer}.mlp combine"] == math.log2(combine) + 38
    assert bits["model.layers.0.input_layernorm.in residual"] == 3 + 26
    assert bits["model.layers.0.post_attention_layernorm.in residual"] == math.log2(8 + 64) + 26
    assert bits["model.layers.3.input_layernorm.in residual"] == math.log2(8 + combine) + 38
    assert bits["model.layers.5.eh_proj"] == math.log2(math.hypot(8, 8) * 8) + 26


def adapter(module, number=0, **changes):
    """The norms of an adapter of one module: 8, 16 of the whole A, and s = 2, unless it says otherwise."""
    name = f"adapters.{number}.base_model.model.{module}"
    norms = {"lora_A": 8.0, "lora_A.whole": 16.0, "lora_A.scale": 2.0, "lora_B": 8.0} | changes
    return {f"{name}.{part}": norm for part, norm in norms.items()}


def test_units_and_bounds_of_adapters_by_hand():
    attention, shared = "model.layers.2.self_attn", "model.layers.2.mlp.shared_experts"
    modules = (f"{attention}.q_a_proj", f"{attention}.o_proj", f"{shared}.down_proj")
    norms = {name: norm for module in modules for name, norm in adapter(module).items()}
    bits, _ = table(**norms, **adapter(f"{attention}.o_proj", 1, lora_B=16.0))
    plain, _ = table()
    assert bits[f"adapters.0.base_model.model.{attention}.q_a_proj.lora_A"] == 6 + 26
    assert bits[f"{attention}.q_a_proj"] == math.log2(8 * (8 + 2 * 8 * 16)) + 38
    assert bits[f"{attention}.o_proj"] == math.log2(8 * (8 + 2 * 16 * 16)) + 38
    assert bits["model.layers.2.post_attention_layernorm.in residual"] == math.log2(8 + 8 * (8 + 2 * 16 * 16)) + 38
    combine = 8 * (8 + 2 * 8 * 16) + math.sqrt(10) * 8 * 8**2
    assert bits["model.layers.2.mlp combine"] == math.log2(combine) + 38
    assert bits["model.layers.3.input_layernorm.in residual"] == math.log2(8 + combine) + 38
    for name in (
        "model.layers.2.self_attn.kv_b_proj",
        "model.layers.2.mlp.experts.down_proj",
        "model.layers.3.mlp.gate",
    ):
        assert bits[name] == plain[name]


def test_the_bound_of_an_adapter_is_reached():
    """By rows of A that all point to where x does, which no row norm of A alone would bound."""
    module, x = "model.layers.0.self_attn.q_a_proj", torch.full((96,), 0.5)
    a, b = torch.ones(4, 96), torch.ones(48, 4)
    norms = {"lora_A": a[0].norm(), "lora_A.whole": a.norm(), "lora_B": b[0].norm()}
    of_x = {"model.layers.0.input_layernorm.out": float(x.norm()), module: 0.0}
    bits, _ = table(**of_x, **adapter(module, **{name: float(norm) for name, norm in norms.items()}))
    assert bits[module] == pytest.approx(math.log2(float((2 * b @ (a @ x)).max())) + 38, abs=1e-6)


@pytest.mark.parametrize(("scale", "finer"), [(2.0, 0), (3.0, 0), (1.0, 0), (0.5, 1), (0.75, 2)])
def test_a_scale_below_one_makes_the_unit_finer(scale, finer):
    module = "model.layers.0.self_attn.o_proj"
    bits, _ = table(**adapter(module, **{"lora_A.scale": scale}))
    assert bits[module] == math.log2(8 * (8 + scale * 8 * 16)) + 38 + finer
    residual = "model.layers.0.post_attention_layernorm.in residual"
    assert bits[residual] == math.log2(8 + 8 * (8 + scale * 8 * 16)) + 38 + finer


@pytest.mark.parametrize("norms", [{"lora_A.scale": 1 / 3}, {"lora_A.scale": math.inf}, {"lora_B": math.nan}])
def test_an_adapter_that_is_not_exact_leaves_no_proof(norms):
    module = "model.layers.0.mlp.down_proj"
    bits, _ = table(**adapter(module), **adapter(module, 1, **norms))
    assert bits[module] > 53
    assert bits["model.layers.1.input_layernorm.in residual"] > 53


def same_sign(x, weight, sign):
    """Of every element of W x the sum of its positive terms, or the size of that of its negative ones."""
    return x.clamp(min=0) @ (sign * weight).clamp(min=0).T + x.clamp(max=0) @ (sign * weight).clamp(max=0).T


def largest_sums(x, linear, added):
    """Of A x, and of W x + s B A x with every product of three as a term: the largest sum of terms of one sign."""
    above, below = (same_sign(x, added.lora_A, sign) for sign in (1, -1))
    up, down = added.lora_B.clamp(min=0).T, -added.lora_B.clamp(max=0).T
    positive = same_sign(x, linear.weight, 1) + added.scale * (above @ up + below @ down)
    negative = same_sign(x, linear.weight, -1) + added.scale * (above @ down + below @ up)
    return float(torch.maximum(above, below).max()), float(torch.maximum(positive, negative).max())


def adapted_reference(world, plan, reader):
    """Norms of a run of the reference with two adapters, and the largest sums: of A x and of all, by product."""
    setup = SimpleNamespace(
        config=plan.config,
        weights=reader,
        groups={"tp": world.group("tp", range(world.size))},
        dtype=torch.float64,
        device=torch.device("cpu"),
        aux_layers=(),
        lora_adapters=2,
    )
    engine, largest = reference.subject.build(setup), {}
    snapper = spcheck.worker.built.Snapper(engine, plan.config, plan.grid, watch=True)

    def watch(name, module, args):
        number = engine.active_adapter.number
        sums = largest_sums(args[0], module, module.adapters.each[number])
        for key, size in zip((f"adapters.{number}.base_model.model.{name}.lora_A", name), sums, strict=True):
            largest[key] = max(largest.get(key, 0.0), size)

    for name in adapted_modules(plan.config):
        engine.get_submodule(name).register_forward_pre_hook(functools.partial(watch, name))
    engine.start(plan.prompts(0), (1, 0))
    engine.step([(r, 0, torch.arange(n)) for r, n in enumerate(plan.prompts(0))])
    return snapper.plain_norms(), largest


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("gain", "outliers"), [(1.0, False), (4.0, True)])
def test_no_sum_of_an_adapter_is_larger_than_its_bound(tp, gain, outliers, scaled, monkeypatch):
    scaled(gain, outliers)
    plan = make_plan(Case(**CASE))
    reader = Snapped(WithAdapters(RandomWeights(plan.config, 0), plan.config, 4, 2, 1), plan.grid)
    monkeypatch.setattr(spcheck.worker.weights, "open_weights", lambda plan: reader)
    ranks = run_loopback(tp, lambda world: adapted_reference(world, plan, reader))
    norms = merge_norms([norms for norms, _ in ranks]) | spcheck.worker.weights.weight_norms(plan, 0, 1)
    bits = {p.name: p.bits for p in products(plan.config, plan.grid, norms, defaultdict(lambda: 21))}
    unit = plan.grid.activation + plan.grid.weight
    for name, size in ((name, size) for _, largest in ranks for name, size in largest.items()):
        needed = math.log2(size) + unit + (0 if name.startswith("adapters.") else plan.grid.weight)
        assert needed <= bits[name] < needed + 10, name
    assert all(len(largest) == 3 * 7 * plan.config.num_hidden_layers for _, largest in ranks)


def test_divided_channels_add_up_in_squares_and_nan_is_not_lost():
    ranks = [{"a.o_proj.in": 3.0, "a.norm.out": 3.0}, {"a.o_proj.in": 4.0, "a.norm.out": 4.0}]
    assert merge_norms(ranks) == {"a.o_proj.in": 5.0, "a.norm.out": 4.0}
    assert math.isnan(merge_norms([{"a": 1.0}, {"a": math.nan}])["a"])
    assert not Product("a", math.inf).exact


def test_what_was_not_measured_has_no_bound():
    plan = make_plan(Case(**CASE))
    assert all(
        not p.exact for p in products(plan.config, GRIDS["A"], {}, defaultdict(lambda: 17)) if "biased" not in p.name
    )


@pytest.mark.parametrize(("only", "gain"), [(".experts.", 1e-4), ("_proj", 1e-5)])
def test_weights_that_rounding_takes_away_were_not_tested(only, gain, monkeypatch):
    """Every probe is equal, since all that passes is zero: that is no proof."""
    stored = spcheck.worker.weights.RandomWeights.tensor

    def tensor(self, name):
        x = stored(self, name)
        return x * gain if only in name else x

    spcheck.worker.weights._random_weights.cache_clear()
    spcheck.worker.weights.lost_weights.cache_clear()
    monkeypatch.setattr(spcheck.worker.weights.RandomWeights, "tensor", tensor)
    comparison = compare_case(Case(**CASE))
    monkeypatch.undo()
    for cache in ("_random_weights", "lost_weights", "weight_norms"):
        getattr(spcheck.worker.weights, cache).cache_clear()
    assert comparison.verdict.outcome == "INCONCLUSIVE"
    assert any("what they do was not tested" in f.message for f in comparison.verdict.findings)


def test_an_unfinished_run_has_no_guard():
    plan = make_plan(Case(**CASE))
    assert check_exactness(plan, [{"rank": 0}, {"rank": 1}]) is None
    assert check_exactness(plan, []) is None
