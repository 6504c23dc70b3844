"""A comparison as a page of text: one line per layer, then contracts, findings and the verdict."""

from __future__ import annotations

from collections.abc import Iterable
from io import StringIO
from typing import Any

from rich.console import Console, JustifyMethod
from rich.table import Table

from spcheck.families.deepseek.rows import kind_of_probe
from spcheck.judge.contracts.check import Checked
from spcheck.judge.merge import ProbeResult, total_choices
from spcheck.judge.outcome import PASSES
from spcheck.judge.sentences import place
from spcheck.judge.verdict import Comparison
from spcheck.plan.grid import LIMIT
from spcheck.plan.phases import layer_of
from spcheck.plan.plan import Plan
from spcheck.report.accounting import accounting_lines
from spcheck.report.exercised import exercised_lines
from spcheck.report.failure import failure_lines
from spcheck.report.generation import generation_lines, turn_lines
from spcheck.report.head import escape, head_lines
from spcheck.report.printable import printable
from spcheck.report.probes import probe_lines
from spcheck.subjects.protocol import CHOICES

_STYLES = {"EQUAL": "green", "EQUIVALENT": "green", "INCONCLUSIVE": "yellow", "DIVERGED": "red", "FAILED": "red"}
_MAX_FINDINGS = 12


def to_text(
    comparison: Comparison, *, color: bool = False, width: int = 80, verbose: bool = False, collectives: bool = False
) -> str:
    """The report. Meaning never hangs on colour: every line says its state in a word.

    ``verbose`` adds every probe, ``collectives`` what both sides cost.
    """
    console = Console(
        file=StringIO(), width=width, force_terminal=color, no_color=not color, highlight=False, soft_wrap=True
    )
    with console.capture() as capture:
        for line in head_lines(comparison):
            console.print(line)
        details = (*probe_lines(comparison, width), *turn_lines(comparison.generation, comparison.plan))
        for line in details if verbose else ():
            console.print(escape(line))
        if comparison.results:
            console.print(_table(comparison, width))
        parts = (
            _contracts,
            _exactness,
            _choices,
            _generation,
            _exercised,
            *([_accounting] if collectives else []),
            _findings,
            _failure,
            _verdict,
        )
        for line in (line for part in parts for line in part(comparison)):
            console.print(line)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def verdict_line(comparison: Comparison) -> str:
    """``EQUIVALENT, scheme full-sp: ...`` in one line, without markup."""
    v = comparison.verdict
    no_sp = v.outcome in PASSES and not any(side.sharded for _, side in comparison.plan.sides)
    exercised = ": SP not exercised" if no_sp else ""
    return f"{v.outcome}, scheme {v.scheme}{exercised}"


def to_line(comparison: Comparison) -> str:
    """The verdict in one line, with what decides it: where it diverges first, or the first thing that is wrong."""
    v = comparison.verdict
    line = f"{verdict_line(comparison)}  {_counts(comparison)}"
    if v.first_divergence is not None:
        at = v.first_divergence
        line += f", first at {_named(comparison, at)}, {_where(comparison, at)}"
    elif v.findings:
        line += f": {v.findings[0].message}"
    return printable(line) + "\n"


def _counts(c: Comparison) -> str:
    return f"{c.compared} probes compared, {c.bitwise_equal} bitwise equal"


def _table(c: Comparison, width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    columns: list[tuple[str, JustifyMethod, int]] = [("", "left", 22), ("probes", "right", 6), ("equal", "right", 5)]
    columns += [("error", "right", 7), ("", "left", 7)]
    for title, justify, least in columns:
        table.add_column(title, justify=justify, min_width=least, no_wrap=True)
    taken = sum(least + 1 for *_, least in columns)
    table.add_column("at", no_wrap=True)
    for name, results in _groups(c):
        *cells, at = _cells(results, c.plan)
        table.add_row(name, *cells, escape(_fitted(at, width - taken - 1)))
    return table


def _fitted(at: str, room: int) -> str:
    """The place and the end of the probe's name: beginnings are alike, ends are not."""
    row, space, probe = at.rpartition(" ")
    left = room - len(row) - len(space)
    return at if len(probe) <= left else f"{row}{space}…{probe[len(probe) - left + 1 :]}"


def _groups(c: Comparison) -> list[tuple[str, list[ProbeResult]]]:
    groups: dict[str, list[ProbeResult]] = {}
    for result in c.results:
        groups.setdefault(_line_of(result, c.plan), []).append(result)
    order = sorted(groups, key=_line_order)
    return [(name, groups[name]) for name in order]


def _line_of(result: ProbeResult, plan: Plan) -> str:
    layer = layer_of(result.probe)
    forward = plan.forward_name(result.phase, result.call)
    phase = plan.phase(result.phase, result.call)
    if phase is not None and plan.steps[phase.step].name:
        return plan.steps[phase.step].name
    if result.phase == "cache":
        return "caches"
    if result.phase == "draft":
        return f"{forward} (layer {layer})"
    if layer is None:
        return "embedding" if result.probe.startswith("model.embed_tokens") else "norm, aux, logits"
    return plan.layer_name(layer)


def _line_order(name: str) -> tuple[int, int]:
    kinds = ["previous", "embedding", "layer", "norm,", "draft", "generated", "caches"]
    number = next((int(w) for w in name.replace(")", "").split() if w.isdigit()), 0)
    return kinds.index(name.split()[0]), number


def _cells(results: list[ProbeResult], plan: Plan) -> list[str]:
    """Probes, equal ones, error, state and place: of the first probe that differs, else of the largest error."""
    seen = [r for r in results if r.rows]
    counts = [str(len(seen)), str(sum(r.bitwise_equal for r in seen))]
    if first := next((r for r in results if r.over), None):
        return [*counts, *_error(first, plan, "[red]DIFFERS[/]")]
    if not seen:
        return [*counts, "", "nothing compared", ""]
    if straddled := next((r for r in seen if r.straddle), None):
        return [*counts, *_error(straddled, plan, "[yellow]straddle[/]")]
    worst = max(seen, key=lambda r: r.max_rel)
    return [*counts, *_error(worst, plan, "ok")] if worst.max_rel else [*counts, "0", "ok", ""]


def _error(result: ProbeResult, plan: Plan, state: str) -> list[str]:
    size = "choice" if result.kind in CHOICES else f"{result.max_rel:.1e}"
    return [size, state, f"{_brief(result, plan)} {_short(result.probe)}".strip()]


def _short(probe: str) -> str:
    """The probe without its layer's name; the line says that already."""
    return probe.split(".", 3)[3] if layer_of(probe) is not None else probe.removeprefix("model.")


def _brief(result: ProbeResult, plan: Plan) -> str:
    where = result.first or result.worst or result.replica
    if where is None or where.get("request") is None:
        return ""
    dp_rank = f"d{where['dp']} " if plan.case.dp > 1 else ""
    request = where["request"]
    own = len(plan.case.requests[where["dp"]])
    return f"{dp_rank}{f'r{request}' if request < own else f'p{request - own}'} t{where['position']}"


def _contracts(c: Comparison) -> Iterable[str]:
    if not c.rows.checked and not c.collectives.checked:
        return
    yield ""
    ranks = c.plan.case.ranks
    for name, unit, checked in (
        ("rows", "row counts", c.rows),
        ("collectives", "collectives", c.collectives),
        ("expert work", "expert counts", c.work),
        ("memory", "sizes", c.memory),
        ("parameters", "tensors", c.parameters),
    ):
        yield f"{name:<12} {_state(checked)}  {checked.checked} {unit} on {ranks} rank{'s' if ranks > 1 else ''}"


def _choices(c: Comparison) -> Iterable[str]:
    total = total_choices(c.results)
    if total.compared:
        flips = f"{total.within} flipped within the scores' error, {total.beyond} beyond"
        yield f"choices      {total.agreeing} alike of {total.compared}; {flips}"
        margins = [(r.choices.margin, r.probe) for r in c.results if r.choices and r.choices.margin is not None]
        if margins:
            margin, probe = min(margins)
            yield f"             closest call: {margin:.1e} in {escape(probe)}"


def _generation(c: Comparison) -> Iterable[str]:
    return map(escape, generation_lines(c.generation))


def _exercised(c: Comparison) -> Iterable[str]:
    return map(escape, exercised_lines(c.not_exercised, c.plan))


def _exactness(c: Comparison) -> Iterable[str]:
    e = c.exactness
    if e is not None and e.tightest is not None:
        state = "[red]BROKEN[/]" if e.all_doubts else "kept  "
        yield f"exactness    {state}  {e.products} products of at most {e.tightest.bits:.1f} of {LIMIT} bits"
        yield f"             tightest: {escape(e.tightest.name)}"


def _accounting(c: Comparison) -> Iterable[str]:
    return map(escape, accounting_lines(c.plan, c.accounting))


def _state(checked: Checked) -> str:
    if checked.breaches:
        return "[red]BROKEN[/]"
    return "kept  " if checked.checked else "-     "


def _findings(c: Comparison) -> Iterable[str]:
    findings = c.verdict.findings
    if findings:
        yield ""
    for finding in findings[:_MAX_FINDINGS]:
        yield f"[{_STYLES[finding.outcome]}]{finding.kind}[/]  {escape(finding.message)}"
    if len(findings) > _MAX_FINDINGS:
        yield f"... and {len(findings) - _MAX_FINDINGS} more (all are in --json)"


def _failure(c: Comparison) -> Iterable[str]:
    return map(escape, failure_lines(c.failure))


def _verdict(c: Comparison) -> Iterable[str]:
    v = c.verdict
    yield ""
    if v.first_divergence is not None:
        yield f"diverges at  {escape(_named(c, v.first_divergence))}, {_where(c, v.first_divergence)}"
        if before := _last_equal(c):
            yield f"equal until  {escape(before)}"
    elif any(r.max_rel for r in c.results):
        yield from (escape(line) for line in _largest(c))
    yield f"repeat       {escape(c.plan.case.id)}"
    yield f"[bold {_STYLES[v.outcome]}]{escape(verdict_line(c))}[/]  {_counts(c)}"


def _largest(c: Comparison) -> Iterable[str]:
    worst = max(c.results, key=lambda r: r.max_rel)
    w = worst.worst or {}
    bound = worst.bound
    of = "all rows' largest element" if c.plan.grid else "its row"
    yield f"largest      {worst.max_rel:.1e} of {of}, bound {bound:.0e}"
    yield f"             {worst.probe}"
    yield f"             {place(w, c.plan)}, row {w.get('row')} of its shard, channel {w.get('channel')}"


def _named(c: Comparison, at: dict[str, Any]) -> str:
    """The probe, or a collective's module, with its forward."""
    kind = "cache" if ".cache." in at["probe"] else kind_of_probe(at["probe"], c.plan)
    return c.plan.probe_name(at["probe"], kind, at["call"])


def _where(c: Comparison, at: dict[str, object]) -> str:
    return place(at, c.plan) if at["request"] is not None else f"call {at['call']}"


def _last_equal(c: Comparison) -> str | None:
    """The probe that ran just before the first divergence, equal or within its bound: "equal in, unequal out"."""
    at = c.verdict.first_divergence or {}
    names = [(r.probe, r.call) for r in c.results]
    here = (at["probe"], at["call"])
    index = names.index(here) if here in names else 0
    if not index:
        return None
    before = c.results[index - 1]
    if before.over:  # rounding may explain it: it was not the first to be named
        return None
    return c.plan.probe_name(before.probe, before.phase, before.call)
