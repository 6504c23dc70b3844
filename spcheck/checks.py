"""What makes a case impossible: one sentence each, before a process starts. No torch."""

from __future__ import annotations

from itertools import pairwise

from reference.config import ModelConfig
from spcheck.case import Case, requests_text
from spcheck.errors import UsageError
from spcheck.phases import Step
from spcheck.schemes import SidePlan

_MOST = 10**6  # rows, or draft steps: far over what one run can hold
LARGEST_WORLD = 1024


def check_requests(case: Case) -> None:
    """Of requests alone, before steps are made of them.

    Raises:
        UsageError: there are none, or they do not fit the data-parallel ranks.
    """
    if not any(case.requests):
        idle = f": all data-parallel ranks of {requests_text(case.requests)} are idle" if case.requests else ""
        raise UsageError(f"there is no request{idle or ': give --tokens or --requests'}")
    for option, requests in (("--requests", case.requests), ("--previous", case.previous or ())):
        if bad := [n for here in requests for n in here if n < 1]:
            of = f" ({option} {requests_text(requests)})" if len(requests) > 1 or option == "--previous" else ""
            raise UsageError(f"a request needs at least 1 token, not {bad[0]}{of}")
    if case.previous is not None and len(case.previous) != case.dp:
        text = requests_text(case.previous)
        many = f"{len(case.previous)} data-parallel rank{'s' if len(case.previous) > 1 else ''}"
        raise UsageError(f"--previous {text} is for {many}, and there are {case.dp}: part them with slashes")


def check_counts(case: Case) -> None:
    """Of numbers of rows and forwards, before any list is made of as many.

    Raises:
        UsageError: more of them than there can be.
    """
    tokens = [n for here in (*case.requests, *(case.previous or ())) for n in here]
    if too_many := [n for n in (*tokens, case.pad_to or 0, *case.graph_sizes, case.mtp_steps) if n > _MOST]:
        raise UsageError(f"{too_many[0]} is more than spcheck counts to ({_MOST})")


def check_rows(case: Case, config: ModelConfig, steps: tuple[Step, ...]) -> None:
    """Of rows and positions.

    Raises:
        UsageError: more of them than there can be, or a number that no forward has.
    """
    tokens = [n for step in steps for here in step.tokens for n in here]
    largest = max(sum(here) for step in steps for here in step.tokens)
    if case.pad_to is not None and case.graph_sizes:
        raise UsageError("give --pad-to or --graph-sizes, not both")
    if case.pad_to is not None and case.pad_to < largest:
        raise UsageError(f"--pad-to {case.pad_to} is less than the {largest} tokens of the step")
    if any(n < 1 for n in case.graph_sizes) or any(a >= b for a, b in pairwise(case.graph_sizes)):
        raise UsageError(f"--graph-sizes {','.join(map(str, case.graph_sizes))} must be ascending, from 1 on")
    _check_drafts(case, config)
    longest = max(tokens) + max(case.mtp_steps - 1, 0)
    if longest > config.max_position_embeddings:
        raise UsageError(f"{longest} positions are more than max_position_embeddings {config.max_position_embeddings}")


def _check_drafts(case: Case, config: ModelConfig) -> None:
    if case.mtp_steps < 0:
        raise UsageError(f"--mtp-steps must be 0 or more, not {case.mtp_steps}")
    if case.mtp_steps and not config.num_nextn_predict_layers:
        raise UsageError(f"--mtp-steps {case.mtp_steps} needs an MTP layer and {case.model} has none")
    if config.num_nextn_predict_layers > 1:
        raise UsageError(f"{config.num_nextn_predict_layers} MTP layers are not supported yet, only 1")
    if len(set(case.aux_layers)) < len(case.aux_layers):
        raise UsageError(f"--aux-layers {','.join(map(str, case.aux_layers))} names a layer twice")
    if bad := [i for i in case.aux_layers if not 0 <= i <= config.num_hidden_layers]:
        raise UsageError(f"--aux-layers {bad[0]} is outside 0..{config.num_hidden_layers}")


def check_settings(case: Case) -> None:
    """Of numbers that need no model.

    Raises:
        UsageError: one that cannot be.
    """
    if not 0 <= case.seed < 2**63:
        raise UsageError(f"--seed must be 0 or more and less than 2^63, not {case.seed}")
    for option, number in (("--tp", case.tp), ("--pp", case.pp)):
        if number < 1:
            raise UsageError(f"{option} must be 1 or more, not {number}")
    if case.ranks > LARGEST_WORLD:
        raise UsageError(f"--dp {case.dp} x --tp {case.tp} = {case.ranks} ranks are more than {LARGEST_WORLD}")
    if case.reference_world not in (None, 1, case.tp):
        raise UsageError(f"--reference-world must be 1 or the candidate's {case.tp}, not {case.reference_world}")
    if case.grid != "auto" and case.numerics != "exact":
        raise UsageError(f"--grid {case.grid} is for --numerics exact, not {case.numerics}")
    limits = (("--lora-rank", case.lora_rank, 512), ("--lora-adapters", case.lora_adapters, 64))
    for option, number, most in limits:
        if not 0 <= number <= most:
            raise UsageError(f"{option} must be 0 to {most}, not {number}")
    if case.lora_adapters and not case.lora_rank:
        raise UsageError(f"--lora-adapters {case.lora_adapters} needs --lora-rank")
    if case.lora_rank and not case.lora_adapters:
        raise UsageError(f"--lora-rank {case.lora_rank} needs --lora-adapters: how many there are")


def check_world(case: Case, config: ModelConfig, sides: tuple[SidePlan, SidePlan]) -> None:
    """Of sizes that are divided over the ranks.

    Raises:
        UsageError: one that cannot be divided.
    """
    for name in ("num_attention_heads", "intermediate_size", "moe_intermediate_size"):
        if getattr(config, name) % case.tp:
            raise UsageError(f"--tp {case.tp} does not divide {name} {getattr(config, name)}")
    name = "n_routed_experts" if case.expert_parallel else "moe_intermediate_size"
    if getattr(config, name) % case.ranks and not all(side.plain for side in sides):
        world = f"--tp {case.tp} does" if case.dp == 1 else f"--dp {case.dp} x --tp {case.tp} = {case.ranks} ranks do"
        raise UsageError(f"{world} not divide {name} {getattr(config, name)}")
