"""What makes a case impossible: one sentence each, before a process starts. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from reference.config import ModelConfig
from spcheck.case import LARGEST_WORLD, Case, requests_text
from spcheck.errors import UsageError
from spcheck.plan.schemes import SidePlan
from spcheck.plan.steps import Step

_MOST = 10**6  # rows, or draft steps: far over what one run can hold


def check_requests(case: Case) -> None:
    """Of requests alone, before steps are made of them.

    Raises:
        UsageError: there are none, or they do not fit the data-parallel ranks.
    """
    if not any(case.requests):
        idle = f": all data-parallel ranks of {requests_text(case.requests)} are idle" if case.requests else ""
        raise UsageError(f"there is no request{idle or ': give --tokens or --requests'}")
    new_of, cached_of = ([len(here) for here in ranks] for ranks in (case.requests, case.cached_tokens))
    if new_of != cached_of:
        raise UsageError(f"cached tokens are given for {cached_of} requests by data-parallel rank, and not {new_of}")
    for new, held in _each_request(case):
        if held < 0:
            raise UsageError(f"a request cannot hold {held} cached tokens (--requests {case.requests_text})")
        if new < 1 and held:
            raise UsageError(f"a request of {held} cached tokens needs at least 1 new token, not {new} ({new}@{held})")
    for option, requests in (("--requests", case.requests), ("--previous", case.previous or ())):
        if bad := [n for here in requests for n in here if n < 1]:
            of = f" ({option} {requests_text(requests)})" if len(requests) > 1 or option == "--previous" else ""
            raise UsageError(f"a request needs at least 1 token, not {bad[0]}{of}")
    if case.previous is not None and len(case.previous) != case.dp:
        text = requests_text(case.previous)
        many = f"{len(case.previous)} data-parallel rank{'s' if len(case.previous) > 1 else ''}"
        raise UsageError(f"--previous {text} is for {many}, and there are {case.dp}: part them with slashes")


def _each_request(case: Case) -> Iterator[tuple[int, int]]:
    """(new, cached) tokens."""
    for new, cached in zip(case.requests, case.cached_tokens, strict=True):
        yield from zip(new, cached, strict=True)


def check_counts(case: Case) -> None:
    """Of numbers of rows and forwards, before any list is made of as many.

    Raises:
        UsageError: more of them than there can be.
    """
    tokens = [n for here in (*case.requests, *case.cached_tokens, *(case.previous or ())) for n in here]
    numbers = (*tokens, case.pad_to or 0, *case.graph_sizes, case.mtp_steps, case.generate, case.prefill_chunk or 0)
    if too_many := [n for n in numbers if n > _MOST]:
        raise UsageError(f"{too_many[0]} is more than spcheck counts to ({_MOST})")


def check_lengths(case: Case, config: ModelConfig) -> None:
    """Of steps and positions, before any step is made.

    Raises:
        UsageError: more of them than there can be.
    """
    if case.generate < 0:
        raise UsageError(f"--generate must be 0 or more, not {case.generate}")
    if case.prefill_chunk is not None and case.prefill_chunk < 1:
        raise UsageError(f"--prefill-chunk must be 1 or more, not {case.prefill_chunk}")
    _check_drafts(case, config)
    limit = config.max_position_embeddings
    if over := [(new, held) for new, held in _each_request(case) if new + held > limit]:
        new, held = over[0]
        tokens = f"{new} new and {held} cached tokens" if held else f"{new} positions"
        raise UsageError(f"{tokens} are more than max_position_embeddings {limit}")
    if over_before := [n for here in case.previous or () for n in here if n > limit]:
        raise UsageError(f"{over_before[0]} positions are more than max_position_embeddings {limit}")


def check_rows(case: Case, steps: tuple[Step, ...]) -> None:
    """Of rows.

    Raises:
        UsageError: more of them than a forward may have, or a number that none has.
    """
    largest = max(sum(part.rows for part in here) for step in steps if _is_padded(step) for here in step.parts)
    if case.pad_to is not None and case.graph_sizes:
        raise UsageError("give --pad-to or --graph-sizes, not both")
    if case.pad_to is not None and case.pad_to < largest:
        raise UsageError(f"--pad-to {case.pad_to} is less than the {largest} tokens of the step")
    if any(n < 1 for n in case.graph_sizes) or any(a >= b for a, b in pairwise(case.graph_sizes)):
        raise UsageError(f"--graph-sizes {','.join(map(str, case.graph_sizes))} must be ascending, from 1 on")


def _is_padded(step: Step) -> bool:
    """Whether ``--pad-to`` is for this step; one of another kind that has more rows runs without a captured graph."""
    return step.probed and not step.verifies


def _check_drafts(case: Case, config: ModelConfig) -> None:
    if case.mtp_steps < 0:
        raise UsageError(f"--mtp-steps must be 0 or more, not {case.mtp_steps}")
    if case.mtp_steps and not config.num_nextn_predict_layers:
        raise UsageError(f"--mtp-steps {case.mtp_steps} needs an MTP layer and {case.model} has none")
    if case.mtp_steps > config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise UsageError(f"--mtp-steps {case.mtp_steps} is more than max_position_embeddings {limit}")
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
    if case.weights == "outliers" and case.numerics == "float32":
        raise UsageError(
            "--weights outliers cannot be judged in float32: its rounding is larger than the bound; "
            "use --numerics exact or float64"
        )
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
