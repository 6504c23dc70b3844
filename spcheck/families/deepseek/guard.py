"""The guard of exact arithmetic: proves for every product of a run that it fits into 53 bits. No torch.

Every long sum is bounded by Cauchy-Schwarz, the largest row norm of one operand times that of the other. The bound
holds for every sub-sum as well, so it covers any order, any sharding, any tree of partial sums; and for the attention
products it covers the plain and the absorbed form alike. Source of the formulas: docs/numerics.md.

``norms`` holds the largest row norm of each snapped activation (``<module>.out``, over the last axis: a head's where it
has heads), the largest absolute value of each residual stream (``<norm>.in``) and the largest row norm of each weight
(``<module>``; all experts of a layer under one name).

A LoRA adapter makes W + s B A of a weight W, and |x| (|W_i| + s |B_i| |A|) bounds row i of it, |A| being the Frobenius
norm: whatever parts are summed first, each element of A x is at most its row of A times |x|, and Cauchy-Schwarz over
the elements does the rest. ``norms`` has for every adapter of a ``<module>`` the largest row norms
``adapters.<i>.base_model.model.<module>.lora_A`` and ``.lora_B``, and ``.lora_A.whole`` and ``.scale``, |A| and s.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from reference.config import ModelConfig
from spcheck.plan.grid import LIMIT, Grid

Norms = Mapping[str, float]

ROUTED = ".mlp.experts.act_fn.out"
"""How the name of the routed experts' inner values ends."""


@dataclass(frozen=True)
class Product:
    """One kind of sum. ``bits`` is log2 of its bound in its unit: exact up to 53."""

    name: str
    bits: float

    @property
    def exact(self) -> bool:
        """Whether no sum of this kind can be rounded."""
        return self.bits <= LIMIT


def merge_norms(ranks: Sequence[Norms]) -> dict[str, float]:
    """Over all ranks: the largest; channels that are divided over the ranks add up in squares."""
    names = {name for norms in ranks for name in norms}
    return {name: _merged(name, [norms[name] for norms in ranks if name in norms]) for name in names}


def largest_norms(ranks: Sequence[Norms]) -> dict[str, float]:
    """Over ranks that hold whole values: the largest."""
    names = {name for norms in ranks for name in norms}
    return {name: _largest([norms[name] for norms in ranks if name in norms]) for name in names}


def _merged(name: str, values: list[float]) -> float:
    divided = name.endswith((".o_proj.in", ".act_fn.out"))
    return math.hypot(*values) if divided else _largest(values)


def _largest(values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)  # max alone may lose a NaN


def products(config: ModelConfig, grid: Grid, norms: Norms, keys: Mapping[int, int]) -> list[Product]:
    """Every product of the model that ran; ``keys`` is the largest number of keys of a query in each layer."""
    return list(_Products(config, grid, _Bounds(norms), keys).all())


class _Bounds(dict[str, float]):
    """What was not measured has no bound."""

    def __missing__(self, name: str) -> float:
        return math.inf


class _Adapter:
    """What one LoRA adapter adds to one weight: s B A."""

    def __init__(self, norms: Norms, lora_a: str) -> None:
        self.lora_a = lora_a
        scale = norms[f"{lora_a}.scale"]
        lora_b = lora_a.removesuffix("A") + "B"
        self.gain = scale * norms[lora_b] * norms[f"{lora_a}.whole"]
        # s is a whole number of 2^-finer; a third, say, fills a float64 alone.
        self.finer = scale.as_integer_ratio()[1].bit_length() - 1 if math.isfinite(scale) else 0


def _adapters(norms: Norms) -> dict[str, list[_Adapter]]:
    """Adapted module -> its adapters."""
    found: dict[str, list[_Adapter]] = {}
    for name in norms:
        if match := re.fullmatch(r"adapters\.\d+\.base_model\.model\.(.+)\.lora_A", name):
            found.setdefault(match[1], []).append(_Adapter(norms, name))
    return found


class _Products:
    """The table of products. Units are powers of two: 2^-(sum of the operands' bits)."""

    def __init__(self, config: ModelConfig, grid: Grid, norms: Norms, keys: Mapping[int, int]) -> None:
        self.config = config
        self.grid = grid
        self.norms = norms
        self.keys = keys
        self.adapters = _adapters(norms)
        self.linear_unit = grid.activation + grid.weight
        self.residual_unit = self.linear_unit
        self.pending = 0.0  # bound of the last block's output, still to be added to the residual

    def all(self) -> Iterator[Product]:
        for layer in range(self.config.num_hidden_layers):
            yield from self.layer(f"model.layers.{layer}", layer)
        yield self.residual("model.norm")
        yield self.linear("lm_head", self.norms["model.norm.out"])
        for layer in self.config.mtp_layers:
            if f"model.layers.{layer}.enorm.out" in self.norms:
                yield from self.mtp(f"model.layers.{layer}", layer)

    def mtp(self, name: str, layer: int) -> Iterator[Product]:
        self.pending = 0.0  # a residual stream of its own
        both = math.hypot(self.norms[f"{name}.enorm.out"], self.norms[f"{name}.hnorm.out"])
        yield self.linear(f"{name}.eh_proj", both)
        yield from self.layer(name, layer)
        yield self.residual(f"{name}.shared_head.norm")
        head = f"{name}.shared_head.head"
        main = self.norms["lm_head"]  # a checkpoint may leave the copy out
        bound = self.norms[f"{name}.shared_head.norm.out"] * self.norms.get(head, main)
        yield self.product(head, bound, self.linear_unit)

    def layer(self, name: str, layer: int) -> Iterator[Product]:
        yield self.residual(f"{name}.input_layernorm")
        yield from self.attention(f"{name}.self_attn", self.norms[f"{name}.input_layernorm.out"], self.keys[layer])
        yield self.residual(f"{name}.post_attention_layernorm")
        x = self.norms[f"{name}.post_attention_layernorm.out"]
        yield from self.moe(f"{name}.mlp", x) if self.config.is_moe_layer(layer) else self.dense(f"{name}.mlp", x)

    def attention(self, name: str, x: float, keys: int) -> Iterator[Product]:
        grid, norms = self.grid, self.norms
        q_latent, latent = norms[f"{name}.q_a_layernorm.out"], norms[f"{name}.kv_a_layernorm.out"]
        yield from self.projection(f"{name}.q_a_proj", x)
        yield from self.projection(f"{name}.kv_a_proj_with_mqa", x)
        yield from self.projection(f"{name}.q_b_proj", q_latent)
        yield self.linear(f"{name}.kv_b_proj", latent)
        if self.config.has_indexer:
            yield self.linear(f"{name}.indexer.wk", x)
            # Where all keys are chosen a reference may leave the scores out.
            if keys > (self.config.index_topk or 0) or f"{name}.indexer.q_rope.out" in norms:
                yield from self.index_scores(f"{name}.indexer", x, q_latent)
        # qn . (Wk c) = (Wk' qn) . c: |qn| times the Frobenius norm of a head's Wk times |c| bounds both, part by part.
        nope = norms[f"{name}.q_split.out"] * norms[f"{name}.kv_b_proj.key"] * latent
        rope = norms[f"{name}.q_rope.out"] * norms[f"{name}.k_rope.out"]
        yield self.product(f"{name} q.k", nope + rope, grid.activation + self.linear_unit)
        probability = 1 + keys * 2.0 ** -(grid.probability + 1)  # each one was rounded by half a unit at most
        value = probability * latent * norms[f"{name}.kv_b_proj.value"]
        yield self.product(f"{name} p.v", value, grid.probability + self.linear_unit)
        yield from self.block_output(f"{name}.o_proj", norms[f"{name}.o_proj.in"])

    def index_scores(self, name: str, x: float, q_latent: float) -> Iterator[Product]:
        yield self.linear(f"{name}.wq_b", q_latent)
        yield self.linear(f"{name}.weights_proj", x)
        dots = self.norms[f"{name}.q_rope.out"] * self.norms[f"{name}.k_rope.out"]
        heads = math.sqrt(self.config.index_n_heads or 1) * self.norms[f"{name}.head_weights.out"]
        yield self.product(f"{name} scores", heads * dots, self.grid.head_weight + 2 * self.grid.index)

    def dense(self, name: str, x: float) -> Iterator[Product]:
        yield from self.projection(f"{name}.gate_proj", x)
        yield from self.projection(f"{name}.up_proj", x)
        yield from self.block_output(f"{name}.down_proj", self.norms[f"{name}.act_fn.out"])

    def moe(self, name: str, x: float) -> Iterator[Product]:
        yield self.linear(f"{name}.gate", x)
        biased = 2 * (1 + self.norms[f"{name}.gate.e_score_correction_bias"])  # a group's score is that of two experts
        yield self.product(f"{name}.gate biased scores", biased, self.grid.probability)
        yield from self.dense(f"{name}.experts", x)
        expert = self.pending
        yield from self.dense(f"{name}.shared_experts", x)
        weights = math.sqrt(self.config.num_experts_per_tok) * self.norms[f"{name}.gate.weigh.out"]
        self.pending += weights * expert
        self.residual_unit = max(self.residual_unit, self.linear_unit + self.grid.routing)
        yield self.product(f"{name} combine", self.pending, self.residual_unit)

    def residual(self, norm: str) -> Product:
        """The stream that ``norm`` sees. Its unit is that of the finest block so far."""
        return self.product(f"{norm}.in residual", self.norms[f"{norm}.in"] + self.pending, self.residual_unit)

    def block_output(self, weight: str, x: float) -> Iterator[Product]:
        """The last projection of a block: what it gives is added to the residual stream."""
        yield from self.projection(weight, x)
        self.pending = x * self.gain(weight)
        self.residual_unit = max(self.residual_unit, self.unit(weight))

    def projection(self, weight: str, x: float) -> Iterator[Product]:
        """A x of every adapter, then the weight's product and what an adapter adds to it."""
        for adapter in self.adapters.get(weight, ()):
            yield self.linear(adapter.lora_a, x)
        yield self.product(weight, x * self.gain(weight), self.unit(weight))

    def gain(self, weight: str) -> float:
        """Largest row norm of the weight, with the adapter that adds most: a row has one at most."""
        return self.norms[weight] + _largest([0.0, *(a.gain for a in self.adapters.get(weight, ()))])

    def unit(self, weight: str) -> int:
        """Bits behind the binary point of the weight's product: B A x is a product of three."""
        finer = [self.grid.weight + a.finer for a in self.adapters.get(weight, ())]
        return self.linear_unit + max(finer, default=0)

    def linear(self, weight: str, x: float) -> Product:
        return self.product(weight, x * self.norms[weight], self.linear_unit)

    def product(self, name: str, bound: float, unit: int) -> Product:
        if math.isnan(bound):
            return Product(name, math.inf)
        return Product(name, math.log2(bound) + unit if bound > 0 else 0.0)
