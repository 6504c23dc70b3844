"""Forward hooks that copy what the taps name, and know which module runs.

Hooks never communicate: each rank keeps its local pieces until the forward is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spcheck.comm.trace import Trace
from spcheck.subject import Tap


class TapError(Exception):
    """A subject's tap that names no module, or a place where no tensor stands."""


@dataclass(frozen=True)
class Piece:
    """One firing of a probe on this rank: a copy of the local value."""

    probe: str
    value: Tensor


class Capture:
    """Hooks on one subject. ``pieces`` grows in execution order until :meth:`drain`; ``trace`` follows it live.

    Raises:
        TapError: a tap's module does not exist (a ModuleList without a forward never fires either).
    """

    def __init__(self, root: nn.Module, taps: Mapping[str, Tap], trace: Trace | None = None) -> None:
        self._trace = trace or Trace()
        self.pieces: list[Piece] = []
        self.fired: set[str] = set()
        self._stack: list[str] = []
        self._handles: list[Any] = []
        modules = dict(root.named_modules())
        for probe, tap in taps.items():
            _check(probe, tap, modules)
        for name in sorted({above for tap in taps.values() for above in _ancestry(tap[0])}):
            self._track(name, modules[name])
        for probe, tap in taps.items():
            self._watch(probe, modules[tap[0]], side=tap[1], index=tap[2])

    @property
    def module(self) -> str:
        """The innermost probed module, or module with one below it, whose forward is running."""
        return self._stack[-1] if self._stack else ""

    def drain(self) -> list[Piece]:
        """The pieces since the last call, in execution order."""
        pieces, self.pieces = self.pieces, []
        return pieces

    def close(self) -> None:
        """Takes all hooks off."""
        for handle in self._handles:
            handle.remove()

    def _track(self, name: str, module: nn.Module) -> None:
        # The push comes first and the pop last, so that a probe's own hook sees its module as the running one.
        push = module.register_forward_pre_hook(lambda *_: self._push(name), prepend=True)
        pop = module.register_forward_hook(lambda *_: self._pop(), always_call=False)
        self._handles += [push, pop]

    def _push(self, name: str) -> None:
        self._stack.append(name)
        self._trace.module(name)

    def _pop(self) -> None:
        self._stack.pop()
        self._trace.module(self.module)

    def _watch(self, probe: str, module: nn.Module, *, side: str, index: int) -> None:
        def before(_: nn.Module, args: tuple[Any, ...]) -> None:
            self._keep(probe, args, index)

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._keep(probe, output if isinstance(output, tuple) else (output,), index)

        if side == "in":
            self._handles.append(module.register_forward_pre_hook(before))
        else:
            self._handles.append(module.register_forward_hook(after))

    def _keep(self, probe: str, values: tuple[Any, ...], index: int) -> None:
        value = values[index] if index < len(values) else None
        if not isinstance(value, Tensor):
            raise TapError(f"probe {probe}: no tensor stands at element {index}")
        self.fired.add(probe)
        self._trace.probe(probe)
        # A clone: a slice would keep its whole storage alive, and fused norms write in place.
        self.pieces.append(Piece(probe, value.detach().clone()))


def _check(probe: str, tap: Tap, modules: Mapping[str, nn.Module]) -> None:
    """A misspelt word must not switch a check off."""
    module, side, index, placement, kind = tap
    if module not in modules:
        raise TapError(f"probe {probe} is tapped at {module!r}, which is no module of the subject")
    if side not in ("in", "out") or index < 0:
        raise TapError(f"probe {probe} is tapped at side {side!r}, element {index}")
    if placement not in ("Replicate", "Shard(0)", "Shard(1)", "Partial"):
        raise TapError(f"probe {probe} has the unknown placement {placement!r}")
    if kind not in ("value", "set", "scores", "token", "work") and not kind.startswith("by:"):
        raise TapError(f"probe {probe} is of the unknown kind {kind!r}")


def _ancestry(name: str) -> list[str]:
    """A module's name and those of the modules it is in, outermost first."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


class PaddingWriter:
    """Writes the padding content into the rows behind the real ones, wherever such rows enter a subject."""

    def __init__(self, root: nn.Module, places: list[tuple[str, str, int]], content: str, seed: int) -> None:
        self.real = 0
        self.padded = 0
        self._content = content
        self._seed = seed
        modules = dict(root.named_modules())
        for name, side, index in places:
            if side == "in":
                modules[name].register_forward_pre_hook(lambda _, args, i=index: self._replace(args, i))
            else:
                modules[name].register_forward_hook(lambda _, __, output: self._filled(output))

    def expect(self, real: int, padded: int) -> None:
        """Says how many rows of the next forward are real, and how many there are with graph padding."""
        self.real, self.padded = real, padded

    def _replace(self, args: tuple[Any, ...], index: int) -> tuple[Any, ...]:
        return (*args[:index], self._filled(args[index]), *args[index + 1 :])

    def _filled(self, x: Tensor) -> Tensor:
        """``x`` [n, D] with its rows ``real <= row < padded`` replaced."""
        if self.padded <= self.real or x.shape[0] <= self.real:
            return x
        out = x.clone()
        tail = out[self.real : self.padded]
        if self._content == "random":
            generator = torch.Generator().manual_seed(self._seed)
            tail.copy_(torch.randn(tail.shape, generator=generator, dtype=torch.float64) * 3)
        else:
            tail.fill_(float("nan") if self._content == "nan" else 0.0)
        return out
