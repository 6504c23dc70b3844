"""A case: everything that decides a run, as one frozen value whose id is the command that repeats it."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NUMERICS = ("exact", "float64", "float32", "bfloat16")
SCHEMES = ("auto", "tp", "moe-sp", "full-sp")
GRID_NAMES = ("auto", "A", "B")
BACKENDS = ("auto", "gloo", "nccl", "loopback")
ALL2ALL_BACKENDS = ("allgather_reducescatter", "naive", "all_to_all")
WEIGHTS = ("plain", "ties", "outliers")
PADDING_CONTENTS = ("zero", "random", "nan", "stale")
DEFAULT_GRAPH_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""The row counts for which engines capture CUDA graphs unless told otherwise."""

Requests = tuple[tuple[int, ...], ...]
"""Tokens of each request, per data-parallel rank; an empty tuple is an idle rank."""


@dataclass(frozen=True)
class Case:
    """One run of the pair on ``dp * tp`` ranks.

    ``requests`` are the new tokens of each request; ``cached``, of the same shape, those that it holds before, None
    for none. ``previous`` are the requests of a step that runs before, through the same buffers. ``generate`` steps
    follow the case's own, each with the tokens that the one before sampled and drafted; with ``prefill_chunk`` a step
    takes at most so many new tokens of a prompt, and those that follow take the rest. ``pad_to`` is the row count the
    target step and draft step 0 are padded to; one that verifies drafts or prefills cached tokens may have more. With
    ``graph_sizes`` every forward is padded to the smallest that holds it. ``scale`` is how large the model's sizes are
    made, and ``overrides`` are config keys set by the user behind that, in order. ``weights`` is the kind of random
    weights. ``reference`` and ``candidate`` are a subject's name, and behind a colon its scheme. ``reference_world`` is
    1 for a reference that the first rank of each data-parallel rank runs alone; None: as many ranks as the candidate
    has. Request ``i`` uses adapter ``i mod (lora_adapters + 1)``, the last of which is none.
    """

    requests: Requests
    tp: int
    model: str = "dsv32-tiny"
    scale: str = "full"
    overrides: tuple[tuple[str, Any], ...] = ()
    weights: str = "plain"
    cached: Requests | None = None
    previous: Requests | None = None
    generate: int = 0
    prefill_chunk: int | None = None
    pp: int = 1
    expert_parallel: bool = True
    all2all_backend: str = "allgather_reducescatter"
    lora_rank: int = 0
    lora_adapters: int = 0
    reference: str = "reference"
    candidate: str = "optimized"
    numerics: str = "exact"
    grid: str = "auto"
    reference_world: int | None = None
    scheme: str = "auto"
    require_scheme: str | None = None
    mtp_steps: int = 1
    aux_layers: tuple[int, ...] = ()
    pad_to: int | None = None
    graph_sizes: tuple[int, ...] = ()
    skip_padding: bool = True
    padding_content: str = "zero"
    seed: int = 0
    backend: str = "auto"
    timeout: float = 60.0

    def __hash__(self) -> int:
        """Of the id: the values of ``overrides`` may be lists and objects."""
        return hash(self.id)

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return len(self.requests)

    @property
    def ranks(self) -> int:
        """Ranks of the world."""
        return self.dp * self.tp

    @property
    def cached_tokens(self) -> Requests:
        """Tokens that each request holds before its new ones."""
        return self.cached or tuple((0,) * len(here) for here in self.requests)

    @property
    def requests_text(self) -> str:
        """``5,1@40/11/-``."""
        return requests_text(self.requests, self.cached)

    @property
    def id(self) -> str:
        """The command line that repeats this case, every default spelled out."""
        words = ["spcheck", "diff", *self._world(), *self._shape(), *self._padding(), *self._policy()]
        return " ".join(map(_word, words))

    def _world(self) -> list[str]:
        single = self.dp == 1 and len(self.requests[0]) == 1 and not any(map(any, self.cached_tokens))
        words = ["--tp", str(self.tp), "--dp", str(self.dp)]
        words += ["--tokens" if single else "--requests", self.requests_text]
        words += ["--previous", requests_text(self.previous)] if self.previous is not None else []
        words += ["--generate", str(self.generate)] if self.generate else []
        words += ["--prefill-chunk", str(self.prefill_chunk)] if self.prefill_chunk is not None else []
        words += ["--pp", str(self.pp)] if self.pp != 1 else []
        words += ["--expert-parallel" if self.expert_parallel else "--no-expert-parallel"]
        return [*words, "--all2all-backend", self.all2all_backend]

    def _shape(self) -> list[str]:
        words = ["--model", self.model]
        words += ["--scale", self.scale] if self.scale != "full" else []
        for key, value in self.overrides:
            words += ["--set", f"{key}={json.dumps(value) if not isinstance(value, str) else value}"]
        words += ["--weights", self.weights] if self.weights != "plain" else []
        words += ["--mtp-steps", str(self.mtp_steps), "--aux-layers", _join(self.aux_layers) or "none"]
        lora = ["--lora-rank", str(self.lora_rank), "--lora-adapters", str(self.lora_adapters)]
        return words + (lora if self.lora_rank or self.lora_adapters else [])

    def _padding(self) -> list[str]:
        sizes = "default" if self.graph_sizes == DEFAULT_GRAPH_SIZES else _join(self.graph_sizes) or "none"
        words = ["--pad-to", str(self.pad_to)] if self.pad_to is not None else ["--graph-sizes", sizes]
        words += ["--skip-padding" if self.skip_padding else "--no-skip-padding"]
        return [*words, "--padding-content", self.padding_content]

    def _policy(self) -> list[str]:
        words = ["--numerics", self.numerics]
        words += ["--grid", self.grid] if self.numerics == "exact" else []
        words += ["--reference", self.reference, "--candidate", self.candidate]
        words += ["--reference-world", str(self.reference_world)] if self.reference_world is not None else []
        words += ["--scheme", self.scheme]
        words += ["--require-scheme", self.require_scheme] if self.require_scheme else []
        return [*words, "--seed", str(self.seed), "--backend", self.backend, "--timeout", f"{self.timeout:g}"]

    def to_json(self) -> dict[str, Any]:
        """The case as plain data, for another process."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Case:
        """The case that :meth:`to_json` wrote (JSON has no tuples)."""
        values = dict(data)
        for name in ("requests", "cached", "previous", "overrides"):
            values[name] = None if values[name] is None else tuple(map(tuple, values[name]))
        for name in ("aux_layers", "graph_sizes"):
            values[name] = tuple(values[name])
        return cls(**values)


def requests_text(requests: Requests, cached: Requests | None = None) -> str:
    """``5,1@40/11/-``: data-parallel ranks apart by a slash, an idle one a dash; cached tokens behind an @."""
    held = cached or tuple((0,) * len(here) for here in requests)
    ranks = [zip(*both, strict=True) for both in zip(requests, held, strict=True)]
    return "/".join(",".join(f"{new}@{old}" if old else str(new) for new, old in here) or "-" for here in ranks)


def _join(numbers: tuple[int, ...]) -> str:
    return ",".join(str(n) for n in numbers)


def _word(text: str) -> str:
    """One word for a shell, on one line: a name with a line break or an escape sequence as bash and zsh write it."""
    if text.isprintable():
        return shlex.quote(text)
    plain = range(0x20, 0x7F)
    return "$'" + "".join(chr(b) if b in plain and b not in b"'\\" else f"\\x{b:02x}" for b in os.fsencode(text)) + "'"
