"""The options that make a case, and the case they make. No torch.

Every command that runs a case takes them: :func:`case_options` puts them on, :func:`case_of` reads them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from spcheck.case import (
    ALL2ALL_BACKENDS,
    BACKENDS,
    DEFAULT_GRAPH_SIZES,
    GRID_NAMES,
    NUMERICS,
    PADDING_CONTENTS,
    SCHEMES,
    WEIGHTS,
    Case,
    Requests,
)
from spcheck.errors import UsageError
from spcheck.plan.checks import LARGEST_WORLD
from spcheck.plan.scale import SCALES

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
_NewAndCached = tuple[Requests, Requests | None]

_LONGEST = 1e6  # seconds


def _whole_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no list of whole numbers such as 5,1,11") from error


def _numbers(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    """``0,2,5``; ``none`` is the empty list."""
    return () if value.strip() in ("", "none") else _whole_numbers(value)


def _requests(_: click.Context, __: click.Parameter, value: str | None) -> Requests | None:
    """``5,1/11/-``: the requests of each data-parallel rank, a dash for an idle one."""
    if value is None:
        return None
    return _by_rank(value, _whole_numbers)


def _requests_and_cached(_: click.Context, __: click.Parameter, value: str | None) -> _NewAndCached | None:
    """``5,1@40/11/-``: the same with cached tokens behind an @."""
    if value is None:
        return None
    pairs = _by_rank(value, _new_and_cached)
    new, cached = (tuple(tuple(pair[i] for pair in here) for here in pairs) for i in (0, 1))
    return new, cached if any(map(any, cached)) else None


def _new_and_cached(text: str) -> tuple[tuple[int, int], ...]:
    words = [word.partition("@") for word in text.split(",")]
    try:
        return tuple((int(new), int(held) if at else 0) for new, at, held in words)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no list of new@cached tokens such as 5,1@40,3@12") from error


def _by_rank(value: str, read: Callable[[str], tuple[T, ...]]) -> tuple[tuple[T, ...], ...]:
    """What stands between slashes, each part read; a dash is an empty one."""
    parts = [here.strip() for here in value.split("/")]
    if "" in parts:
        raise click.BadParameter(f"{value!r} has an empty part: an idle data-parallel rank is a dash, as in 5,1/-")
    if mixed := [here for here in parts if "-" in here.split(",") and here != "-"]:
        raise click.BadParameter(f"{mixed[0]!r}: a dash stands alone, for an idle data-parallel rank, as in 5,1/-")
    return tuple(() if here == "-" else read(here) for here in parts)


def _graph_sizes(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    if value.strip() == "default":
        return DEFAULT_GRAPH_SIZES
    return () if value.strip() in ("", "none") else _whole_numbers(value)


def _settings(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> tuple[tuple[str, Any], ...]:
    """``key=value`` each, the value as JSON, or as text where it is none."""
    pairs = [value.partition("=") for value in values]
    for (key, sign, _text), value in zip(pairs, values, strict=True):
        if not sign or not key:
            raise click.BadParameter(f"{value!r} is not key=value")
    return tuple((key, _json_or_text(text)) for key, _sign, text in pairs)


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _models(_: click.Context, __: click.Parameter, beginning: str) -> list[CompletionItem]:
    from spcheck.plan.model import preset_names

    presets = [CompletionItem(name) for name in preset_names() if name.startswith(beginning)]
    return [*presets, CompletionItem(beginning, type="file")]


_OPTIONS = [
    click.option("--tp", type=int, default=2, show_default=True, help="Tensor-parallel ranks."),
    click.option("--dp", type=int, help="Data-parallel ranks; as many as --requests has parts."),
    click.option("--tokens", type=int, help="One request of this many new tokens, on every data-parallel rank."),
    click.option("--requests", callback=_requests_and_cached, metavar="N@C,N/N/-",
                 help="N new and C cached tokens of each request (1@40 decodes one); slashes part DP ranks, - is an "
                      "idle one."),
    click.option("--previous", callback=_requests, metavar="N,N/N/-",
                 help="Requests of a step before, through the same buffers; it is compared as well."),
    click.option("--generate", type=int, default=0, show_default=True, metavar="N",
                 help="Greedy steps after the case's own, each verifying what was drafted before; a request ends at "
                      "the model's limit."),
    click.option("--prefill-chunk", type=int, metavar="N",
                 help="New tokens of a prompt that one step takes at most; generated steps take the rest."),
    click.option("--pp", type=int, default=1, show_default=True, help="Pipeline-parallel ranks (only 1 is run)."),
    click.option("--expert-parallel/--no-expert-parallel", default=True, show_default=True,
                 help="Whether whole experts are spread over all ranks; else each has channels of all."),
    click.option("--all2all-backend", type=click.Choice(ALL2ALL_BACKENDS), default=ALL2ALL_BACKENDS[0],
                 show_default=True, help="How rows reach the experts and come back."),
    click.option("--model", default="dsv32-tiny", show_default=True, shell_complete=_models,
                 help="A preset, a config.json, or a checkpoint folder; without stored weights they are random."),
    click.option("--scale", type=click.Choice(SCALES), default="full", show_default=True,
                 help="tiny: small sizes that the ranks divide in the place of the config's, for random weights."),
    click.option("--set", "overrides", callback=_settings, metavar="KEY=VALUE", multiple=True,
                 help="Overrides a key of the model's config.json, after --scale; repeatable. A dot reaches a nested "
                      "one: rope_scaling.factor=4. null is for absent."),
    click.option("--weights", type=click.Choice(WEIGHTS), default="plain", show_default=True,
                 help="Kind of random weights. ties: twin experts, tokens and index heads; outliers: a few channels a "
                      "hundred times larger."),
    click.option("--lora-rank", type=int, default=0, show_default=True, help="Rank of the LoRA adapters."),
    click.option("--lora-adapters", type=int, default=0, show_default=True,
                 help="Random adapters; the requests of all data-parallel ranks use them in turn, and then none."),
    click.option("--reference", default="reference", show_default=True, metavar="SUBJECT[:SCHEME]",
                 help="What is compared with: reference, or optimized:tp and the like."),
    click.option("--candidate", default="optimized", show_default=True, metavar="SUBJECT[:SCHEME]",
                 help="What is compared."),
    click.option("--numerics", type=click.Choice(NUMERICS), default="exact", show_default=True,
                 help="exact: float64 on a grid, where every sum is exact; else a plain type."),
    click.option("--grid", type=click.Choice(GRID_NAMES), default="auto", show_default=True,
                 help="Grid of exact numerics; B is coarser and leaves more room."),
    click.option("--reference-world", type=int, metavar="N",
                 help="Ranks of a data-parallel rank's reference: 1, or the candidate's --tp (the default)."),
    click.option("--scheme", type=click.Choice(SCHEMES), default="auto", show_default=True,
                 help="Candidate's dataflow."),
    click.option("--require-scheme", type=click.Choice(SCHEMES[1:]), help="Exit 3 unless this scheme ran."),
    click.option("--mtp-steps", type=int, show_default="1; 0 without MTP layers",
                 help="Tokens that every step drafts."),
    click.option("--aux-layers", callback=_numbers, metavar="I,I,...", default="none", show_default=True,
                 help="Layers whose input is kept as an auxiliary hidden state (EAGLE-style drafters)."),
    click.option("--pad-to", type=int, help="Pads the step to this many rows, as a captured CUDA graph does."),
    click.option("--graph-sizes", callback=_graph_sizes, metavar="N,N,...", default="none", show_default=True,
                 help="Captured sizes: every forward is padded to the next one. default: 1, 2, 4, then every 8 to 256, "
                      "every 16 to 512."),
    click.option("--skip-padding/--no-skip-padding", default=None,
                 help="Whether padded rows are routed; default from VLLM_MOE_SKIP_PADDING, else skipped."),
    click.option("--padding-content", type=click.Choice(PADDING_CONTENTS), default="zero", show_default=True,
                 help="What padded rows hold. stale: the rows of the step before (--previous, or one that fills the "
                      "batch)."),
    click.option("--seed", type=int, default=0, show_default=True, help="Random weights, tokens, padding."),
    click.option("--backend", type=click.Choice(BACKENDS), default="auto", show_default=True,
                 help="What joins the ranks."),
    click.option("--timeout", type=float, default=60.0, show_default=True,
                 help="Seconds that one step may take: a run in which no rank begins another one counts as hung."),
]  # fmt: skip


def case_options(command: F) -> F:
    """Puts the options of a case on a command, in the order of its help."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def case_of(options: dict[str, Any]) -> Case:
    """The case that a command's options make.

    Raises:
        UsageError: they contradict each other, or a number cannot be; one sentence.
    """
    options = dict(options)
    tokens, dp = options.pop("tokens"), options.pop("dp")
    requests, cached = _requests_of(tokens, options.pop("requests"), dp)
    if tokens is not None and len(options["previous"] or ()) == 1:
        options["previous"] *= len(requests)  # as --tokens, on every data-parallel rank
    if options["skip_padding"] is None:
        options["skip_padding"] = _skip_padding_default()
    if not 0 < options["timeout"] <= _LONGEST:
        raise UsageError(
            f"--timeout must be a positive number of seconds up to {_LONGEST:g}, not {options['timeout']:g}"
        )
    drafts = options.pop("mtp_steps")
    case = Case(requests=requests, cached=cached, mtp_steps=1 if drafts is None else drafts, **options)
    return _with_drafts(case) if drafts is None else case


def _with_drafts(case: Case) -> Case:
    """The case with a drafted token, unless its model has no layer that drafts."""
    from spcheck.plan.model import load_model

    try:
        config = load_model(case)
    except UsageError:
        return case  # the plan says it, after what else is wrong
    return case if config.num_nextn_predict_layers else replace(case, mtp_steps=0)


def _requests_of(tokens: int | None, requests: _NewAndCached | None, dp: int | None) -> _NewAndCached:
    if tokens is not None and requests is not None:
        raise UsageError("give --tokens or --requests, not both")
    if dp is not None and not 1 <= dp <= LARGEST_WORLD:
        raise UsageError(f"--dp must be 1 to {LARGEST_WORLD}, not {dp}")
    if requests is None:
        if tokens is None:
            raise UsageError("there is no request: give --tokens N or --requests N,N,...")
        return ((tokens,),) * (dp or 1), None
    ranks = len(requests[0])
    if dp is not None and dp != ranks:
        parts = f"{ranks} part{'s' if ranks > 1 else ''}"
        raise UsageError(f"--requests has {parts}, one for each data-parallel rank, and --dp is {dp} (5,1/11/- has 3)")
    return requests


def _skip_padding_default() -> bool:
    """VLLM_MOE_SKIP_PADDING as engines read it: on unless it says 0."""
    value = os.environ.get("VLLM_MOE_SKIP_PADDING") or "1"
    if value not in ("0", "1"):
        raise UsageError(f"VLLM_MOE_SKIP_PADDING must be 0 or 1, not {value!r}")
    return value == "1"
