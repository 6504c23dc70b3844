"""Exact mode on a subject: hooks that round complete values to their grid, and the check that operands lie on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from reference.config import ModelConfig
from spcheck.families.deepseek.exact import Point, points
from spcheck.plan.grid import Grid
from spcheck.worker.capture import TapError


def snap(x: Tensor, bits: int) -> Tensor:
    """``x`` rounded half to even to multiples of 2^-bits, as a new tensor. Float64, |x| < 2^(51 - bits).

    Adding and subtracting 1.5 * 2^(52 - bits) leaves no room for finer bits and is several times faster than
    ``round``. A larger |x| lands on a coarser grid, whose points are points of this one as well; NaN and infinity stay.
    """
    magic = 1.5 * 2.0 ** (52 - bits)
    return (x + magic).sub_(magic)


class Snapper:
    """Snap hooks on one subject, put on behind the hooks that capture: a probe shows the value before its snap.

    ``norms`` grows to the largest row norm of every snapped value, for the guard; ``off_grid`` names the first matrix
    that was handed a value between grid points. With ``watch`` false no norms are taken. That parameters lie on their
    grid is not looked at here: they are compared with the checkpoint, which is read on it.

    Raises:
        TapError: the subject has no module of a name at which a value must be snapped.
    """

    def __init__(self, root: nn.Module, config: ModelConfig, grid: Grid, *, watch: bool) -> None:
        self.norms: dict[str, Tensor] = {}
        self.off_grid: str | None = None
        self._watch = watch
        self._real: Mapping[int, int] = {}
        self._fired: set[str] = set()
        modules = dict(root.named_modules())
        fused = any(name.endswith(".fused_eh_norm") for name in modules)
        self._points = points(config, fused_eh_norm=fused)
        for point in self._points:
            if point.module not in modules:
                raise TapError(f"exact arithmetic rounds at {point.module!r}, which is no module of the subject")
            self._snap_at(modules[point.module], point, point.bits(grid))
        for name, module in modules.items():
            weight = getattr(module, "weight", None)
            # A single expert gets rows of what the router got, and of what an activation handed on.
            if isinstance(weight, Tensor) and weight.ndim == 2 and ".experts." not in name:
                self._check_operand(name, module, grid.activation)

    def expect(self, real: Mapping[int, int]) -> None:
        """Of so many rows in the next forward so many are real; the others hold what they like."""
        self._real = real

    def start(self) -> None:
        """Forgets the last case."""
        self.norms = {}
        self.off_grid = None
        self._fired = set()

    def silent(self) -> list[str]:
        """Points that never fired: what passes there is not rounded."""
        return [point.probe for point in self._points if point.probe not in self._fired]

    def plain_norms(self) -> dict[str, float]:
        """The norms as plain data."""
        return {name: float(value) for name, value in self.norms.items()}

    def see_largest(self, name: str, value: Tensor) -> None:
        """Remembers the largest absolute value of a residual stream."""
        if value.numel():
            self._keep_largest(name, value.abs().amax())

    def _snap_at(self, module: nn.Module, point: Point, bits: int) -> None:
        def snapped(values: tuple[Any, ...]) -> tuple[Any, ...]:
            self._fired.add(point.probe)
            return tuple(self._snapped(point, x, bits) if i in point.indices else x for i, x in enumerate(values))

        def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
            return snapped(output) if isinstance(output, tuple) else snapped((output,))[0]

        if point.side == "in":
            module.register_forward_pre_hook(lambda _, args: snapped(args))
        else:
            module.register_forward_hook(after)

    def _snapped(self, point: Point, x: Tensor, bits: int) -> Tensor:
        rounded = snap(x, bits)
        if self._watch:
            # Rows of pairs are not token rows, whatever their number.
            rows = rounded if ".experts." in point.probe else self._real_rows(rounded)
            self._see_norms(point.probe, torch.linalg.vector_norm(rows, dim=-1))
        return rounded

    def _see_norms(self, name: str, norms: Tensor) -> None:
        if self._real:  # rows of routed pairs may be padding's, and poisoned
            norms = norms[norms.isfinite()]
        if norms.numel():
            self._keep_largest(name, norms.amax())

    def _real_rows(self, x: Tensor) -> Tensor:
        """Without the padding of a forward whose rows are known."""
        return x[: self._real.get(x.shape[0], x.shape[0])]

    def _keep_largest(self, name: str, value: Tensor) -> None:
        before = self.norms.get(name)
        self.norms[name] = value if before is None else torch.maximum(before, value)

    def _check_operand(self, name: str, module: nn.Module, bits: int) -> None:
        def check(_: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
                self._check(f"input of {name}", self._real_rows(args[0]), bits)

        module.register_forward_pre_hook(check)

    def _check(self, what: str, x: Tensor, bits: int) -> None:
        rounded = snap(x, bits)
        # Rows of poisoned padding are not numbers, and concern no product of a real row.
        if self.off_grid is None and not torch.equal(rounded, x) and not bool(((rounded == x) | x.isnan()).all()):
            self.off_grid = what
