"""The tensors of a recorded transformers run, and where the reference computes each of them."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from recording import Recording, relative_error
from safetensors.torch import load_file
from torch import Tensor

from reference import rope

BLOCK_VALUES = {
    "attn_in": "input_layernorm.out",
    "q_latent": "self_attn.q_a_layernorm.out",
    "kv_latent": "self_attn.kv_a_layernorm.out",
    "attn_heads": "self_attn.o_proj.in",
    "attn_out": "self_attn.out",
    "mlp_in": "post_attention_layernorm.out",
    "mlp_out": "mlp.out",
    "shared_out": "mlp.shared_experts.out",
    "router_logits": "mlp.gate.score.in",
}
ROW_LISTS = ("router_logits", "expert_index", "expert_weight")  # recorded [B*S, ..], not [B, S, ..]


@dataclass
class Oracle:
    """One recorded run."""

    folder: Path

    def __post_init__(self) -> None:
        self.outputs = load_file(self.folder / "outputs.safetensors")
        self.ids = load_file(self.folder / "inputs.safetensors")["input_ids"]
        self.raw = json.loads((self.folder / "config.json").read_text())
        self.drafts = self.outputs["mtp.draft_logits"].shape[1]


def compare_all(oracle: Oracle, ours: Recording) -> dict[str, float]:
    """Recorded name -> relative error (0 or infinite for choices); every recorded tensor is compared."""
    compare = Comparison(oracle, ours)
    return {name: compare.error(name, theirs) for name, theirs in oracle.outputs.items()}


class Comparison:
    """Finds the reference's counterpart of a recorded name."""

    def __init__(self, oracle: Oracle, ours: Recording) -> None:
        self.oracle, self.ours = oracle, ours
        self.B, self.S = oracle.ids.shape
        self.N = ours.config.num_hidden_layers

    def error(self, name: str, theirs: Tensor) -> float:
        for pattern, compute in self.rules():
            match = re.fullmatch(pattern, name)
            if match:
                return compute(theirs, *match.groups())
        raise AssertionError(f"no rule compares the recorded tensor {name}")

    def rules(self) -> Iterator[tuple[str, Callable[..., float]]]:
        layer = r"(layers\.\d+|mtp\.block)"
        values = "|".join(BLOCK_VALUES)
        yield rf"{layer}\.({values})", self.block_value
        yield rf"{layer}\.out", self.block_out
        yield rf"{layer}\.expert_index", self.expert_index
        yield rf"{layer}\.expert_weight", self.expert_weight
        yield rf"{layer}\.index_scores", self.index_scores
        yield rf"{layer}\.selected", self.selected
        yield rf"{layer}\.topk_index", self.topk_index
        yield r"rope_(cos|sin)", self.rope_table
        yield r"loss_(main|mtp)", self.loss
        yield r"mtp\.draft_(tokens)", self.draft_tokens
        yield r"mtp\.draft_(logits)", self.draft_logits
        mtp = f"model.layers.{self.N}"
        whole = {"embed": "model.embed_tokens.out", "final_norm": "model.norm.out", "logits": "lm_head.out"}
        whole |= {"mtp.proj": f"{mtp}.eh_proj.out", "mtp.block_out": f"{mtp}.shared_head.norm.in"}
        whole |= {"mtp.normed": f"{mtp}.out", "mtp.logits": f"{mtp}.shared_head.head.out"}
        for name, probe in whole.items():
            yield re.escape(name), lambda theirs, probe=probe: self.close(self.rows(probe), theirs)

    def rows(self, probe: str) -> Tensor:
        """A probe's rows of all requests [B, S, ..]; of the MTP layer without the row that drafts."""
        rows = self.ours.batch(probe, self.B)
        return rows[:, :-1] if probe.startswith(f"model.layers.{self.N}.") else rows

    def block(self, where: str) -> str:
        return f"model.layers.{self.N}" if where == "mtp.block" else f"model.{where}"

    @staticmethod
    def close(ours: Tensor, theirs: Tensor) -> float:
        return relative_error(ours, theirs)

    @staticmethod
    def same(ours: Tensor, theirs: Tensor) -> float:
        return 0.0 if torch.equal(ours.long(), theirs.long()) else float("inf")

    def block_value(self, theirs: Tensor, where: str, what: str) -> float:
        ours = self.rows(f"{self.block(where)}.{BLOCK_VALUES[what]}")
        return self.close(ours.flatten(0, 1) if what in ROW_LISTS else ours, theirs)

    def block_out(self, theirs: Tensor, where: str) -> float:
        if where == "mtp.block":
            return self.close(self.rows(f"model.layers.{self.N}.shared_head.norm.in"), theirs)
        return self.close(self.rows(f"model.aux.{int(where.split('.')[1]) + 1}"), theirs)

    def expert_index(self, theirs: Tensor, where: str) -> float:
        ids = self.rows(f"{self.block(where)}.mlp.gate.choose.out").flatten(0, 1)
        return self.same(ids.sort(dim=-1).values, theirs)

    def expert_weight(self, theirs: Tensor, where: str) -> float:
        ids = self.rows(f"{self.block(where)}.mlp.gate.choose.out").flatten(0, 1)
        weights = self.rows(f"{self.block(where)}.mlp.gate.weigh.out").flatten(0, 1)
        return self.close(weights.gather(1, ids.argsort(dim=-1)), theirs)

    def scores(self, where: str) -> Tensor:
        scores = self.rows(f"{self.block(where)}.self_attn.indexer.choose.in")
        return scores[..., : scores.shape[1]]

    def index_scores(self, theirs: Tensor, where: str) -> float:
        """Only the allowed keys: a masked score is -inf here and a large finite number there."""
        ours = self.scores(where)
        allowed = torch.isfinite(ours)
        assert torch.equal(allowed, theirs > -1e30)
        return self.close(ours[allowed], theirs[allowed])

    def chosen(self, where: str) -> Tensor:
        """[B, S, S] whether a key is chosen."""
        ids = self.rows(f"{self.block(where)}.self_attn.indexer.choose.out")
        keys = torch.arange(ids.shape[1])
        return (ids[..., None] == keys).any(dim=2)

    def selected(self, theirs: Tensor, where: str) -> float:
        return self.same(self.chosen(where), theirs)

    def topk_index(self, theirs: Tensor, where: str) -> float:
        """Rows with fewer allowed keys than k are filled up with masked keys there."""
        ids = self.rows(f"{self.block(where)}.self_attn.indexer.choose.out").sort(dim=-1).values
        full = slice(theirs.shape[-1] - 1, None)
        return self.same(ids[:, full], theirs[:, full])

    def rope_table(self, theirs: Tensor, which: str) -> float:
        angles = torch.arange(self.S)[:, None] * torch.tensor(rope.frequencies(self.ours.config), dtype=torch.float64)
        table = getattr(torch, which)(angles) * rope.table_scale(self.ours.config)
        return self.close(table.expand_as(theirs), theirs)

    def loss(self, theirs: Tensor, which: str) -> float:
        probe, shift = ("lm_head.out", 1) if which == "main" else (f"model.layers.{self.N}.shared_head.head.out", 2)
        logits = self.rows(probe)[:, : self.S - shift]
        return self.close(F.cross_entropy(logits.flatten(0, 1), self.oracle.ids[:, shift:].flatten()), theirs)

    def per_draft(self, probe: str) -> Tensor:
        """The last row of every draft step: [B, steps, ..]."""
        last = torch.stack([call[-1] for call in self.ours.values[f"model.layers.{self.N}.shared_head.{probe}"]])
        return last.unflatten(0, (self.oracle.drafts, self.B)).transpose(0, 1)

    def draft_tokens(self, theirs: Tensor, _: str) -> float:
        first = torch.stack(self.ours.values["sampler.out"])
        return self.same(torch.cat((first, self.per_draft("sampler.out")), dim=1), theirs)

    def draft_logits(self, theirs: Tensor, _: str) -> float:
        return self.close(self.per_draft("head.out"), theirs)
