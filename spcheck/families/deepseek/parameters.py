"""What one rank holds of a model's parameters: a table from the config's sizes and the side's dataflow.

Over the tensor-parallel ranks: heads, vocabulary (padded to a multiple of them), channels of dense MLPs and shared
experts. Whole: latent projections, indexer, norms, router, ``eh_proj``; under ``full-sp`` dense MLPs too, and shared
experts wherever experts see shards. Routed experts are divided over the world, in a plain subject over its ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from spcheck.families.deepseek.collectives import ITEM_BYTES
from spcheck.plan.plan import Plan
from spcheck.plan.schemes import SidePlan

PARTS = (
    "vocabulary",
    "attention",
    "dense MLP",
    "shared experts",
    "routed experts",
    "router",
    "norms",
    "MTP",
    "adapters",
)


@dataclass(frozen=True)
class Weights:
    """``bytes`` of parameters of one kind that one rank holds in ``module``, as ``phases.module_of`` names it."""

    module: str
    part: str
    bytes: int


def parameters(plan: Plan, side: SidePlan) -> list[Weights]:
    """All parameters of one rank, the same on every rank. MTP layers have tables and heads of their own."""
    return list(_Table(plan, side).all())


class _Table:
    """D hidden size, V vocabulary, t tensor-parallel ranks; elements of one rank."""

    def __init__(self, plan: Plan, side: SidePlan) -> None:
        self.plan, self.side, self.config = plan, side, plan.config
        self.D = plan.config.hidden_size
        self.t = side.tp

    def all(self) -> Iterator[Weights]:
        yield self.of("model.embed_tokens", "vocabulary", self.vocabulary)
        for layer in range(self.config.mtp_layers.stop):
            yield from self.layer(f"model.layers.{layer}", layer)
        for layer in range(self.config.num_hidden_layers if self.plan.case.lora_adapters else 0):
            yield from self.adapters(f"model.layers.{layer}", layer)
        for layer in self.config.mtp_layers:
            yield from self.mtp(f"model.layers.{layer}")
        yield self.of("model.norm", "norms", self.D)
        yield self.of("lm_head", "vocabulary", self.vocabulary)

    def of(self, module: str, part: str, elements: int, dtype: str | None = None) -> Weights:
        return Weights(module, part, elements * ITEM_BYTES[dtype or self.plan.dtype])

    @property
    def vocabulary(self) -> int:
        """One table: ceil(V/t) rows."""
        return -(-self.config.vocab_size // self.t) * self.D

    def layer(self, name: str, layer: int) -> Iterator[Weights]:
        yield self.of(f"{name}.input_layernorm", "norms", self.D)
        yield self.of(f"{name}.self_attn", "attention", self.attention + self.indexer)
        yield self.of(f"{name}.post_attention_layernorm", "norms", self.D)
        if self.config.is_moe_layer(layer):
            yield from self.moe(f"{name}.mlp", layer)
        else:
            yield self.of(f"{name}.mlp", "dense MLP", 3 * self.D * self.mlp_width(layer))

    @cached_property
    def attention(self) -> int:
        """Absorbed, ``kv_b_proj`` is two matrices of together as many elements."""
        c, heads = self.config, self.config.num_attention_heads // self.t
        rq, rk, dn, dr, dv = c.q_lora_rank, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        whole = self.D * rq + rq + self.D * (rk + dr) + rk
        return whole + heads * (rq * (dn + dr) + rk * (dn + dv) + dv * self.D)

    @cached_property
    def indexer(self) -> int:
        c = self.config
        if c.index_n_heads is None or c.index_head_dim is None:
            return 0
        Hi, di = c.index_n_heads, c.index_head_dim
        return Hi * di * c.q_lora_rank + di * self.D + 2 * di + Hi * self.D

    def mlp_width(self, layer: int) -> int:
        """Channels of the dense MLP or the shared expert."""
        moe = self.config.is_moe_layer(layer)
        width = (
            self.config.n_shared_experts * self.config.moe_intermediate_size if moe else self.config.intermediate_size
        )
        return width // mlp_ranks(self.side, moe=moe)

    def moe(self, name: str, layer: int) -> Iterator[Weights]:
        E, Fe = self.config.n_routed_experts, self.config.moe_intermediate_size
        over = self.t if self.side.plain else self.plan.case.ranks
        yield self.of(name, "router", E * self.D + E, self.plan.wide_dtype)
        yield self.of(name, "routed experts", 3 * self.D * Fe * E // over)
        yield self.of(name, "shared experts", 3 * self.D * self.mlp_width(layer))

    def mtp(self, name: str) -> Iterator[Weights]:
        yield self.of(f"{name}.embed_tokens", "vocabulary", self.vocabulary)
        yield self.of(f"{name}.enorm", "norms", self.D)
        yield self.of(f"{name}.hnorm", "norms", self.D)
        if self.config.fused_eh_norm and not self.side.plain:
            yield self.of(f"{name}.fused_eh_norm", "norms", 2 * self.D)  # beside the two that it fuses
        yield self.of(f"{name}.eh_proj", "MTP", 2 * self.D * self.D)
        yield self.of(f"{name}.shared_head", "norms", self.D)
        yield self.of(f"{name}.shared_head", "vocabulary", self.vocabulary)

    def adapters(self, name: str, layer: int) -> Iterator[Weights]:
        """A [r, inputs] and B [outputs, r] of every adapted projection; only the side that is divided there is here."""
        c, heads, width = self.config, self.config.num_attention_heads // self.t, self.mlp_width(layer)
        D, rq, latent = self.D, c.q_lora_rank, c.kv_lora_rank + c.qk_rope_head_dim
        query = heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
        attention = (D + rq) + (rq + query) + (D + latent) + (heads * c.v_head_dim + D)
        rows = self.plan.case.lora_adapters * self.plan.case.lora_rank
        yield self.of(f"{name}.self_attn", "adapters", rows * attention)
        yield self.of(f"{name}.mlp", "adapters", rows * 3 * (D + width))


def mlp_ranks(side: SidePlan, *, moe: bool) -> int:
    """The ranks over which the channels of a dense MLP, or of a ``moe`` layer's shared expert, are divided."""
    return 1 if side.scheme == "full-sp" or (moe and side.sharded) else side.tp
