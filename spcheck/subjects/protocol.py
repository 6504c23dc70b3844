"""What spcheck can run: the subject protocol as types. docs/subjects.md is the same in words."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

if TYPE_CHECKING:
    from torch import Tensor, nn

    from reference.config import ModelConfig
    from spcheck.subjects.setup import Setup


STEERING = ("token", "accepted")
"""Kinds of probes that say which tokens come next: tokens, and how many drafts are accepted."""

CHOICES = ("set", *STEERING)
"""Kinds of probes that hold what was chosen, as whole numbers: keys, groups, experts too."""

SHORT_CONTEXT = (".indexer.q_rope.out", ".indexer.head_weights.out", ".indexer.choose.in")
"""Ends of the names of probes that need not fire where no row has more keys than ``index_topk``: all are chosen."""

REJECTION_SAMPLER = "rejection_sampler.out"
"""The probe that counts accepted drafts; it fires in steps that verify."""

FOR_TOKENS = (".self_attn.softmax.in", ".self_attn.softmax.out")
"""Ends of the names of probes that fire for tokens only: on an idle data-parallel rank they do not."""


@dataclass(frozen=True)
class Tap:
    """Where a probe's value stands in a subject: element ``index`` of a module's output or positional arguments."""

    module: str
    side: str
    index: int
    placement: str
    kind: str

    @property
    def unit(self) -> str:
        """What there is one entry for: every token ``row``, every row that is a ``sample``, or every ``request``."""
        return {"token": "sample", "logits": "sample", "accepted": "request"}.get(self.kind, "row")

    @property
    def per_row(self) -> bool:
        """Whether there is one entry per token row."""
        return self.unit == "row"

    @property
    def steers(self) -> bool:
        """Whether it decides which rows come next: a token, or how many drafts are accepted."""
        return self.kind in STEERING

    @property
    def per_key(self) -> bool:
        """Whether the value is [rows, heads, keys]."""
        return self.kind.partition(":")[0] in ("keys", "all-keys")

    @property
    def routed(self) -> bool:
        """Whether the value has one row per (token row, chosen expert), sorted by expert and then by token row."""
        return self.kind.startswith("routed:")

    @property
    def choice(self) -> bool:
        """Whether it holds chosen ids: keys, groups, experts or tokens, or counts of drafts."""
        return self.kind in CHOICES

    @property
    def compared(self) -> bool:
        """Whether it is a value of token rows or requests: counts of work and orders of rows are not."""
        return self.kind not in ("work", "order")

    @property
    def fill(self) -> float:
        """What stands where a row has nothing: no id, no score, no probability."""
        if self.kind == "set":
            return -1
        scores = self.kind in ("scores", "logits") or (self.per_key and self.side == "in")
        return -math.inf if scores else 0.0

    @property
    def family(self) -> str:
        """The kind without the order in which this subject holds values per key."""
        return self.kind.replace("all-keys:", "keys:")

    @property
    def ids(self) -> str | None:
        """The probe whose chosen ids say what the last axis stands for."""
        _, colon, probe = self.kind.partition(":")
        return probe if colon else None


class Chunk(NamedTuple):
    """New tokens of one request in a target step: ``ids`` [n] int64 at positions ``start``, start + 1, ...

    The last ``drafts`` ids were drafted and are to be verified; None where the step verifies nothing. ``following`` is
    the token behind the chunk where it is known, since a prompt goes on; None: the model's own greedy token.
    """

    request: int
    start: int
    ids: Tensor
    drafts: int | None = None
    following: int | None = None


class Engine(Protocol):
    """One built model with its request state; also an ``nn.Module`` whose names are the checkpoint's."""

    scheme: str

    def start(self, lengths: Sequence[int], adapters: Sequence[int] | None = None) -> None:
        """Forgets all requests; ``i`` will hold at most ``lengths[i]`` positions and use LoRA adapter ``adapters[i]``.

        -1 and None are no adapter.
        """

    def step(self, chunks: Sequence[Chunk]) -> None:
        """One target forward over new tokens of some requests; of none, a dummy batch, on an idle DP rank.

        Caches of these requests, of MTP layers as well, forget first what stands at a chunk's start and behind.
        """

    def draft(self, requests: Sequence[int], step: int) -> None:
        """One MTP forward: step 0 over the rows of the last target step without rejected drafts, later one row each.

        ``requests`` are in step 0 those of the target step, later those that still draft: of none, a dummy batch.
        """

    def state(self) -> Mapping[str, Mapping[int, Tensor]]:
        """The caches: name -> request -> [positions held, width]."""

    def named_modules(self) -> object:
        """As of ``nn.Module``."""


class Subject(Protocol):
    """A module that builds an implementation and says where its probe points stand."""

    BATCHING: str

    def build(self, setup: Setup) -> nn.Module:
        """The engine, its weights loaded (:class:`Engine` is the rest of its type)."""

    def taps(
        self, config: ModelConfig, *, scheme: str, aux_layers: tuple[int, ...], expert_parallel: bool
    ) -> Mapping[str, tuple[str, str, int, str, str]]:
        """Probe name -> where to take it, the fields of :class:`Tap`."""

    def padding_inputs(self, config: ModelConfig) -> Sequence[tuple[str, str, int]]:
        """(module, side, index) of every place where graph-padding rows enter."""


def taps_of(
    subject: Subject, config: ModelConfig, *, scheme: str, aux_layers: tuple[int, ...], expert_parallel: bool
) -> dict[str, Tap]:
    """A subject's taps with their fields named."""
    taps = subject.taps(config, scheme=scheme, aux_layers=aux_layers, expert_parallel=expert_parallel)
    return {probe: Tap(*tap) for probe, tap in taps.items()}


def load_subject(name: str) -> Subject:
    """Imports a subject by its dotted name."""
    return cast(Subject, importlib.import_module(name))
