"""The table of what every parameter must hold, against slices made by hand with torch."""

import pytest
import torch
import torch.nn.functional as F

from spcheck.case import Case
from spcheck.families.deepseek.holdings import holdings
from spcheck.plan.plan import make_plan
from spcheck.worker.expected import Expected
from spcheck.worker.weights import open_weights

MOE, DENSE, DRAFT = "model.layers.2", "model.layers.0", "model.layers.5"


class Held:
    """What one rank of one side must hold, whole; ``read`` gives the checkpoint's tensors."""

    def __init__(self, rank=0, side="candidate", dp=1, **options):
        requests = ((3,),) * dp
        self.plan = make_plan(Case(**{"requests": requests, "numerics": "float64", **options}))
        self.side = getattr(self.plan, side)
        self.config = self.plan.config
        self.reader = open_weights(self.plan)
        self.expected = Expected(self.plan, self.reader)
        self.table = {holding.name: holding for holding in holdings(self.plan, self.side, rank)}

    def read(self, name):
        return self.reader.tensor(name).double()

    def __getitem__(self, name):
        holding = self.table[name]
        out = torch.full(holding.shape, torch.nan, dtype=torch.float64)
        for piece in holding.pieces:
            out[tuple(slice(*span) for span in piece.target)] = self.expected.piece(piece, torch.float64)
        return out

    def check(self, name, wanted):
        assert torch.equal(self[name], wanted), name


@pytest.mark.parametrize("rank", range(3))
def test_heads_and_vocabulary_are_divided_over_the_tensor_parallel_ranks(rank):
    held = Held(rank, tp=3, scheme="tp")
    attn, c = f"{DENSE}.self_attn", held.config
    held.check(f"{attn}.q_b_proj.weight", held.read(f"{attn}.q_b_proj.weight").chunk(3)[rank])
    held.check(f"{attn}.o_proj.weight", held.read(f"{attn}.o_proj.weight").chunk(3, dim=1)[rank])
    by_head = held.read(f"{attn}.kv_b_proj.weight").unflatten(0, (c.num_attention_heads, -1)).chunk(3)[rank]
    held.check(f"{attn}.absorb_key", by_head[:, : c.qk_nope_head_dim])
    held.check(f"{attn}.absorb_value", by_head[:, c.qk_nope_head_dim :].transpose(1, 2))
    down = [held.read(f"{attn}.{name}.weight") for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    held.check(f"{attn}.fused_qkv_a_proj.weight", torch.cat(down))
    for table in ("model.embed_tokens.weight", "lm_head.weight", f"{DRAFT}.shared_head.head.weight"):
        rows = -(-c.vocab_size // 3)
        held.check(table, F.pad(held.read(table), (0, 0, 0, 3 * rows - c.vocab_size)).split(rows)[rank])


@pytest.mark.parametrize(
    ("scheme", "moe", "divided"),
    [
        *[("tp", False, True), ("tp", True, True), ("moe-sp", False, True)],
        *[("moe-sp", True, False), ("full-sp", False, False), ("full-sp", True, False)],
    ],
)
@pytest.mark.parametrize("rank", range(4))
def test_mlps_are_whole_where_their_rows_are_shards(scheme, moe, divided, rank):
    held = Held(rank, tp=2, dp=2, scheme=scheme)
    mlp = f"{MOE}.mlp.shared_experts" if moe else f"{DENSE}.mlp"
    gate, up, down = (held.read(f"{mlp}.{name}_proj.weight") for name in ("gate", "up", "down"))
    if divided:
        gate, up, down = gate.chunk(2)[rank % 2], up.chunk(2)[rank % 2], down.chunk(2, dim=1)[rank % 2]
    held.check(f"{mlp}.gate_up_proj.weight", torch.cat([gate, up]))
    held.check(f"{mlp}.down_proj.weight", down)


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("expert_parallel", [True, False])
def test_experts_or_their_channels_are_divided_over_the_world(tp, dp, expert_parallel):
    for rank in range(tp * dp):
        held = Held(rank, tp=tp, dp=dp, expert_parallel=expert_parallel)
        world, experts, block = tp * dp, range(held.config.n_routed_experts), rank
        if expert_parallel:
            count = len(experts) // world
            experts, world, block = experts[rank * count : (rank + 1) * count], 1, 0
        up_and_down = []
        for e in experts:
            gate, up, down = (held.read(f"{MOE}.mlp.experts.{e}.{name}_proj.weight") for name in ("gate", "up", "down"))
            both = torch.cat([gate.chunk(world)[block], up.chunk(world)[block]])
            up_and_down.append((both, down.chunk(world, dim=1)[block]))
        held.check(f"{MOE}.mlp.experts.w13", torch.stack([both for both, _ in up_and_down]))
        held.check(f"{MOE}.mlp.experts.w2", torch.stack([down for _, down in up_and_down]))


@pytest.mark.parametrize("rank", range(2))
def test_adapters_are_cut_where_their_matrices_are(rank):
    held = Held(rank, tp=2, lora_rank=4, lora_adapters=2)
    stored = f"adapters.1.base_model.model.{DENSE}"
    attn, mlp = f"{DENSE}.self_attn", f"{DENSE}.mlp"

    def pair(part):
        return held.read(f"{stored}.{part}.lora_A.weight"), held.read(f"{stored}.{part}.lora_B.weight")

    a_q, b_q = pair("self_attn.q_a_proj")
    a_kv, b_kv = pair("self_attn.kv_a_proj_with_mqa")
    held.check(f"{attn}.fused_qkv_a_proj.adapters.1.lora_a", torch.cat([a_q, a_kv]))
    held.check(f"{attn}.fused_qkv_a_proj.adapters.1.lora_b.0", b_q)
    held.check(f"{attn}.fused_qkv_a_proj.adapters.1.lora_b.1", b_kv)
    a, b = pair("mlp.up_proj")
    gate_a, _ = pair("mlp.gate_proj")
    held.check(f"{mlp}.gate_up_proj.adapters.1.lora_a", torch.cat([gate_a, a]))
    held.check(f"{mlp}.gate_up_proj.adapters.1.lora_b.1", b.chunk(2)[rank])
    a, b = pair("self_attn.o_proj")
    held.check(f"{attn}.o_proj.adapters.1.lora_a", a.chunk(2, dim=1)[rank])
    held.check(f"{attn}.o_proj.adapters.1.lora_b.0", b)

    plain = Held(rank, side="reference", tp=2, lora_rank=4, lora_adapters=2)
    plain.check(f"{attn}.o_proj.adapters.each.1.lora_A", a.chunk(2, dim=1)[rank])
    plain.check(f"{attn}.o_proj.adapters.each.1.lora_B", b)
    assert not any(".layers.5." in name for name in held.table if "adapters" in name), "MTP layers have none"


@pytest.mark.parametrize("rank", range(4))
def test_the_reference_divides_every_matrix_over_its_own_ranks(rank):
    held = Held(rank, side="reference", tp=2, dp=2)
    for name, axis in (("q_b_proj", 0), ("kv_b_proj", 0), ("o_proj", 1)):
        tensor = f"{DENSE}.self_attn.{name}.weight"
        held.check(tensor, held.read(tensor).chunk(2, dim=axis)[rank % 2])
    for name, axis in (("gate", 0), ("up", 0), ("down", 1)):
        for mlp in (f"{DENSE}.mlp", f"{MOE}.mlp.experts.7", f"{MOE}.mlp.shared_experts"):
            tensor = f"{mlp}.{name}_proj.weight"
            held.check(tensor, held.read(tensor).chunk(2, dim=axis)[rank % 2])
    for name in ("self_attn.indexer.wk.weight", "mlp.gate.weight", "mlp.gate.e_score_correction_bias"):
        held.check(f"{MOE}.{name}", held.read(f"{MOE}.{name}"))


def test_a_reference_of_one_rank_holds_everything():
    held = Held(0, side="reference", tp=2, reference_world=1)
    for name, holding in held.table.items():
        assert holding.shape == tuple(held.reader.shape(name)), name
        held.check(name, held.read(name))


def test_a_fused_norm_holds_both_gains():
    held = Held(tp=2, overrides=(("fused_eh_norm", True),))
    gains = [held.read(f"{DRAFT}.{norm}.weight") for norm in ("enorm", "hnorm")]
    held.check(f"{DRAFT}.fused_eh_norm.weight", torch.stack(gains))


def test_the_router_alone_is_never_narrower_than_float32():
    held = Held(tp=2, numerics="bfloat16")
    wide = {name for name, holding in held.table.items() if holding.wide}
    assert wide == {n for n in held.table if ".mlp.gate." in n}
    kinds = {held.expected.dtype(held.table[name]) for name in wide}
    assert kinds == {torch.float32}


def test_a_copy_that_the_checkpoint_leaves_out_is_read_from_the_main_table():
    held = Held(tp=2)

    class WithoutCopies:
        shape, tensor = held.reader.shape, held.reader.tensor

        def names(self):
            return [n for n in held.reader.names() if n != f"{DRAFT}.embed_tokens.weight"]

    held.expected = Expected(held.plan, WithoutCopies())
    rows = held.config.vocab_size // 2
    held.check(f"{DRAFT}.embed_tokens.weight", held.read("model.embed_tokens.weight")[:rows])


def test_in_exact_numerics_values_are_on_the_grid():
    held = Held(tp=1, numerics="exact")
    held.check("model.norm.weight", held.reader.tensor("model.norm.weight"))
    assert held["model.norm.weight"].dtype == torch.float64
