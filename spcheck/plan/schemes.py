"""Who runs on each side of the pair, in which dataflow, and which condition decided that. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from spcheck.case import SCHEMES, Case
from spcheck.errors import UsageError

PLAIN = "reference"
"""The dataflow of a subject that has only one: tensor parallel, request by request, no padding."""

SP_SCHEMES = ("moe-sp", "full-sp")


@dataclass(frozen=True)
class SidePlan:
    """One side: subject ``subject`` in dataflow ``scheme``, on ``tp`` ranks of each data-parallel rank.

    ``role`` is ``"reference"`` or ``"candidate"``. ``asked`` is what it is told to run: of ``auto`` it must make
    ``scheme`` by itself.
    """

    role: str
    subject: str
    scheme: str
    reason: str
    tp: int
    asked: str = "auto"

    @property
    def module(self) -> str:
        """The dotted name of the subject's module."""
        return f"{self.subject}.subject"

    @property
    def is_reference(self) -> bool:
        """Whether its values are the expected ones."""
        return self.role == "reference"

    @property
    def plain(self) -> bool:
        """Whether it runs request by request on real tokens, without expert parallelism and padding."""
        return self.scheme == PLAIN

    @property
    def sharded(self) -> bool:
        """Whether experts see shards: rows are dispatched over the expert-parallel group."""
        return self.scheme in SP_SCHEMES

    @property
    def name(self) -> str:
        """As an option says it: ``optimized:full-sp``."""
        return self.subject if self.plain else f"{self.subject}:{self.scheme}"


def resolve_sides(case: Case) -> tuple[SidePlan, SidePlan]:
    """Reference and candidate.

    Raises:
        UsageError: no such subject or scheme, a scheme that cannot be, or a pair of one and the same.
    """
    candidate = _side(case, "candidate", case.candidate, case.scheme, case.tp)
    reference = _side(case, "reference", case.reference, "auto", case.reference_world or case.tp)
    if (reference.name, reference.tp) == (candidate.name, candidate.tp):
        raise UsageError(f"reference and candidate are both {candidate.name}: a pair needs two")
    if not reference.plain and reference.tp != case.tp:
        raise UsageError(f"--reference-world {reference.tp} is for --reference reference, not {reference.name}")
    if case.require_scheme and case.scheme not in ("auto", case.require_scheme):
        raise UsageError(f"--scheme {case.scheme} contradicts --require-scheme {case.require_scheme}")
    if case.pp > 1:
        raise UsageError(f"--pp {case.pp} is not supported yet")
    return reference, candidate


def _side(case: Case, role: str, name: str, scheme: str, tp: int) -> SidePlan:
    subject, colon, own = name.partition(":")
    option = f"--{role}"
    if subject == "reference" and not colon:
        if scheme != "auto":
            raise UsageError(f"--scheme {scheme} is for a candidate that has schemes, and {name} has none")
        return SidePlan(role, subject, PLAIN, "the only dataflow of the reference", tp, asked=PLAIN)
    if subject != "optimized" or (colon and own not in SCHEMES):
        known = ", ".join(["reference", "optimized", *(f"optimized:{s}" for s in SCHEMES[1:])])
        raise UsageError(f"{option} {name} is not one of {known}")
    if colon and scheme not in ("auto", own):
        raise UsageError(f"--scheme {scheme} contradicts {option} {name}")
    asked = own if colon else scheme
    asked_by = f"{option} {name}" if colon else f"--scheme {scheme}"
    return SidePlan(role, subject, *resolve_scheme(case, asked, asked_by), tp, asked)


def resolve_scheme(case: Case, asked: str, asked_by: str) -> tuple[str, str]:
    """The dataflow that must be active, and the condition that decides it.

    Sequence parallelism needs expert parallelism, tp > 1 and a backend that can dispatch shards (all of them can), but
    not data parallelism.

    Raises:
        UsageError: a sequence-parallel scheme is asked for where it is excluded.
    """
    excluded = _why_no_sp(case)
    if asked in SP_SCHEMES and excluded:
        raise UsageError(f"{asked_by} cannot be: {excluded}")
    if asked == "tp" or excluded:
        reason = f"asked for with {asked_by}" if asked == "tp" else str(excluded)
        return "tp", reason + (f"; rows dispatched over dp {case.dp}, backend {case.all2all_backend}" * (case.dp > 1))
    condition = f"expert parallel on, tp {case.tp} > 1, backend {case.all2all_backend}"
    return ("full-sp", condition) if asked == "auto" else (asked, f"{condition}; asked for with {asked_by}")


def _why_no_sp(case: Case) -> str | None:
    if case.pp > 1:
        return f"a pipeline stage would receive shards (--pp {case.pp})"
    if case.lora_adapters:
        return "LoRA adapters present (an adapter is chosen per row of the full batch)"
    if not case.expert_parallel:
        return "expert parallel off"
    return None if case.tp > 1 else "tp is 1, and sequence parallelism needs tp > 1"
