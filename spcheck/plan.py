"""From a case to what every rank will do; impossible cases end here, before a process starts. No torch."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path

from reference.config import ConfigError, ModelConfig, parse_config, read_config
from spcheck.case import Case
from spcheck.errors import UsageError
from spcheck.exact import GRIDS, SMALL_HIDDEN, Grid
from spcheck.phases import Phase, layer_of, phases_of

_MOST = 10**6  # rows, or draft steps: far over what one run can hold


@dataclass(frozen=True)
class Plan:
    """A case that can be run: its model's sizes, the scheme that must be active, and why."""

    case: Case
    config: ModelConfig
    scheme: str
    reason: str

    @property
    def dtype(self) -> str:
        """The working type of both subjects."""
        return "float64" if self.case.numerics == "exact" else self.case.numerics

    @property
    def grid(self) -> Grid | None:
        """The grid of exact numerics: the asked one, or the usual one of the model's size; None where nothing snaps."""
        if self.case.numerics != "exact":
            return None
        usual = "A" if self.config.hidden_size <= SMALL_HIDDEN else "B"
        return GRIDS[usual if self.case.grid == "auto" else self.case.grid]

    @property
    def reference_world(self) -> int:
        """Ranks of the reference: all of the candidate's, or rank 0 alone."""
        return self.case.reference_world or self.case.tp

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The forwards of the run, in order: one target step, then the draft steps."""
        return phases_of(self.case.requests, self.case.mtp_steps, self.case.pad_to)

    @cached_property
    def cache_phases(self) -> tuple[Phase, ...]:
        """The phases of all layers' caches, each once."""
        layers = range(self.config.mtp_layers.stop)
        phases = [self.cache_phase(f"model.layers.{layer}.self_attn.cache") for layer in layers]
        return tuple(dict.fromkeys(phase for phase in phases if phase.real))

    @property
    def replays(self) -> bool:
        """Whether the candidate goes on with the reference's choices: rounding flips near ties below float64."""
        return self.dtype != "float64"

    def cache_phase(self, cache: str) -> Phase:
        """The rows a cache must hold at the end: positions 0.. of each request, drafted ones too in an MTP layer."""
        layer = layer_of(cache)
        drafted = [j for j in range(self.case.mtp_steps) if self.mtp_layer(j) == layer]
        counts = self.case.requests
        if layer is not None and layer >= self.config.num_hidden_layers:
            later = sum(1 for j in drafted if j > 0)
            counts = tuple(n * (0 in drafted) + later for n in counts)
        return Phase("cache", 0, (0,) * len(counts), counts, sum(counts))

    def mtp_layer(self, step: int) -> int:
        """The layer that draft step ``step`` uses: the MTP layers in turn."""
        return self.config.num_hidden_layers + step % self.config.num_nextn_predict_layers

    @property
    def folder(self) -> Path | None:
        """The checkpoint folder, or None where a preset gets random weights."""
        return None if self.case.model in preset_names() else Path(self.case.model)


def make_plan(case: Case) -> Plan:
    """Checks the case against its model and resolves the scheme.

    Raises:
        UsageError: the case cannot exist; the message says why in one sentence.
    """
    config = load_model(case)
    _check_rows(case, config)
    _check_world(case, config)
    if case.require_scheme and case.scheme not in ("auto", case.require_scheme):
        raise UsageError(f"--scheme {case.scheme} contradicts --require-scheme {case.require_scheme}")
    scheme, reason = resolve_scheme(case, config)
    return Plan(case, config, scheme, reason)


def preset_names() -> list[str]:
    """The models that come with spcheck."""
    files = resources.files("spcheck").joinpath("presets").iterdir()
    return sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json"))


def load_model(case: Case) -> ModelConfig:
    """The config of the case's preset or folder, overrides applied.

    Raises:
        UsageError: no such preset or folder, or a config that cannot be run.
    """
    try:
        raw = _raw_config(case.model)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    _check_overrides(case)
    try:
        return parse_config(raw, dict(case.overrides))
    except ConfigError as error:
        raise UsageError(f"{case.model}: {error}") from error


def _raw_config(model: str) -> object:
    if model in preset_names():
        return json.loads(resources.files("spcheck").joinpath("presets", f"{model}.json").read_text(encoding="utf-8"))
    folder = Path(model)
    if not model or not os.path.isdir(folder):  # unlike Path.is_dir it says no where it may not look
        raise UsageError(f"--model {model} is neither a preset ({', '.join(preset_names())}) nor a folder")
    return read_config(folder)


def _check_overrides(case: Case) -> None:
    names = [name for name, _ in case.overrides]
    if twins := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"--set {twins[0]} is given {names.count(twins[0])} times")


def resolve_scheme(case: Case, config: ModelConfig) -> tuple[str, str]:
    """The dataflow that must be active, and the condition that decides it.

    Expert parallelism is on and its backend supported in every case there is so far, so ``tp > 1`` decides.

    Raises:
        UsageError: ``--scheme full-sp`` where sequence parallelism is excluded, or a setting nothing runs yet.
    """
    excluded = _why_no_sp(case, config)
    if case.scheme == "full-sp" and excluded:
        raise UsageError(f"--scheme full-sp cannot be: {excluded}")
    if config.pipeline_parallel_size > 1:
        raise UsageError(f"pipeline_parallel_size {config.pipeline_parallel_size} is not supported yet")
    if config.lora_rank:
        raise UsageError(f"lora_rank {config.lora_rank} is not supported yet")
    if case.scheme == "tp":
        return "tp", "asked for with --scheme tp"
    if excluded:
        return "tp", excluded
    return "full-sp", f"expert parallel on, tp {case.tp} > 1"


def _why_no_sp(case: Case, config: ModelConfig) -> str | None:
    if config.pipeline_parallel_size > 1:
        return f"a pipeline stage would receive shards (pipeline_parallel_size {config.pipeline_parallel_size})"
    if config.lora_rank:
        return f"a LoRA adapter is chosen per row of the full batch (lora_rank {config.lora_rank})"
    return None if case.tp > 1 else "sequence parallelism needs tp > 1, and tp is 1"


def _check_rows(case: Case, config: ModelConfig) -> None:
    if not case.requests:
        raise UsageError("there is no request: give --tokens or --requests")
    if bad := [n for n in case.requests if n < 1]:
        raise UsageError(f"a request needs at least 1 token, not {bad[0]}")
    if too_many := [n for n in (*case.requests, case.pad_to or 0, case.mtp_steps) if n > _MOST]:
        raise UsageError(f"{too_many[0]} is more than spcheck counts to ({_MOST})")
    total = sum(case.requests)
    if case.pad_to is not None and case.pad_to < total:
        raise UsageError(f"--pad-to {case.pad_to} is less than the {total} tokens of the step")
    if case.mtp_steps < 0:
        raise UsageError(f"--mtp-steps must be 0 or more, not {case.mtp_steps}")
    if case.mtp_steps and not config.num_nextn_predict_layers:
        raise UsageError(f"--mtp-steps {case.mtp_steps} needs an MTP layer and {case.model} has none")
    if config.num_nextn_predict_layers > 1:
        raise UsageError(f"{config.num_nextn_predict_layers} MTP layers are not supported yet, only 1")
    longest = max(case.requests) + max(case.mtp_steps - 1, 0)
    if longest > config.max_position_embeddings:
        raise UsageError(f"{longest} positions are more than max_position_embeddings {config.max_position_embeddings}")
    if len(set(case.aux_layers)) < len(case.aux_layers):
        raise UsageError(f"--aux-layers {','.join(map(str, case.aux_layers))} names a layer twice")
    if bad := [i for i in case.aux_layers if not 0 <= i <= config.num_hidden_layers]:
        raise UsageError(f"--aux-layers {bad[0]} is outside 0..{config.num_hidden_layers}")


def _check_world(case: Case, config: ModelConfig) -> None:
    if not 0 <= case.seed < 2**63:
        raise UsageError(f"--seed must be 0 or more and less than 2^63, not {case.seed}")
    if case.tp < 1:
        raise UsageError(f"--tp must be 1 or more, not {case.tp}")
    if case.reference_world not in (None, 1, case.tp):
        raise UsageError(f"--reference-world must be 1 or the candidate's {case.tp}, not {case.reference_world}")
    if case.grid != "auto" and case.numerics != "exact":
        raise UsageError(f"--grid {case.grid} is for --numerics exact, not {case.numerics}")
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "n_routed_experts": config.n_routed_experts,
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
    }
    for name, size in sizes.items():
        if size % case.tp:
            raise UsageError(f"--tp {case.tp} does not divide {name} {size}")
