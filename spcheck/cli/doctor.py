"""``spcheck doctor``: what this machine can run."""

from __future__ import annotations

import sys

import click

from spcheck.cli.output import JsonTarget, echo, progress
from spcheck.cli.shared import json_option

_STEPS = 5  # the machine, torch, and three backends


@click.command()
@json_option
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
    with progress(_STEPS) as say:
        diagnosis = examine(say)
    echo(doctor_text(diagnosis), err=target is not None and target.is_stdout)
    if target is not None:
        target.write(doctor_json(diagnosis))
    sys.exit(diagnosis.exit_code)
