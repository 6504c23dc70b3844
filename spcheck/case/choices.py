"""What the settings of a case can be, and the types of their values."""

from __future__ import annotations

NUMERICS = ("exact", "float64", "float32", "bfloat16")
SCHEMES = ("auto", "tp", "moe-sp", "full-sp")
GRID_NAMES = ("auto", "A", "B")
BACKENDS = ("auto", "gloo", "nccl", "loopback")
ALL2ALL_BACKENDS = ("allgather_reducescatter", "naive", "all_to_all")
SCALES = ("full", "tiny")
WEIGHTS = ("plain", "ties", "outliers")
PADDING_CONTENTS = ("zero", "random", "nan", "stale")
DEFAULT_GRAPH_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""The row counts for which engines capture CUDA graphs unless told otherwise."""

LARGEST_WORLD = 1024
"""Ranks of a case at most."""

Requests = tuple[tuple[int, ...], ...]
"""Tokens of each request, per data-parallel rank; an empty tuple is an idle rank."""
