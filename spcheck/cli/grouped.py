"""A command whose help shows its options in groups."""

from __future__ import annotations

from typing import Any

import click

_OTHER = "Other"
_WIDEST = 28  # columns of an option that has its help on the same line


class GroupedOption(click.Option):
    """An option that stands in a group of the help."""

    def __init__(self, *args: Any, group: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.group = group


class GroupedCommand(click.Command):
    """A command that shows its options by group, in the order in which the groups first occur."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes a section for each group; options of no group come last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(_group_of(parameter), []).append(record)
        names = [name for rows in sections.values() for name, _ in rows]
        column = max(len(name) for name in names if len(name) <= _WIDEST)
        for title, rows in sections.items():
            with formatter.section(title.capitalize()):
                formatter.write_dl([(name.ljust(column), text) for name, text in rows], col_max=column)


def _group_of(parameter: click.Parameter) -> str:
    return parameter.group if isinstance(parameter, GroupedOption) else _OTHER
