"""Forward hooks that copy what the taps name, and know which module runs.

Hooks never communicate: each rank keeps its local pieces until the forward is over.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spcheck.comm.trace import Trace
from spcheck.subjects.protocol import Tap

_KINDS = ("value", "set", "scores", "token", "accepted", "logits", "work", "order", "keys")
_KINDS_BY_IDS = ("by", "keys", "all-keys", "routed")


class TapError(Exception):
    """A subject's tap that names no module, or a place where no tensor stands."""


@dataclass(frozen=True)
class Piece:
    """One firing of a probe on this rank: a copy of the local value."""

    probe: str
    value: Tensor


class Capture:
    """Hooks on one subject. ``pieces`` grows in execution order until :meth:`drain`; a trace follows it live.

    Raises:
        TapError: a tap's module does not exist (a ModuleList without a forward never fires either).
    """

    def __init__(self, root: nn.Module, taps: Mapping[str, Tap]) -> None:
        self._trace = Trace()
        self.pieces: list[Piece] = []
        self.fired: set[str] = set()
        self._wanted: Container[str] | None = None
        self._stack: list[str] = []
        self._latest: dict[str, Tensor | None] = {tap.ids: None for tap in taps.values() if tap.ids}
        self._handles: list[Any] = []
        modules = dict(root.named_modules())
        for probe, tap in taps.items():
            _check(probe, tap, modules)
        watched = {above for tap in taps.values() for above in _ancestry(tap.module)}
        for name in sorted(watched):
            here = {probe: tap for probe, tap in taps.items() if tap.module == name}
            self._watch(name, modules[name], here)

    @property
    def module(self) -> str:
        """The innermost probed module, or module with one below it, whose forward is running."""
        return self._stack[-1] if self._stack else ""

    def start(self, trace: Trace) -> None:
        """Forgets the last case, and follows the next one in ``trace``."""
        self._trace = trace
        self.pieces = []
        self.fired = set()
        self._wanted = None
        self._stack.clear()

    def watch(self, probes: Container[str] | None) -> None:
        """Copies these probes alone in the forwards to come, None for all."""
        self._wanted = probes

    def drain(self) -> list[Piece]:
        """The pieces since the last call, in execution order."""
        pieces, self.pieces = self.pieces, []
        return pieces

    def goes_on_with(self, probe: str, ids: Tensor) -> None:
        """The subject goes on with other ids than a probe saw: values by key that follow are kept in their order."""
        if probe in self._latest:
            self._latest[probe] = ids

    def close(self) -> None:
        """Takes all hooks off."""
        for handle in self._handles:
            handle.remove()

    def _watch(self, name: str, module: nn.Module, taps: Mapping[str, Tap]) -> None:
        """One hook before and one behind a module: each costs more than what it does here."""
        inputs = [(probe, tap) for probe, tap in taps.items() if tap.side == "in"]
        outputs = [(probe, tap) for probe, tap in taps.items() if tap.side == "out"]

        def before(_: nn.Module, args: tuple[Any, ...]) -> None:
            self._stack.append(name)
            self._trace.module(name)
            for probe, tap in inputs:
                self._keep(probe, tap, args)

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            for probe, tap in outputs:
                self._keep(probe, tap, output if isinstance(output, tuple) else (output,))
            self._stack.pop()
            self._trace.module(self.module)

        self._handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def _keep(self, probe: str, tap: Tap, values: tuple[Any, ...]) -> None:
        self._trace.probe(probe)
        if self._wanted is not None and probe not in self._wanted:
            return
        value = values[tap.index] if tap.index < len(values) else None
        if not isinstance(value, Tensor):
            raise TapError(f"probe {probe}: no tensor stands at element {tap.index}")
        self.fired.add(probe)
        # A clone: a slice would keep its whole storage alive, and fused norms write in place.
        all_keys = tap.kind.startswith("all-keys:")
        kept = self._chosen_keys(probe, tap, value) if all_keys else value.detach().clone()
        if probe in self._latest:
            self._latest[probe] = kept
        self.pieces.append(Piece(probe, kept))

    def _chosen_keys(self, probe: str, tap: Tap, value: Tensor) -> Tensor:
        """Of one value per key [rows, heads, keys], those of the chosen keys [rows, heads, k]."""
        ids = self._latest[tap.ids or ""]
        if ids is None or ids.shape[0] != value.shape[0]:
            raise TapError(f"probe {probe}: no choice {tap.ids} of as many rows stands before it")
        places = ids.clamp(min=0).unsqueeze(1).expand(-1, value.shape[1], -1)
        return value.detach().gather(2, places).masked_fill_((ids < 0).unsqueeze(1), tap.fill)


def _check(probe: str, tap: Tap, modules: Mapping[str, nn.Module]) -> None:
    """A misspelt word must not switch a check off."""
    module, side, index, placement, kind = tap.module, tap.side, tap.index, tap.placement, tap.kind
    prefix = kind.partition(":")[0]
    if module not in modules:
        raise TapError(f"probe {probe} is tapped at {module!r}, which is no module of the subject")
    if side not in ("in", "out") or index < 0:
        raise TapError(f"probe {probe} is tapped at side {side!r}, element {index}")
    if placement not in ("Replicate", "Shard(0)", "Shard(1)", "Partial"):
        raise TapError(f"probe {probe} has the unknown placement {placement!r}")
    if prefix not in (_KINDS if prefix == kind else _KINDS_BY_IDS):
        raise TapError(f"probe {probe} is of the unknown kind {kind!r}")


def _ancestry(name: str) -> list[str]:
    """A module's name and those of the modules it is in, outermost first."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


class PaddingWriter:
    """Writes the padding content into the rows behind the real ones, wherever such rows enter a subject.

    ``stale`` is what stood there in the forward before, as in a buffer that is used again; zero where there was less.
    """

    def __init__(self, root: nn.Module, places: list[tuple[str, str, int]]) -> None:
        self._real = 0
        self._padded = 0
        self._content = "zero"
        self._seed = 0
        self._before: dict[int, Tensor] = {}
        modules = dict(root.named_modules())
        for place, (name, side, index) in enumerate(places):
            if side == "in":
                modules[name].register_forward_pre_hook(lambda _, args, i=index, p=place: self._replace(args, i, p))
            else:
                modules[name].register_forward_hook(lambda _, __, output, p=place: self._filled(output, p))

    def start(self, content: str, seed: int) -> None:
        """Forgets the last case; says what padded rows hold in the next one."""
        self._content, self._seed = content, seed
        self._before = {}

    def expect(self, real: int, padded: int) -> None:
        """Says how many rows of the next forward are real, and how many there are with graph padding."""
        self._real, self._padded = real, padded

    def _replace(self, args: tuple[Any, ...], index: int, place: int) -> tuple[Any, ...]:
        return (*args[:index], self._filled(args[index], place), *args[index + 1 :])

    def _filled(self, x: Tensor, place: int) -> Tensor:
        """``x`` [n, D] with its rows ``real <= row < padded`` replaced."""
        if min(self._padded, x.shape[0]) > self._real:
            x = x.clone()
            self._write(x[self._real : self._padded], place)
        if self._content == "stale":
            self._before[place] = x.clone()  # the subject may write into its own
        return x

    def _write(self, tail: Tensor, place: int) -> None:
        if self._content == "random":
            generator = torch.Generator().manual_seed(self._seed)
            # Multiples of 2^-8 lie on every grid of exact arithmetic.
            tail.copy_(torch.randint(-1024, 1025, tail.shape, generator=generator) / 256)
            return
        tail.fill_(float("nan") if self._content == "nan" else 0.0)
        before = self._before.get(place, tail[:0])[self._real : self._real + len(tail)]
        tail[: len(before)] = before
