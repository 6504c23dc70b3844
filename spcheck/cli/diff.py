"""``spcheck diff``: one case, compared."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from spcheck.case import Case
from spcheck.cli.grouped import GroupedCommand
from spcheck.cli.options import case_of, case_options
from spcheck.cli.output import JsonTarget, echo, progress, wants_color, width
from spcheck.cli.shared import json_option, shown_option
from spcheck.errors import UsageError

if TYPE_CHECKING:
    from spcheck.judge.verdict import Comparison

_STEPS = 3  # of a run: its ranks start, they run, their numbers are judged


@click.command(cls=GroupedCommand)
@case_options
@shown_option("-v", "--verbose", is_flag=True, help="Shows every probe, not only one line per layer.")
@shown_option("-q", "--quiet", is_flag=True, help="Shows one line: the verdict, and where it diverges first.")
@shown_option("--collectives", is_flag=True, help="Shows collectives, memory and what both sides cost, compared.")
@json_option
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
