"""How the ranks are used, and which dataflow that allows. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass

SCHEMES = ("tp", "full-sp")
SP_ALL2ALL_BACKENDS = ("allgather_reducescatter",)


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the parallel dimensions and the settings that exclude sequence parallelism."""

    tensor_parallel_size: int
    data_parallel_size: int = 1
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
        ValueError: an unknown scheme, or ``full-sp`` where it cannot be; the message is one sentence.
    """
    if requested not in ("auto", *SCHEMES):
        raise ValueError(f"unknown scheme {requested!r} (auto, {', '.join(SCHEMES)})")
    if requested == "tp":
        return "tp", "tp was requested"
    obstacle = _why_not_full_sp(parallel)
    if obstacle is None:
        return "full-sp", f"expert parallel on, {parallel.all2all_backend}, tp {parallel.tensor_parallel_size} > 1"
    if requested == "full-sp":
        raise ValueError(f"full-sp {obstacle}")
    return "tp", f"full-sp {obstacle}"


def _why_not_full_sp(parallel: ParallelConfig) -> str | None:
    if parallel.pipeline_parallel_size > 1:
        return "excludes pipeline parallelism: a stage would receive shards"
    if parallel.lora:
        return "excludes LoRA: an adapter is chosen per row of the full batch"
    if parallel.tensor_parallel_size == 1:
        return "needs tp > 1"
    if not parallel.enable_expert_parallel:
        return "needs expert parallelism"
    if not parallel.use_sequence_parallel_moe:
        return f"needs an all2all backend of {', '.join(SP_ALL2ALL_BACKENDS)}, not {parallel.all2all_backend}"
    return None
