"""The command line. No torch is imported here: the parent only starts processes and prints."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from spcheck import __version__
from spcheck.case import Case
from spcheck.cli.internal import internal_error
from spcheck.cli.options import case_of, case_options
from spcheck.cli.output import JsonTarget, echo, progress, wants_color, width
from spcheck.errors import SpcheckError, UsageError
from spcheck.report.printable import sentence

if TYPE_CHECKING:
    from spcheck.judge.verdict import Comparison

_INTERRUPTED = 130
_INTERNAL = 70
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


def _files(_: click.Context, __: click.Parameter, beginning: str) -> list[CompletionItem]:
    """Leaves the completion to the shell."""
    return [CompletionItem(beginning, type="file")]


_json_option = click.option(
    "--json", "json_target", metavar="FILE", shell_complete=_files,
    help="Also writes the result as JSON: a file, or - for stdout.",
)  # fmt: skip


@cli.command()
@case_options
@click.option("-v", "--verbose", is_flag=True, help="Shows every probe, not only one line per layer.")
@click.option("-q", "--quiet", is_flag=True, help="Shows one line: the verdict, and where it diverges first.")
@click.option("--collectives", is_flag=True, help="Shows collectives, memory and what both sides cost, compared.")
@_json_option
def diff(json_target: str | None, verbose: bool, quiet: bool, collectives: bool, **options: Any) -> None:
    """Runs the pair on one case and compares every layer. --tokens or --requests is needed.

    \b
    Examples:
      spcheck diff --tp 2 --tokens 17
      spcheck diff --tp 4 --requests 5,1,11 --mtp-steps 3 --aux-layers 0,2,5
      spcheck diff --tp 2 --requests 5,1/11/- --all2all-backend all_to_all
      spcheck diff --tp 2 --requests 1@40,5,3@12 --mtp-steps 3 --generate 4
      spcheck diff --tp 2 --tokens 17 --set index_topk=4 --set topk_group=1

    \b
    Exit codes:
      0 EQUAL or EQUIVALENT    1 DIVERGED    2 usage, impossible case
      3 INCONCLUSIVE           4 FAILED      70 internal error, 130 interrupted
    """
    if verbose and quiet:
        raise UsageError("give --verbose or --quiet, not both")
    if collectives and quiet:
        raise UsageError("give --collectives or --quiet, not both")
    case = case_of(options)
    target = None if json_target is None else JsonTarget(json_target)
    comparison = _compare(case)
    _show(comparison, target, quiet=quiet, verbose=verbose, collectives=collectives)
    sys.exit(comparison.verdict.exit_code)


def _compare(case: Case) -> Comparison:
    from spcheck.launch.parent import ProcessHost, terminable
    from spcheck.run import run

    quiet = click.get_current_context().params["quiet"]
    with terminable(), progress(_STEPS, quiet=quiet) as say, ProcessHost() as host:
        return run(case, host, say)


def _show(comparison: Comparison, target: JsonTarget | None, *, quiet: bool, **shown: bool) -> None:
    from spcheck.report.json import to_json
    from spcheck.report.text import to_line, to_text

    to_stderr = target is not None and target.is_stdout
    color = wants_color(sys.stderr if to_stderr else sys.stdout)
    text = to_line(comparison) if quiet else to_text(comparison, color=color, width=width(), **shown)
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
    here = Path(__file__).resolve().parents[2]
    for name in ("reference", "optimized"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or Path(spec.origin).resolve().parents[1] != here:
            found = "nowhere" if spec is None else spec.origin
            raise UsageError(f"the package {name!r} is found at {found}, not beside spcheck in {here}: mend PYTHONPATH")


def _one_sentence(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    main()
