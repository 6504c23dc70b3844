"""Which blocks of the checkpoint every parameter of a subject must hold: a table by names and ranks. No torch.

It is made from the config, the case, the side and the rank, and never from what a subject says. How bytes add up over
modules is told in :mod:`spcheck.families.deepseek.parameters`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from reference.config import ModelConfig
from spcheck.families.deepseek.parameters import mlp_ranks
from spcheck.families.deepseek.pieces import (
    Block,
    Holding,
    Piece,
    cut,
    packed,
    packed_transposed,
    stacked,
    vocabulary_rows,
    whole,
)
from spcheck.plan.plan import Plan
from spcheck.plan.schemes import SidePlan

_MLP = ("gate_proj", "up_proj", "down_proj")
_ADAPTED_ATTENTION = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj")
# A fused parameter of an adapter's first matrices -> the published matrices whose parts are stacked in it.
_FUSED_ATTENTION = {
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "q_b_proj": ("q_b_proj",),
    "o_proj": ("o_proj",),
}
_FUSED_MLP = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def holdings(plan: Plan, side: SidePlan, rank: int) -> list[Holding]:
    """What each parameter of a side must hold on a rank of the world, in the order of the model."""
    table = Plain(plan, side, rank) if side.plain else Packed(plan, side, rank)
    return list(table.all())


def repeated_tensors(config: ModelConfig) -> dict[str, str]:
    """Tensors of MTP layers that a checkpoint may leave out -> the tensor that stands in for each."""
    copies = {}
    for layer in config.mtp_layers:
        copies[f"model.layers.{layer}.embed_tokens.weight"] = "model.embed_tokens.weight"
        copies[f"model.layers.{layer}.shared_head.head.weight"] = "lm_head.weight"
    return copies


class _Table:
    """What both subjects have in common: the blocks of a rank, and the parameters that are one tensor each.

    D hidden size, t tensor-parallel ranks of the side.
    """

    def __init__(self, plan: Plan, side: SidePlan, rank: int) -> None:
        self.plan, self.side, self.rank, self.config = plan, side, rank, plan.config
        self.t, self.tp_rank = side.tp, plan.place(rank).tp_rank
        self.D = plan.config.hidden_size

    def all(self) -> Iterator[Holding]:
        """Every parameter."""
        yield self.table("model.embed_tokens.weight")
        for layer in range(self.config.mtp_layers.stop):
            yield from self.layer(f"model.layers.{layer}", layer)
        yield self.one(whole("model.norm.weight", self.D))
        yield self.table("lm_head.weight")

    def layer(self, name: str, layer: int) -> Iterator[Holding]:
        """One decoder or MTP layer."""
        is_mtp = layer in self.config.mtp_layers
        yield self.one(whole(f"{name}.input_layernorm.weight", self.D))
        yield from self.attention(f"{name}.self_attn")
        yield self.one(whole(f"{name}.post_attention_layernorm.weight", self.D))
        yield from self.moe(f"{name}.mlp") if self.config.is_moe_layer(layer) else self.mlp(f"{name}.mlp", moe=False)
        if is_mtp:
            yield from self.mtp(name)
        elif self.plan.case.lora_adapters:
            shared = f"{name}.mlp.shared_experts" if self.config.is_moe_layer(layer) else f"{name}.mlp"
            yield from self.adapters(f"{name}.self_attn", self.attention_blocks(f"{name}.self_attn"))
            yield from self.adapters(shared, self.mlp_blocks(shared, moe=self.config.is_moe_layer(layer)))

    def one(self, block: Block, divided: str = "", *, wide: bool = False) -> Holding:
        """A parameter that has the name of the tensor of which it holds a block."""
        return Holding(block.tensor, stacked([block]), divided, wide)

    def table(self, name: str) -> Holding:
        """A rank's rows of a vocabulary table."""
        rows = vocabulary_rows(whole(name, self.config.vocab_size, self.D), self.tp_rank, self.t)
        return Holding(name, rows, "tp")

    def attention_blocks(self, name: str) -> dict[str, Block]:
        """The matrices of attention on this rank, by their last name: heads are divided, latents are not."""
        c, D, H = self.config, self.D, self.config.num_attention_heads
        rq, rk, dn, dr, dv = c.q_lora_rank, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        q_b = whole(f"{name}.q_b_proj.weight", H * (dn + dr), rq)
        kv_b = whole(f"{name}.kv_b_proj.weight", H * (dn + dv), rk)
        o = whole(f"{name}.o_proj.weight", D, H * dv)
        return {
            "q_a_proj": whole(f"{name}.q_a_proj.weight", rq, D),
            "kv_a_proj_with_mqa": whole(f"{name}.kv_a_proj_with_mqa.weight", rk + dr, D),
            "q_b_proj": cut(q_b, 0, self.tp_rank, self.t),
            "kv_b_proj": cut(kv_b, 0, self.tp_rank, self.t),
            "o_proj": cut(o, 1, self.tp_rank, self.t),
        }

    def latent_norms(self, name: str) -> Iterator[Holding]:
        """The norms of both latents."""
        yield self.one(whole(f"{name}.q_a_layernorm.weight", self.config.q_lora_rank))
        yield self.one(whole(f"{name}.kv_a_layernorm.weight", self.config.kv_lora_rank))

    def indexer(self, name: str) -> Iterator[Holding]:
        """The indexer, whole on every rank."""
        heads, width = self.config.index_n_heads, self.config.index_head_dim
        if not self.config.has_indexer or heads is None or width is None:
            return
        yield self.one(whole(f"{name}.wq_b.weight", heads * width, self.config.q_lora_rank))
        yield self.one(whole(f"{name}.wk.weight", width, self.D))
        yield self.one(whole(f"{name}.k_norm.weight", width))
        yield self.one(whole(f"{name}.k_norm.bias", width))
        yield self.one(whole(f"{name}.weights_proj.weight", heads, self.D))

    def mlp_blocks(self, name: str, *, moe: bool) -> dict[str, Block]:
        """A dense MLP, or the shared expert of a ``moe`` layer, by the last names of its matrices."""
        c = self.config
        width = c.n_shared_experts * c.moe_intermediate_size if moe else c.intermediate_size
        ranks = mlp_ranks(self.side, moe=moe)
        return self.swiglu(name, width, self.tp_rank if ranks > 1 else 0, ranks)

    def mlp_divided(self, *, moe: bool) -> str:
        """Over which ranks these are cut."""
        return "tp" if mlp_ranks(self.side, moe=moe) > 1 else ""

    def swiglu(self, name: str, width: int, rank: int, ranks: int) -> dict[str, Block]:
        """The channels of rank ``rank`` of ``ranks``."""
        gate, up = (whole(f"{name}.{last}.weight", width, self.D) for last in _MLP[:2])
        down = whole(f"{name}.down_proj.weight", self.D, width)
        return {
            "gate_proj": cut(gate, 0, rank, ranks),
            "up_proj": cut(up, 0, rank, ranks),
            "down_proj": cut(down, 1, rank, ranks),
        }

    def router(self, name: str) -> Iterator[Holding]:
        """The router and its correction bias, whole and never below float32."""
        experts = self.config.n_routed_experts
        yield self.one(whole(f"{name}.weight", experts, self.D), wide=True)
        yield self.one(whole(f"{name}.e_score_correction_bias", experts), wide=True)

    def mtp(self, name: str) -> Iterator[Holding]:
        """What an MTP layer has beside a decoder layer."""
        yield self.table(f"{name}.embed_tokens.weight")
        yield self.one(whole(f"{name}.enorm.weight", self.D))
        yield self.one(whole(f"{name}.hnorm.weight", self.D))
        yield self.one(whole(f"{name}.eh_proj.weight", self.D, 2 * self.D))
        yield self.one(whole(f"{name}.shared_head.norm.weight", self.D))
        yield self.table(f"{name}.shared_head.head.weight")

    def low_rank(self, block: Block, adapter: int) -> tuple[Block, Block]:
        """A and B of one adapter beside this rank's block of a matrix: each is cut where the matrix is."""
        outputs, inputs = block.spans
        name = f"adapters.{adapter}.base_model.model.{block.tensor.removesuffix('.weight')}"
        inner = (0, self.plan.case.lora_rank)
        return Block(f"{name}.lora_A.weight", (inner, inputs)), Block(f"{name}.lora_B.weight", (outputs, inner))

    def attention(self, name: str) -> Iterator[Holding]:
        """Attention with its indexer."""
        raise NotImplementedError

    def moe(self, name: str) -> Iterator[Holding]:
        """A mixture of experts."""
        raise NotImplementedError

    def mlp(self, name: str, *, moe: bool) -> Iterator[Holding]:
        """A dense MLP, or the shared expert of a ``moe`` layer."""
        raise NotImplementedError

    def adapters(self, name: str, blocks: Mapping[str, Block]) -> Iterator[Holding]:
        """The adapters of the matrices in ``blocks``, which stand in module ``name``."""
        raise NotImplementedError


class Plain(_Table):
    """The reference: every parameter is a block of the tensor of its name."""

    def attention(self, name: str) -> Iterator[Holding]:
        """Each matrix by itself."""
        for last, block in self.attention_blocks(name).items():
            yield self.one(block, "tp" if last in ("q_b_proj", "kv_b_proj", "o_proj") else "")
        yield from self.latent_norms(name)
        yield from self.indexer(f"{name}.indexer")

    def moe(self, name: str) -> Iterator[Holding]:
        """The channels of every expert are divided over the tensor-parallel ranks."""
        yield from self.router(f"{name}.gate")
        width = self.config.moe_intermediate_size
        for expert in range(self.config.n_routed_experts):
            for block in self.swiglu(f"{name}.experts.{expert}", width, self.tp_rank, self.t).values():
                yield self.one(block, "tp")
        yield from self.mlp(f"{name}.shared_experts", moe=True)

    def mlp(self, name: str, *, moe: bool) -> Iterator[Holding]:
        """Three matrices."""
        for block in self.mlp_blocks(name, moe=moe).values():
            yield self.one(block, self.mlp_divided(moe=moe))

    def adapters(self, name: str, blocks: Mapping[str, Block]) -> Iterator[Holding]:
        """A and B of each adapter, beside the matrix that they belong to."""
        for last in (n for n in blocks if n in (*_ADAPTED_ATTENTION, *_MLP)):
            for adapter in range(self.plan.case.lora_adapters):
                A, B = self.low_rank(blocks[last], adapter)
                pair = f"{name}.{last}.adapters.each.{adapter}"
                yield Holding(f"{pair}.lora_A", stacked([A]), "tp")
                yield Holding(f"{pair}.lora_B", stacked([B]), "tp")


class Packed(_Table):
    """The serving engine: fused projections, absorbed ``kv_b_proj``, stacked experts."""

    def attention(self, name: str) -> Iterator[Holding]:
        """The two projections to latents are one; ``kv_b_proj`` is divided into keys and transposed values by head."""
        blocks = self.attention_blocks(name)
        fused = [blocks[last] for last in _FUSED_ATTENTION["fused_qkv_a_proj"]]
        yield Holding(f"{name}.fused_qkv_a_proj.weight", stacked(fused))
        yield from self.latent_norms(name)
        yield self.one(blocks["q_b_proj"], "tp")
        yield from self.indexer(f"{name}.indexer")
        keys, values = self.absorbed(blocks["kv_b_proj"])
        yield Holding(f"{name}.absorb_key", keys, "tp")
        yield Holding(f"{name}.absorb_value", values, "tp")
        yield self.one(blocks["o_proj"], "tp")

    def absorbed(self, kv_b: Block) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        """Keys [heads, dn, rk] and values [heads, rk, dv] of this rank's heads."""
        dn, dv = self.config.qk_nope_head_dim, self.config.v_head_dim
        firsts = range(0, kv_b.shape[0], dn + dv)
        keys = [[kv_b.rows(first, first + dn)] for first in firsts]
        values = [kv_b.rows(first + dn, first + dn + dv) for first in firsts]
        return packed(keys), packed_transposed(values)

    def moe(self, name: str) -> Iterator[Holding]:
        """Whole experts are divided over the world; without expert parallelism the channels of all experts are."""
        yield from self.router(f"{name}.gate")
        E, width, ranks = self.config.n_routed_experts, self.config.moe_intermediate_size, self.plan.case.ranks
        first, last, rank, cuts = 0, E, self.rank, ranks
        if self.plan.case.expert_parallel:
            first, last, rank, cuts = self.rank * E // ranks, (self.rank + 1) * E // ranks, 0, 1
        experts = [self.swiglu(f"{name}.experts.{e}", width, rank, cuts) for e in range(first, last)]
        yield Holding(f"{name}.experts.w13", packed([[e["gate_proj"], e["up_proj"]] for e in experts]), "world")
        yield Holding(f"{name}.experts.w2", packed([[e["down_proj"]] for e in experts]), "world")
        yield from self.mlp(f"{name}.shared_experts", moe=True)

    def mlp(self, name: str, *, moe: bool) -> Iterator[Holding]:
        """Gate and up are one matrix: the rows of gate, then those of up."""
        blocks = self.mlp_blocks(name, moe=moe)
        divided = self.mlp_divided(moe=moe)
        yield Holding(f"{name}.gate_up_proj.weight", stacked([blocks["gate_proj"], blocks["up_proj"]]), divided)
        yield self.one(blocks["down_proj"], divided)

    def mtp(self, name: str) -> Iterator[Holding]:
        """A fused norm of both inputs holds their gains once more."""
        yield from super().mtp(name)
        if self.config.fused_eh_norm:
            gains = [whole(f"{name}.{norm}.weight", self.D) for norm in ("enorm", "hnorm")]
            pieces = [Piece(gain.tensor, gain.spans, ((i, i + 1), (0, self.D))) for i, gain in enumerate(gains)]
            yield Holding(f"{name}.fused_eh_norm.weight", tuple(pieces))

    def adapters(self, name: str, blocks: Mapping[str, Block]) -> Iterator[Holding]:
        """Of a fused matrix the A are stacked, and each published matrix in it has its own B."""
        targets = _FUSED_ATTENTION if "q_a_proj" in blocks else _FUSED_MLP
        for target, published in targets.items():
            for adapter in range(self.plan.case.lora_adapters):
                pairs = [self.low_rank(blocks[last], adapter) for last in published]
                module = f"{name}.{target}.adapters.{adapter}"
                yield Holding(f"{module}.lora_a", stacked([A for A, _ in pairs]), "tp")
                for number, (_, B) in enumerate(pairs):
                    yield Holding(f"{module}.lora_b.{number}", stacked([B]), "tp")
