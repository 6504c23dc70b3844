"""What decides a run: a case as a frozen value, and what each of its settings can be. No torch."""

from spcheck.case.case import (
    ALL2ALL_BACKENDS,
    BACKENDS,
    DEFAULT_GRAPH_SIZES,
    GRID_NAMES,
    NUMERICS,
    PADDING_CONTENTS,
    SCHEMES,
    WEIGHTS,
    Case,
    Requests,
    requests_text,
)

__all__ = [
    "ALL2ALL_BACKENDS",
    "BACKENDS",
    "DEFAULT_GRAPH_SIZES",
    "GRID_NAMES",
    "NUMERICS",
    "PADDING_CONTENTS",
    "SCHEMES",
    "WEIGHTS",
    "Case",
    "Requests",
    "requests_text",
]
