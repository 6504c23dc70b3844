"""What torch says of itself and of the GPUs, told as JSON by a process of its own: the parent imports no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spcheck.launch.lifetime import die_with_parent

_PATIENCE = 120.0  # seconds; a first import from a cold disk is slow


@dataclass(frozen=True)
class Torch:
    """``problem`` is why torch cannot be used, in one sentence; then the rest is empty."""

    version: str | None = None
    cuda: str | None = None
    gpus: tuple[str, ...] = ()
    gloo: bool = False
    nccl: str | None = None
    problem: str | None = None


def ask() -> Torch:
    """Starts the process and reads its answer."""
    source = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH")) if p)
    command = [sys.executable, "-P", "-m", "spcheck.doctor.torch_facts"]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_PATIENCE, env={**os.environ, "PYTHONPATH": path}, check=False
        )
    except subprocess.TimeoutExpired:
        return Torch(problem=f"torch did not answer within {_PATIENCE:g} s")
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return Torch(problem=said[-1] if said else f"the process that imports torch ended with {done.returncode}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return Torch(**{**answer, "gpus": tuple(answer["gpus"])})


def _answer() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    nccl = dist.is_available() and dist.is_nccl_available()
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": [_gpu(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())],
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,  # type: ignore[no-untyped-call]
    }


def _gpu(properties: Any) -> str:
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"


if __name__ == "__main__":
    die_with_parent()
    sys.stdout.write(json.dumps(_answer()) + "\n")
