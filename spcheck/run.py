"""One run: a case and a host in, a comparison out. Every command, benchmark and test goes through here. No torch."""

from __future__ import annotations

from dataclasses import replace

from spcheck.case import Case
from spcheck.errors import HostFailed
from spcheck.judge.failure import failure_sentence, internal_error
from spcheck.judge.verdict import Comparison, conclude
from spcheck.launch.interface import Host, Progress, RunLog, silent
from spcheck.plan.plan import Plan, make_plan


def run(case: Case, host: Host, progress: Progress = silent) -> Comparison:
    """Checks a case, runs it, and judges what came back; where grid A is too fine for its model, again with grid B.

    Raises:
        UsageError: the case cannot exist, or the machine cannot run it; the message says why in one sentence.
        HostFailed: the tool itself is at fault.
    """
    comparison = run_once(make_plan(case), host, progress)
    if not comparison.wants_coarser_grid:
        return comparison
    return run_once(make_plan(replace(case, grid="B")), host, progress)


def run_once(plan: Plan, host: Host, progress: Progress = silent) -> Comparison:
    """The same for a checked case, with its own grid only."""
    log = host.run(plan, progress)
    progress("judging")
    return judged(plan, log)


def judged(plan: Plan, log: RunLog) -> Comparison:
    """What is made of the reports that came back.

    Raises:
        HostFailed: spcheck itself broke on a rank.
    """
    if internal := internal_error(log.reports):
        raise HostFailed(*internal)
    return conclude(plan, log.reports, log.environment, log.ending or failure_sentence(log.reports))
