"""Reference engines of one rank with random weights, for the tests of the reference."""

import json
from pathlib import Path
from types import SimpleNamespace

import torch

from reference import subject
from reference.checkpoint import RandomWeights
from reference.config import parse_config

PRESET = Path(__file__).parents[2] / "spcheck" / "families" / "deepseek" / "presets" / "dsv32-tiny.json"
FEWER = {"num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 12, "num_experts_per_tok": 4}
RAW = json.loads(PRESET.read_text()) | FEWER
CPU = torch.device("cpu")


class Alone:
    """A group of one rank that counts its collectives."""

    rank, size = 0, 1

    def __init__(self):
        self.calls = []

    def all_reduce(self, x):
        self.calls.append(("all_reduce", tuple(x.shape)))
        return x.clone()

    def all_gather(self, x):
        self.calls.append(("all_gather", tuple(x.shape)))
        return x.clone()


def engine_of(*, reader=None, group=None, dtype=torch.float64, aux_layers=(), **changes):
    config = parse_config(RAW | {k: v for k, v in changes.items() if k in RAW}, changes)
    setup = SimpleNamespace(
        config=config,
        weights=reader or RandomWeights(config, 0),
        groups={"tp": group or Alone()},
        dtype=dtype,
        device=CPU,
        aux_layers=aux_layers,
        lora_adapters=0,
    )
    return subject.build(setup)


def keep(engine, module: str) -> list[torch.Tensor]:
    outputs = []
    engine.get_submodule(module).register_forward_hook(lambda _, __, out: outputs.append(out))
    return outputs


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= 1e-12 * b.abs().max())
