"""What decides a run: a case as a frozen value, and what each of its settings can be. No torch."""

from spcheck.case.case import Case, in_order
from spcheck.case.choices import (
    ALL2ALL_BACKENDS,
    BACKENDS,
    DEFAULT_GRAPH_SIZES,
    GRID_NAMES,
    LARGEST_WORLD,
    NUMERICS,
    PADDING_CONTENTS,
    SCALES,
    SCHEMES,
    WEIGHTS,
    Requests,
)
from spcheck.case.codecs import requests_text
from spcheck.case.settings import (
    GROUPS,
    Named,
    Resolved,
    Setting,
    Through,
    Without,
    engine_values,
    handed_values,
    setting,
    settings_of,
)

__all__ = [
    "ALL2ALL_BACKENDS",
    "BACKENDS",
    "DEFAULT_GRAPH_SIZES",
    "GRID_NAMES",
    "GROUPS",
    "LARGEST_WORLD",
    "NUMERICS",
    "PADDING_CONTENTS",
    "SCALES",
    "SCHEMES",
    "WEIGHTS",
    "Case",
    "Named",
    "Requests",
    "Resolved",
    "Setting",
    "Through",
    "Without",
    "engine_values",
    "handed_values",
    "in_order",
    "requests_text",
    "setting",
    "settings_of",
]
