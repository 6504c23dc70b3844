"""How much memory this machine has, from the system's files. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_UNLIMITED = 1 << 60  # bytes; cgroup v1 writes a number near 2^63 where there is no limit


@dataclass(frozen=True)
class Memory:
    """Bytes: of the machine, free of it now, and what a cgroup allows. None where the system does not say."""

    total: int | None
    available: int | None
    limit: int | None

    @property
    def usable(self) -> int | None:
        """The smaller one of what is free and what a cgroup allows."""
        return min((n for n in (self.available, self.limit) if n is not None), default=None)


def memory(root: Path = _ROOT) -> Memory:
    """``root`` is where the system's files lie."""
    sizes = dict(line.split(":", 1) for line in text_of(root / "proc/meminfo").splitlines() if ":" in line)
    limits = [number_of(folder / "memory.max") for folder in cgroups(root)]
    limits.append(number_of(root / "sys/fs/cgroup/memory/memory.limit_in_bytes"))
    limit = min((n for n in limits if n is not None and n < _UNLIMITED), default=None)
    return Memory(_kibibytes(sizes.get("MemTotal")), _kibibytes(sizes.get("MemAvailable")), limit)


def _kibibytes(text: str | None) -> int | None:
    return int(text.split()[0]) * 1024 if text and text.split()[0].isdigit() else None


def cgroups(root: Path) -> Iterator[Path]:
    """Folders of this process's group (v2) and all above it: each may have a limit."""
    top = root / "sys/fs/cgroup"
    own = next((line[3:] for line in text_of(root / "proc/self/cgroup").splitlines() if line.startswith("0::")), "/")
    folder = top / own.strip("/")
    yield folder
    while folder != top and top in folder.parents:
        folder = folder.parent
        yield folder


def text_of(path: Path) -> str:
    """What a system's file says; nothing where there is none."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def number_of(path: Path) -> int | None:
    """The number that a system's file says, if it says one."""
    text = text_of(path)
    return int(text) if text.lstrip("-").isdigit() else None
