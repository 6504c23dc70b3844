"""Facts about the machine and the installation, from files and the standard library. No torch is imported here."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from spcheck.launch.memory import Memory, cgroups, memory, number_of, text_of

PACKAGES = ("torch", "click", "numpy", "hypothesis", "deepdiff", "safetensors", "rich")
"""What spcheck needs, as pyproject.toml has it."""

_ROOT = Path("/")


@dataclass(frozen=True)
class Cores:
    """Processors: those of the machine, those this process may use, and the share of time a cgroup leaves it."""

    machine: int
    usable: int
    quota: float | None


@dataclass(frozen=True)
class Place:
    """Where temporary files go, or why they cannot."""

    folder: str
    free: int | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Machine:
    """All of it. ``packages`` is None for one that is not installed; ``network`` is the problem, if there is one."""

    python: str
    platform: str
    code: str
    packages: dict[str, str | None]
    cores: Cores
    memory: Memory
    temporary: Place
    interface: str
    network: str | None


def look() -> Machine:
    """The facts of now."""
    return Machine(
        python=platform.python_version(),
        platform=platform.platform(),
        code=str(Path(__file__).resolve().parents[2]),
        packages={name: _version(name) for name in PACKAGES},
        cores=cores(),
        memory=memory(),
        temporary=temporary(),
        interface=loopback_interface(),
        network=network_problem(),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cores(root: Path = _ROOT) -> Cores:
    """``root`` is where the system's files lie."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [_quota(folder / "cpu.max") for folder in cgroups(root)]
    old = root / "sys/fs/cgroup/cpu"
    quota_us, period_us = number_of(old / "cpu.cfs_quota_us"), number_of(old / "cpu.cfs_period_us")
    if quota_us and period_us and quota_us > 0:
        quotas.append(quota_us / period_us)
    return Cores(os.cpu_count() or 1, usable, min((q for q in quotas if q is not None), default=None))


def _quota(path: Path) -> float | None:
    """``200000 100000`` is two processors; ``max`` is no limit."""
    quota, _, period = text_of(path).partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def temporary() -> Place:
    """A folder is made and a file written there, as a run does."""
    try:
        with tempfile.TemporaryDirectory(prefix="spcheck-") as name:
            folder = Path(name)
            (folder / "file").write_bytes(b"x" * 4096)
            return Place(str(folder.parent), shutil.disk_usage(folder).free)
    except OSError as error:
        return Place(os.environ.get("TMPDIR", "/tmp"), problem=error.strerror or str(error))


def loopback_interface() -> str:
    """The name gloo is told."""
    return "lo0" if sys.platform == "darwin" else "lo"


def network_problem() -> str | None:
    """Why ranks of this machine cannot reach each other; None if they can."""
    name = loopback_interface()
    try:
        if name not in (interface for _, interface in socket.if_nameindex()):
            return f"there is no network interface {name}"
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            return None
    except OSError as error:
        return f"127.0.0.1 cannot be used: {error.strerror or error}"
