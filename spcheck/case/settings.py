"""What is declared of each setting: all that a command line, an id, JSON and the key of a built engine need. No torch.

A setting is a field of :class:`spcheck.case.Case` whose metadata is a :class:`Setting`. Nothing else lists settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, get_args

from spcheck.case.codecs import FLAG, TEXT, Codec

Group = Literal["world", "requests", "model", "drafting", "padding", "numerics", "running"]
GROUPS: tuple[Group, ...] = get_args(Group)
"""In the order of ``--help``."""

Resolved = Literal["data parallel size", "model", "arithmetic", "side"]
"""What a plan makes of settings."""

P = ParamSpec("P")
T = TypeVar("T")
_METADATA = "setting"


@dataclass(frozen=True)
class Itself:
    """A built engine depends on the value as it is given. This is so unless a declaration says something else."""


@dataclass(frozen=True)
class Through:
    """An engine depends on what a plan makes of the value; settings that come to the same share their engines."""

    resolved: Resolved


@dataclass(frozen=True)
class Without:
    """No engine depends on the value, for this reason."""

    reason: str


Engine = Itself | Through | Without
ITSELF = Itself()


def _always(_: Any) -> bool:
    return True


@dataclass(frozen=True)
class Setting:
    """One setting; its name, type and default are those of the field.

    ``option`` is None for a field that the option of another field carries; with a slash it has a yes and a no.
    ``found`` says which default the command line finds out by itself, where that is not the field's.

    In an id the words of a setting are left out where ``written(case)`` is false, and with ``brief`` also while the
    value is the default. ``spelled(case)`` gives them where they are more than the option and the value behind it.

    ``engine`` is how a built engine depends on it, and ``handed`` whether a subject is told it when it is built.
    """

    option: str | None
    group: Group
    codec: Codec
    help: str
    metavar: str | None = None
    found: str | None = None
    brief: bool = False
    written: Callable[[Any], bool] = _always
    spelled: Callable[[Any], list[str]] | None = None
    engine: Engine = ITSELF
    handed: bool = False

    def __post_init__(self) -> None:
        """Refuses what would let an engine be used again that was told something else.

        Raises:
            ValueError: a subject is told the value, and the engine's key would not have it.
        """
        if self.handed and self.engine != ITSELF:
            raise ValueError(f"{self.option} is handed to a subject, so it belongs to the engine's key as it is")

    def words(self, case: Any, value: object) -> list[str]:
        """Option and value as words of a command line."""
        if self.spelled is not None:
            return self.spelled(case)
        if self.option is None:
            return []
        if self.codec is FLAG:
            yes, no = self.option.split("/")
            return [yes if value else no]
        return [self.option, self.codec.format(value)]


@dataclass(frozen=True)
class Named:
    """A setting of a case by the name of its field; ``default`` means nothing where it has to be given."""

    name: str
    default: Any
    setting: Setting

    @property
    def is_required(self) -> bool:
        """Whether it has no default."""
        return self.default is REQUIRED

    def words_of(self, case: Any) -> list[str]:
        """What the id of a case says of it."""
        value = getattr(case, self.name)
        hidden = self.setting.brief and value == self.default
        return [] if hidden or not self.setting.written(case) else self.setting.words(case, value)


def _as_field(make: Callable[P, Setting]) -> Callable[Concatenate[T, P], T]:
    def as_field(default: T, /, *args: P.args, **options: P.kwargs) -> T:
        declared: T = dataclasses.field(default=default, metadata={_METADATA: make(*args, **options)})
        return declared

    return as_field


REQUIRED: Any = dataclasses.MISSING
"""The default of a setting that has none."""

setting = _as_field(Setting)
"""A field that is a setting, from its default and the arguments of :class:`Setting`."""

_UNDECLARED = Setting(None, "running", TEXT, "")


def settings_of(kind: type[Any]) -> tuple[Named, ...]:
    """The settings of a type of cases, in the order of its fields.

    A field without a declaration has no option, and belongs to the key of an engine.
    """
    fields = dataclasses.fields(kind)
    return tuple(Named(field.name, field.default, field.metadata.get(_METADATA, _UNDECLARED)) for field in fields)


def engine_values(case: Any) -> tuple[object, ...]:
    """What a built engine depends on as it stands in the case: the value of each setting that is declared so.

    What it depends on through a plan is the plan's to say (:class:`Through`).
    """
    return tuple(getattr(case, name) for name, setting in _declared(case) if setting.engine == ITSELF)


def handed_values(case: Any) -> dict[str, Any]:
    """What a subject is told of a case when it is built, by the names of the fields."""
    return {name: getattr(case, name) for name, setting in _declared(case) if setting.handed}


def _declared(case: Any) -> Iterator[tuple[str, Setting]]:
    for named in settings_of(type(case)):
        yield named.name, named.setting
