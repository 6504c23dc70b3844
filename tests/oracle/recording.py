"""Runs the reference over loopback ranks and keeps every tapped value, whole."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TypeVar

import torch
from torch import Tensor

from reference import subject
from reference.checkpoint import TensorReader
from reference.config import ModelConfig
from reference.engine import Engine
from spcheck.comm.loopback import run_loopback

Result = TypeVar("Result")


@dataclass
class Recording:
    """Probe -> the values of its calls, in order; caches as of ``Engine.state``."""

    config: ModelConfig
    values: dict[str, list[Tensor]]
    state: dict[str, dict[int, Tensor]]

    def batch(self, probe: str, requests: int) -> Tensor:
        """The first call of every request, stacked [B, ..]."""
        return self.forward(probe, requests, 0)

    def forward(self, probe: str, requests: int, number: int) -> Tensor:
        """A probe's rows of all requests in its forward of that number, stacked [B, ..]."""
        return torch.stack(self.values[probe][number * requests : (number + 1) * requests])


def extra_taps(config: ModelConfig):
    """Places that are no probes of the protocol but stand in the recorded runs."""
    layers = [i for i in range(config.num_hidden_layers + len(config.mtp_layers)) if config.is_moe_layer(i)]
    return {
        f"model.layers.{i}.mlp.gate.score.in": (f"model.layers.{i}.mlp.gate.score", "in", 0, "Replicate", "value")
        for i in layers
    }


def record(
    config: ModelConfig,
    reader: TensorReader,
    ids: Tensor,
    *,
    tp: int = 1,
    drafts: int = 0,
    cuts: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float64,
) -> Recording:
    """``ids`` [B, S] are B requests; each is cut into chunks at ``cuts``. Then ``drafts`` draft steps of all."""
    return record_run(config, reader, lambda engine: run(engine, ids, cuts, drafts), tp=tp, dtype=dtype)


def record_run(
    config: ModelConfig,
    reader: TensorReader,
    drive: Callable[[Engine], None],
    *,
    tp: int = 1,
    dtype: torch.dtype = torch.float64,
) -> Recording:
    """What ``drive`` makes an engine compute."""
    aux = tuple(range(config.num_hidden_layers + 1))
    taps = subject.taps(config, scheme="reference", aux_layers=aux) | extra_taps(config)

    def recorded(engine):
        values = defaultdict(list)
        for probe, tap in taps.items():
            hook(engine, tap, values[probe])
        drive(engine)
        return values, engine.state()

    ranks = on_ranks(config, reader, recorded, tp=tp, dtype=dtype, aux_layers=aux)
    whole = {probe: put_together([values[probe] for values, _ in ranks], tap[3]) for probe, tap in taps.items()}
    return Recording(config, whole, ranks[0][1])


def on_ranks(
    config: ModelConfig,
    reader: TensorReader,
    drive: Callable[[Engine], Result],
    *,
    tp: int = 1,
    dtype: torch.dtype = torch.float64,
    aux_layers: tuple[int, ...] = (),
) -> list[Result]:
    """What ``drive`` returns on each rank, given its engine."""

    def rank(world):
        setup = SimpleNamespace(
            config=config,
            weights=reader,
            groups={"tp": world.group("tp", range(world.size))},
            dtype=dtype,
            device=torch.device("cpu"),
            aux_layers=aux_layers,
            lora_adapters=0,
        )
        return drive(subject.build(setup))

    return run_loopback(tp, rank)


def run(engine, ids: Tensor, cuts: tuple[int, ...], drafts: int) -> None:
    B, S = ids.shape
    engine.start([S + drafts] * B)
    for first, last in zip((0, *cuts), (*cuts, S), strict=True):
        engine.step([(b, first, ids[b, first:last]) for b in range(B)])
    for step in range(drafts):
        engine.draft(range(B), step)


def hook(engine, tap, sink: list[Tensor]) -> None:
    module, side, index = engine.get_submodule(tap[0]), tap[1], tap[2]

    def keep(values) -> None:
        values = values if isinstance(values, tuple) else (values,)
        sink.append(values[index].clone())

    if side == "in":
        module.register_forward_pre_hook(lambda _, args: keep(args))
    else:
        module.register_forward_hook(lambda _, args, output: keep(output))


def put_together(per_rank: list[list[Tensor]], placement: str) -> list[Tensor]:
    whole = []
    for pieces in zip(*per_rank, strict=True):
        if placement == "Replicate":
            assert all(torch.equal(piece, pieces[0]) for piece in pieces)
            whole.append(pieces[0])
        elif placement == "Shard(1)":
            whole.append(torch.cat(pieces, dim=1))
        else:
            assert placement == "Partial"
            whole.append(torch.stack(pieces).sum(dim=0))
    return whole


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest element; infinite if the shapes differ."""
    if ours.shape != theirs.shape:
        return float("inf")
    difference = (ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp_min(1e-300)
    return float(difference) if torch.isfinite(difference) else float("inf")
