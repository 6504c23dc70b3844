"""Options that several commands have besides those of a case: what is shown, and where a result is written."""

from __future__ import annotations

from functools import partial

import click
from click.shell_completion import CompletionItem

from spcheck.cli.grouped import GroupedOption


def _files(_: click.Context, __: click.Parameter, beginning: str) -> list[CompletionItem]:
    """Leaves the completion to the shell."""
    return [CompletionItem(beginning, type="file")]


shown_option = partial(click.option, cls=GroupedOption, group="output")

json_option = shown_option(
    "--json", "json_target", metavar="FILE", shell_complete=_files,
    help="Also writes the result as JSON: a file, or - for stdout.",
)  # fmt: skip
