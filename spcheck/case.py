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
SCHEMES = ("auto", "tp", "full-sp")
GRID_NAMES = ("auto", "A", "B")
BACKENDS = ("auto", "gloo", "nccl", "loopback")
PADDING_CONTENTS = ("zero", "random", "nan")


@dataclass(frozen=True)
class Case:
    """One run of the pair.

    ``requests`` are the new tokens of each request. ``pad_to`` is the row count the target step and draft step 0
    are padded to (a captured graph's size). ``overrides`` are config keys set by the user, in order. ``grid`` is that
    of exact numerics. ``reference_world`` is 1 for a reference that rank 0 runs alone; None: as many ranks as the
    candidate has.
    """

    requests: tuple[int, ...]
    tp: int
    model: str = "dsv32-tiny"
    overrides: tuple[tuple[str, Any], ...] = ()
    numerics: str = "exact"
    grid: str = "auto"
    reference_world: int | None = None
    scheme: str = "auto"
    require_scheme: str | None = None
    mtp_steps: int = 1
    aux_layers: tuple[int, ...] = ()
    pad_to: int | None = None
    skip_padding: bool = True
    padding_content: str = "zero"
    seed: int = 0
    backend: str = "auto"
    timeout: float = 60.0

    @property
    def id(self) -> str:
        """The command line that repeats this case, every default spelled out."""
        return " ".join(map(_word, ["spcheck", "diff", *self._shape(), *self._policy()]))

    def _shape(self) -> list[str]:
        one = len(self.requests) == 1
        words = ["--tp", str(self.tp), "--tokens" if one else "--requests", _join(self.requests)]
        words += ["--model", self.model]
        for key, value in self.overrides:
            words += ["--set", f"{key}={json.dumps(value) if not isinstance(value, str) else value}"]
        words += ["--mtp-steps", str(self.mtp_steps), "--aux-layers", _join(self.aux_layers) or "none"]
        return words + (["--pad-to", str(self.pad_to)] if self.pad_to is not None else [])

    def _policy(self) -> list[str]:
        words = ["--skip-padding" if self.skip_padding else "--no-skip-padding"]
        words += ["--padding-content", self.padding_content, "--numerics", self.numerics]
        words += ["--grid", self.grid] if self.numerics == "exact" else []
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
        values["requests"] = tuple(values["requests"])
        values["aux_layers"] = tuple(values["aux_layers"])
        values["overrides"] = tuple((key, value) for key, value in values["overrides"])
        return cls(**values)


def _join(numbers: tuple[int, ...]) -> str:
    return ",".join(str(n) for n in numbers)


def _word(text: str) -> str:
    """One word for a shell, on one line: a name with a line break or an escape sequence as bash and zsh write it."""
    if text.isprintable():
        return shlex.quote(text)
    plain = range(0x20, 0x7F)
    return "$'" + "".join(chr(b) if b in plain and b not in b"'\\" else f"\\x{b:02x}" for b in os.fsencode(text)) + "'"
