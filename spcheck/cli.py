"""The command line. No torch is imported here: the parent only starts processes and prints."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from spcheck import __version__
from spcheck.case import BACKENDS, GRID_NAMES, NUMERICS, PADDING_CONTENTS, SCHEMES, Case
from spcheck.errors import SpcheckError, UsageError
from spcheck.internal import internal_error
from spcheck.output import JsonTarget, echo, progress, wants_color, width
from spcheck.printable import sentence

if TYPE_CHECKING:
    from spcheck.plan import Plan
    from spcheck.verdict import Comparison

_INTERRUPTED = 130
_INTERNAL = 70
_LONGEST = 1e6  # seconds
_DOCTOR_STEPS = 5  # the machine, torch, and three backends
_STEPS = 3  # of a run: its ranks start, they run, their numbers are judged


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="spcheck %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Proves that a sequence-parallel model still computes what its reference computes.

    It runs the two as a pair, on the same ranks, weights and tokens, and compares every layer.

    \b
    Start with:
      spcheck doctor                        what this machine can run
      spcheck diff --tp 2 --tokens 17       compare the pair on one request
      spcheck diff --help                   all that a case can be made of

    \b
    Exit codes:
      0 EQUAL or EQUIVALENT    1 DIVERGED    2 usage, impossible case
      3 INCONCLUSIVE           4 FAILED      70 internal error, 130 interrupted
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def _numbers(_: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """``5,1,11``: integers with commas; ``none`` is the empty list where that is the default."""
    if value is None or (value.strip() in ("", "none") and parameter.default == "none"):
        return None if value is None else ()
    try:
        return tuple(int(word) for word in value.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is no list of whole numbers such as 5,1,11") from error


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


def _skip_padding_default() -> bool:
    """VLLM_MOE_SKIP_PADDING as engines read it: on unless it says 0."""
    value = os.environ.get("VLLM_MOE_SKIP_PADDING") or "1"
    if value not in ("0", "1"):
        raise UsageError(f"VLLM_MOE_SKIP_PADDING must be 0 or 1, not {value!r}")
    return value == "1"


def _files(_: click.Context, __: click.Parameter, beginning: str) -> list[CompletionItem]:
    """Leaves the completion to the shell."""
    return [CompletionItem(beginning, type="file")]


def _models(_: click.Context, __: click.Parameter, beginning: str) -> list[CompletionItem]:
    from spcheck.plan import preset_names

    presets = [CompletionItem(name) for name in preset_names() if name.startswith(beginning)]
    return [*presets, CompletionItem(beginning, type="dir")]


_json_option = click.option(
    "--json", "json_target", metavar="FILE", shell_complete=_files,
    help="Also writes the result as JSON: a file, or - for stdout.",
)  # fmt: skip


@cli.command()
@click.option("--tp", type=int, default=2, show_default=True, help="Tensor-parallel ranks.")
@click.option("--tokens", type=int, help="One request of this many new tokens.")
@click.option("--requests", callback=_numbers, metavar="N,N,...", help="New tokens of each request, such as 5,1,11.")
@click.option(
    "--model", default="dsv32-tiny", show_default=True, shell_complete=_models, help="A preset, or a checkpoint folder."
)
@click.option(
    "--set",
    "overrides",
    callback=_settings,
    metavar="KEY=VALUE",
    multiple=True,
    help="Overrides a key of the model's config.json; repeatable.",
)
@click.option("--numerics", type=click.Choice(NUMERICS), default="exact", show_default=True,
              help="exact: float64 on a grid, where every sum is exact; else a plain type.")  # fmt: skip
@click.option("--grid", type=click.Choice(GRID_NAMES), default="auto", show_default=True,
              help="Grid of exact numerics; B is coarser and leaves more room.")  # fmt: skip
@click.option("--reference-world", type=int, metavar="N",
              help="Ranks of the reference: 1, or as many as the candidate has (the default).")  # fmt: skip
@click.option("--scheme", type=click.Choice(SCHEMES), default="auto", show_default=True, help="Candidate's dataflow.")
@click.option("--require-scheme", type=click.Choice(SCHEMES[1:]), help="Exit 3 unless this scheme ran.")
@click.option("--mtp-steps", type=int, default=1, show_default=True, help="Tokens to draft.")
@click.option("--aux-layers", callback=_numbers, metavar="I,I,...", default="none", show_default=True,
              help="Layers whose input is kept as an auxiliary hidden state (EAGLE-style drafters).")  # fmt: skip
@click.option("--pad-to", type=int, help="Pads the step to this many rows, as a captured CUDA graph does.")
@click.option("--skip-padding/--no-skip-padding", default=None,
              help="Whether padded rows are routed; default from VLLM_MOE_SKIP_PADDING, else skipped.")  # fmt: skip
@click.option("--padding-content", type=click.Choice(PADDING_CONTENTS), default="zero", show_default=True,
              help="What padded rows hold.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Weights of a preset, tokens, padding.")
@click.option("--backend", type=click.Choice(BACKENDS), default="auto", show_default=True, help="What joins the ranks.")
@click.option("--timeout", type=float, default=60.0, show_default=True, help="Seconds until a run counts as hung.")
@click.option("-v", "--verbose", is_flag=True, help="Shows every probe, not only one line per layer.")
@click.option("-q", "--quiet", is_flag=True, help="Shows one line: the verdict, and where it diverges first.")
@_json_option
def diff(
    tokens: int | None,
    requests: tuple[int, ...] | None,
    json_target: str | None,
    verbose: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Runs the pair on one case and compares every layer. --tokens or --requests is needed.

    \b
    Examples:
      spcheck diff --tp 2 --tokens 17
      spcheck diff --tp 4 --requests 5,1,11 --mtp-steps 3 --aux-layers 0,2,5
      spcheck diff --tp 2 --tokens 17 --set index_topk=4 --set topk_group=1

    \b
    Exit codes:
      0 EQUAL or EQUIVALENT    1 DIVERGED    2 usage, impossible case
      3 INCONCLUSIVE           4 FAILED      70 internal error, 130 interrupted
    """
    if verbose and quiet:
        raise UsageError("give --verbose or --quiet, not both")
    case = _case(tokens, requests, options)
    target = None if json_target is None else JsonTarget(json_target)
    comparison = _compare(case)
    _show(comparison, target, verbose=verbose, quiet=quiet)
    sys.exit(comparison.verdict.exit_code)


def _case(tokens: int | None, requests: tuple[int, ...] | None, options: dict[str, Any]) -> Case:
    if tokens is not None and requests is not None:
        raise UsageError("give --tokens or --requests, not both")
    if tokens is None and requests is None:
        raise UsageError("there is no request: give --tokens N or --requests N,N,...")
    if options["skip_padding"] is None:
        options["skip_padding"] = _skip_padding_default()
    if not 0 < options["timeout"] <= _LONGEST:
        raise UsageError(
            f"--timeout must be a positive number of seconds up to {_LONGEST:g}, not {options['timeout']:g}"
        )
    return Case(requests=requests if requests is not None else (tokens or 0,), **options)


def _compare(case: Case) -> Comparison:
    from spcheck.launch.parent import run_case
    from spcheck.plan import make_plan

    plan: Plan = make_plan(case)
    with progress(_STEPS, quiet=click.get_current_context().params["quiet"]) as say:
        log = run_case(case, say)
        say("judging")
        from spcheck.verdict import conclude

        comparison = conclude(plan, log.reports, log.environment, log.failure)
    return _compare(replace(case, grid="B")) if comparison.wants_coarser_grid else comparison


def _show(comparison: Comparison, target: JsonTarget | None, *, verbose: bool, quiet: bool) -> None:
    from spcheck.report.json import to_json
    from spcheck.report.text import to_line, to_text

    to_stderr = target is not None and target.is_stdout
    color = wants_color(sys.stderr if to_stderr else sys.stdout)
    text = to_line(comparison) if quiet else to_text(comparison, color=color, width=width(), verbose=verbose)
    echo(text, err=to_stderr)
    if target is not None:
        target.write(to_json(comparison))


@cli.command()
@_json_option
def doctor(json_target: str | None) -> None:
    """Says what this machine can run, and tries it.

    It looks at torch, GPUs, nccl, gloo, cores, memory and the like, and runs one small case on each backend that
    should work here.

    \b
    Examples:
      spcheck doctor
      spcheck doctor --json doctor.json

    \b
    Exit codes:
      0 every backend that should work here does
      4 one of them did not, or there is none
    """
    from spcheck.doctor.trial import examine
    from spcheck.report.doctor import doctor_json, doctor_text

    target = None if json_target is None else JsonTarget(json_target)
    with progress(_DOCTOR_STEPS) as say:
        diagnosis = examine(say)
    echo(doctor_text(diagnosis), err=target is not None and target.is_stdout)
    if target is not None:
        target.write(doctor_json(diagnosis))
    sys.exit(diagnosis.exit_code)


def main() -> None:
    """The console script: every ending has its exit code, and a traceback is never exit 1."""
    try:
        code = _run()
    except KeyboardInterrupt:  # a second Ctrl-C, while the first was being told
        code = _INTERRUPTED
    sys.exit(code)


def _run() -> int:
    try:
        _check_packages()
        result = cli.main(prog_name="spcheck", standalone_mode=False)
    except click.ClickException as error:
        return _say(_one_sentence(error.format_message()), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return _say("interrupted", _INTERRUPTED)
    except Exception as error:
        if isinstance(error, SpcheckError) and error.exit_code != _INTERNAL:
            return _say(str(error), error.exit_code)
        return _say(internal_error(error), _INTERNAL)
    return result if isinstance(result, int) else 0


def _say(message: str, code: int) -> int:
    echo(f"spcheck: {sentence(message)}\n", err=True)
    return code


def _check_packages() -> None:
    """The subjects are packages of common names: another one on the path must not be taken for ours.

    Raises:
        UsageError: it would be; the message names the folder.
    """
    here = Path(__file__).resolve().parents[1]
    for name in ("reference", "optimized"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or Path(spec.origin).resolve().parents[1] != here:
            found = "nowhere" if spec is None else spec.origin
            raise UsageError(f"the package {name!r} is found at {found}, not beside spcheck in {here}: mend PYTHONPATH")


def _one_sentence(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    main()
