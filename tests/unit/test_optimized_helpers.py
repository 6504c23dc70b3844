"""Ranks as threads, random weights, and one case of the optimized model; used by the other test_optimized files."""

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch

from optimized import subject
from reference.checkpoint import RandomWeights
from reference.config import parse_config
from spcheck.comm.loopback import run_loopback

PRESETS = Path(__file__).parents[2] / "spcheck" / "families" / "deepseek" / "presets"
PRESET = PRESETS / "dsv32-tiny.json"
ALTERNATING = PRESETS / "dsv32-alternating.json"
F64 = torch.float64


@functools.cache
def tiny(preset=PRESET, **overrides):
    return parse_config(json.loads(preset.read_text()), overrides)


@functools.cache
def weights(config, seed=0):
    return RandomWeights(config, seed)


def groups(world, dp=1):
    """The communicators of one rank of dp x tp, DP-major."""
    tp = world.size // dp
    dp_rank, tp_rank = divmod(world.rank, tp)
    own, peers = range(dp_rank * tp, (dp_rank + 1) * tp), range(tp_rank, world.size, tp)
    members = {"tp": own, "ep": range(world.size)} | ({"dp": peers, "dp_cpu": peers} if dp > 1 else {})
    return {name: world.group(name, ranks) for name, ranks in members.items()}


def token_ids(config, n, seed=0):
    return torch.randint(config.vocab_size, (n,), generator=torch.Generator().manual_seed(seed))


DEFAULTS = {
    "dtype": F64,
    "device": torch.device("cpu"),
    "aux_layers": (),
    "pad_to": None,
    "graph_sizes": (),
    "skip_padding": True,
    "expert_parallel": True,
    "all2all_backend": "allgather_reducescatter",
    "lora_adapters": 0,
}


def build(world, config, *, scheme, dp=1, reader=None, calls=None, **options):
    """One rank's engine; ``options`` are attributes of what it is built from. ``calls`` gets its collectives."""
    handed = groups(world, dp)
    if calls is not None:
        handed = {name: Spy(group, calls) for name, group in handed.items()}
    return subject.build(setup_of(config, reader or weights(config), handed, scheme=scheme, **options))


def setup_of(config, reader, handed, **options):
    """What an engine is built from, with these options; plain attributes, as a subject knows no tool."""
    return SimpleNamespace(config=config, weights=reader, groups=handed, **(DEFAULTS | options))


def on_ranks(size, main):
    """What ``main(world)`` gives on every rank, with gradients off."""

    def run(world):
        with torch.no_grad():
            return main(world)

    return run_loopback(size, run)


@dataclass
class Seen:
    """What hooks saw on one rank, call by call."""

    out: dict = field(default_factory=dict)

    def watch(self, root, names):
        """Hooks, as handles to take them off again."""
        modules = dict(root.named_modules())
        return [modules[name].register_forward_hook(functools.partial(self._keep, name)) for name in names]

    def _keep(self, name, module, args, output):
        self.out.setdefault(name, []).append((args, output))

    def outputs(self, name):
        return [output for _, output in self.out.get(name, [])]

    def inputs(self, name):
        return [args for args, _ in self.out.get(name, [])]


def fill_padding(engine, config, real, content):
    """Writes ``content`` into rows ``real[0]`` and on, wherever padding rows enter."""
    modules = dict(engine.named_modules())

    def filled(x):
        x = x.clone()
        x[real[0] :] = content
        return x

    def before(index, module, args):
        return (*args[:index], filled(args[index]), *args[index + 1 :])

    for name, side, index in subject.padding_inputs(config):
        if side == "in":
            modules[name].register_forward_pre_hook(functools.partial(before, index))
        else:
            modules[name].register_forward_hook(lambda module, args, output: filled(output))


class Spy:
    """A communicator that adds (group, method, shape of the tensor) to ``calls``, which several may share."""

    def __init__(self, inner, calls):
        self.inner, self.calls = inner, calls
        self.rank, self.size = inner.rank, inner.size

    def __getattr__(self, name):
        def call(x, *args, **options):
            self.calls.append((self.inner.group, name, tuple(x.shape)))
            return getattr(self.inner, name)(x, *args, **options)

        return call


def close(a, b, tol=1e-12):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)
