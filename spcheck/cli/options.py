"""The options that make a case, and the case they make. No torch.

Every command that runs a case takes them: :func:`case_options` puts them on, :func:`case_of` reads them. They follow
from the declarations in :mod:`spcheck.case.case`, apart from ``--tokens`` and ``--dp``, which are short for requests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from spcheck.case import GROUPS, LARGEST_WORLD, Case, Named, Requests, in_order
from spcheck.case.codecs import COUNT, FLAG, SECONDS, Codec
from spcheck.cli.grouped import GroupedOption
from spcheck.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])
_NewAndCached = tuple[Requests, Requests | None]
_Callback = Callable[[click.Context, click.Parameter, Any], Any]
_Decorator = Callable[[Any], Any]

_LONGEST = 1e6  # seconds


def _models(_: click.Context, __: click.Parameter, beginning: str) -> list[CompletionItem]:
    from spcheck.plan.model import preset_names

    presets = [CompletionItem(name) for name in preset_names() if name.startswith(beginning)]
    return [*presets, CompletionItem(beginning, type="file")]


_COMPLETIONS = {"model": _models}


def case_options(command: F) -> F:
    """Puts the options of a case on a command, group by group."""
    for group in reversed(GROUPS):
        for _, option in reversed([pair for pair in _options() if pair[0] == group]):
            command = option(command)
    return command


def _options() -> Iterator[tuple[str, _Decorator]]:
    """Group and option, in the order of the words of an id."""
    tp, *others = in_order()
    yield _declared_option(tp)
    yield _option("world", "--dp", type=int, help="Data-parallel ranks; as many as --requests has parts.")
    tokens = "One request of this many new tokens, on every data-parallel rank."
    yield _option("requests", "--tokens", type=int, help=tokens)
    for named in others:
        if named.setting.option is not None:
            yield _declared_option(named)


def _option(group: str, *names: str, **settings: Any) -> tuple[str, _Decorator]:
    return group, click.option(*names, cls=GroupedOption, group=group, **settings)


def _declared_option(named: Named) -> tuple[str, _Decorator]:
    setting = named.setting
    return _option(
        setting.group,
        str(setting.option),
        named.name,
        default=_default_of(named),
        show_default=setting.found or True,
        help=setting.help,
        metavar=setting.metavar,
        multiple=setting.codec.repeats,
        shell_complete=_COMPLETIONS.get(named.name),
        **_type_of(setting.codec),
    )


def _default_of(named: Named) -> Any:
    """As click takes it; None where :func:`case_of` or the case itself knows better."""
    if named.is_required or named.setting.found or named.setting.codec.repeats or named.default is None:
        return None
    return named.default if _is_native(named.setting.codec) else named.setting.codec.format(named.default)


def _is_native(codec: Codec) -> bool:
    """Whether click itself reads the value, so that its messages and defaults are used."""
    return codec in (COUNT, SECONDS, FLAG) or bool(codec.choices)


def _type_of(codec: Codec) -> dict[str, Any]:
    if codec is FLAG:
        return {}
    if codec.choices:
        return {"type": click.Choice(codec.choices)}
    return {"type": codec.parse} if _is_native(codec) else {"callback": _read_with(codec)}


def _read_with(codec: Codec) -> _Callback:
    """Reads the text of an option, or all of them where it repeats; what cannot be read names the option."""

    def read(_: click.Context, __: click.Parameter, text: Any) -> Any:
        if text is None:
            return None
        try:
            return tuple(map(codec.parse, text)) if codec.repeats else codec.parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return read


def case_of(options: dict[str, Any]) -> Case:
    """The case that a command's options make.

    Raises:
        UsageError: they contradict each other, or a number cannot be; one sentence.
    """
    given = {name: value for name, value in options.items() if value is not None}
    tokens = given.pop("tokens", None)
    requests, cached = _requests_of(tokens, given.pop("requests", None), given.pop("dp", None))
    if tokens is not None and len(given.get("previous", ())) == 1:
        given["previous"] *= len(requests)  # as --tokens, on every data-parallel rank
    if "skip_padding" not in given:
        given["skip_padding"] = _skip_padding_default()
    if not 0 < given["timeout"] <= _LONGEST:
        raise UsageError(f"--timeout must be a positive number of seconds up to {_LONGEST:g}, not {given['timeout']:g}")
    case = Case(requests=requests, cached=cached, **given)
    return case if "mtp_steps" in given else _with_drafts(case)


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
