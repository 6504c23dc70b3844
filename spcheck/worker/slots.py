"""Where a built engine keeps its parameters, and checksums of what is there."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Slot:
    """Attribute ``attribute`` of ``module``, a parameter or a buffer."""

    def __init__(self, module: nn.Module, attribute: str) -> None:
        self._module, self._attribute = module, attribute
        self._marked: Tensor | None = None
        self._bytes = memoryview(b"")
        self._kind = 0

    @property
    def value(self) -> Tensor | None:
        """What is there now; None where nothing is, or nothing that has values."""
        module, name = self._module, self._attribute
        value = module._parameters.get(name, module._buffers.get(name))
        return None if value is None or value.is_meta else value

    def mark(self) -> int | None:
        """A checksum of shape, type and bits: another value anywhere changes it. None where nothing is."""
        value = self.value
        if value is None:
            return None
        if value is not self._marked or value.device.type != "cpu":
            # On the CPU the bytes are those of the parameter itself: what is written into it shows.
            bits = value.contiguous().view(_INTEGERS[value.element_size()])
            self._bytes = bits.numpy(force=True).data
            self._kind = zlib.crc32(f"{tuple(value.shape)} {value.dtype}".encode())
            self._marked = value if value.is_contiguous() else None
        return zlib.crc32(self._bytes, self._kind)


def slots(root: nn.Module, names: Collection[str]) -> dict[str, Slot]:
    """Every parameter by its name, those too that modules share, and the buffers that are among ``names``."""
    buffers = {name: slot for name, slot in _named(root, "_buffers") if name in names}
    return buffers | dict(_named(root, "_parameters"))


def _named(root: nn.Module, kind: str) -> Iterator[tuple[str, Slot]]:
    for path, module in root.named_modules():
        prefix = f"{path}." if path else ""
        for name, value in getattr(module, kind).items():
            if value is not None:
                yield prefix + name, Slot(module, name)
