"""How the ranks are used, and which dataflow that allows. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass

SP_SCHEMES = ("moe-sp", "full-sp")
SCHEMES = ("tp", *SP_SCHEMES)
SP_ALL2ALL_BACKENDS = ("allgather_reducescatter", "naive", "all_to_all")


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the parallel dimensions and the settings that exclude sequence parallelism.

    The world has dp x tp ranks, DP-major: rank = dp_rank * tp + tp_rank.
    """

    tensor_parallel_size: int
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = True
    all2all_backend: str = "allgather_reducescatter"
    lora: bool = False

    @property
    def use_sequence_parallel_moe(self) -> bool:
        """Whether MoE layers can run on shards. Data parallelism is not required."""
        return (
            self.enable_expert_parallel
            and self.tensor_parallel_size > 1
            and self.all2all_backend in SP_ALL2ALL_BACKENDS
        )


def resolve_scheme(requested: str, parallel: ParallelConfig) -> tuple[str, str]:
    """The dataflow that will be active and the condition that decided it.

    Raises:
        ValueError: an unknown scheme, or ``moe-sp`` or ``full-sp`` where it cannot be; the message is one sentence.
    """
    if requested not in ("auto", *SCHEMES):
        raise ValueError(f"unknown scheme {requested!r} (auto, {', '.join(SCHEMES)})")
    if requested == "tp":
        return "tp", "tp was requested"
    obstacle = _obstacle(parallel)
    if obstacle is None:
        deciding = f"tp {parallel.tensor_parallel_size} > 1, backend {parallel.all2all_backend}"
        return "full-sp" if requested == "auto" else requested, f"expert parallel on, {deciding}"
    if requested in SP_SCHEMES:
        raise ValueError(f"{requested} cannot be: {obstacle}")
    return "tp", obstacle


def _obstacle(parallel: ParallelConfig) -> str | None:
    """What excludes sequence parallelism, if anything does."""
    if parallel.pipeline_parallel_size > 1:
        return f"pipeline parallel size {parallel.pipeline_parallel_size} > 1"
    if parallel.lora:
        return "LoRA adapters present"
    if parallel.tensor_parallel_size == 1:
        return "tp is 1"
    if not parallel.enable_expert_parallel:
        return "expert parallel off"
    if not parallel.use_sequence_parallel_moe:
        return f"backend {parallel.all2all_backend} is not one of {', '.join(SP_ALL2ALL_BACKENDS)}"
    return None
