"""What decides a run: a case as a frozen value, and what each of its settings can be. No torch."""

from spcheck.case.case import Case, in_order
from spcheck.case.choices import (
    ALL2ALL_BACKENDS,
    DEFAULT_GRAPH_SIZES,
    LARGEST_WORLD,
    NUMERICS,
    SCHEMES,
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
    settings_of,
)

__all__ = [
    "ALL2ALL_BACKENDS",
    "DEFAULT_GRAPH_SIZES",
    "GROUPS",
    "LARGEST_WORLD",
    "NUMERICS",
    "SCHEMES",
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
    "settings_of",
]
