"""A case: everything that decides a run, as one frozen value whose id is the command that repeats it.

Each setting is declared here and nowhere else. Its option, help, JSON field, words in the id, and place in the key of
a built engine follow from the declaration (:mod:`spcheck.case.settings`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spcheck.case.choices import (
    ALL2ALL_BACKENDS,
    BACKENDS,
    GRID_NAMES,
    NUMERICS,
    PADDING_CONTENTS,
    SCALES,
    SCHEMES,
    WEIGHTS,
    Requests,
)
from spcheck.case.codecs import (
    COUNT,
    FLAG,
    GRAPH_SIZES,
    NUMBERS,
    OVERRIDES,
    REQUESTS,
    REQUESTS_AND_CACHED,
    SECONDS,
    TEXT,
    choice,
    override_text,
    requests_text,
)
from spcheck.case.settings import REQUIRED, Named, Through, Without, setting, settings_of
from spcheck.case.words import command_line


def _requests_words(case: Case) -> list[str]:
    single = case.dp == 1 and len(case.requests[0]) == 1 and not any(map(any, case.cached_tokens))
    return ["--dp", str(case.dp), "--tokens" if single else "--requests", case.requests_text]


def _override_words(case: Case) -> list[str]:
    return [word for override in case.overrides for word in ("--set", override_text(override))]


def _has_adapters(case: Case) -> bool:
    return bool(case.lora_rank or case.lora_adapters)


def _has_no_pad_to(case: Case) -> bool:
    return case.pad_to is None


def _is_exact(case: Case) -> bool:
    return case.numerics == "exact"


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

    The order of the fields is the order of the words in the id, apart from ``tp``, which comes first there.
    """

    # fmt: off
    requests: Requests = setting(
        REQUIRED, "--requests", "requests", REQUESTS_AND_CACHED,
        "N new and C cached tokens of each request (1@40 decodes one); slashes part DP ranks, - is an idle one.",
        metavar="N@C,N/N/-", spelled=_requests_words, engine=Through("data parallel size"))
    tp: int = setting(2, "--tp", "world", COUNT, "Tensor-parallel ranks.")
    cached: Requests | None = setting(
        None, None, "requests", REQUESTS, "Given with --requests.",
        engine=Without("an engine forgets all requests, and their caches, when a case starts"))
    previous: Requests | None = setting(
        None, "--previous", "requests", REQUESTS,
        "Requests of a step before, through the same buffers; it is compared as well.",
        metavar="N,N/N/-", brief=True, engine=Without("an engine takes any steps"))
    generate: int = setting(
        0, "--generate", "requests", COUNT,
        "Greedy steps after the case's own, each verifying what was drafted before; a request ends at the model's "
        "limit.", metavar="N", brief=True, engine=Without("an engine takes any number of steps"))
    prefill_chunk: int | None = setting(
        None, "--prefill-chunk", "requests", COUNT,
        "New tokens of a prompt that one step takes at most; generated steps take the rest.",
        metavar="N", brief=True, engine=Without("an engine takes chunks of any length"))
    pp: int = setting(1, "--pp", "world", COUNT, "Pipeline-parallel ranks (only 1 is run).", brief=True)
    expert_parallel: bool = setting(
        True, "--expert-parallel/--no-expert-parallel", "world", FLAG,
        "Whether whole experts are spread over all ranks; else each has channels of all.", handed=True)
    all2all_backend: str = setting(
        ALL2ALL_BACKENDS[0], "--all2all-backend", "world", choice(ALL2ALL_BACKENDS),
        "How rows reach the experts and come back.", handed=True)
    model: str = setting(
        "dsv32-tiny", "--model", "model", TEXT,
        "A preset, a config.json, or a checkpoint folder; without stored weights they are random.",
        engine=Through("model"))
    scale: str = setting(
        "full", "--scale", "model", choice(SCALES),
        "tiny: small sizes that the ranks divide in the place of the config's, for random weights.",
        brief=True, engine=Through("model"))
    overrides: tuple[tuple[str, Any], ...] = setting(
        (), "--set", "model", OVERRIDES,
        "Overrides a key of the model's config.json, after --scale; repeatable. A dot reaches a nested one: "
        "rope_scaling.factor=4. null is for absent.",
        metavar="KEY=VALUE", spelled=_override_words, engine=Through("model"))
    weights: str = setting(
        "plain", "--weights", "model", choice(WEIGHTS),
        "Kind of random weights. ties: twin experts, tokens and index heads; outliers: a few channels a hundred times "
        "larger.", brief=True)
    mtp_steps: int = setting(
        1, "--mtp-steps", "drafting", COUNT, "Tokens that every step drafts.", found="1; 0 without MTP layers",
        engine=Without("an engine runs the draft steps that it is called for"))
    aux_layers: tuple[int, ...] = setting(
        (), "--aux-layers", "drafting", NUMBERS,
        "Layers whose input is kept as an auxiliary hidden state (EAGLE-style drafters).",
        metavar="I,I,...", handed=True)
    lora_rank: int = setting(
        0, "--lora-rank", "model", COUNT, "Rank of the LoRA adapters.", written=_has_adapters)
    lora_adapters: int = setting(
        0, "--lora-adapters", "model", COUNT,
        "Random adapters; the requests of all data-parallel ranks use them in turn, and then none.",
        written=_has_adapters, handed=True)
    pad_to: int | None = setting(
        None, "--pad-to", "padding", COUNT, "Pads the step to this many rows, as a captured CUDA graph does.",
        brief=True, handed=True)
    graph_sizes: tuple[int, ...] = setting(
        (), "--graph-sizes", "padding", GRAPH_SIZES,
        "Captured sizes: every forward is padded to the next one. default: 1, 2, 4, then every 8 to 256, every 16 to "
        "512.", metavar="N,N,...", written=_has_no_pad_to, handed=True)
    skip_padding: bool = setting(
        True, "--skip-padding/--no-skip-padding", "padding", FLAG, "Whether padded rows are left unrouted.",
        found="VLLM_MOE_SKIP_PADDING, else skip-padding", handed=True)
    padding_content: str = setting(
        "zero", "--padding-content", "padding", choice(PADDING_CONTENTS),
        "What padded rows hold. stale: the rows of the step before (--previous, or one that fills the batch).",
        engine=Without("a hook writes it, which is told anew when a case starts"))
    numerics: str = setting(
        "exact", "--numerics", "numerics", choice(NUMERICS),
        "exact: float64 on a grid, where every sum is exact; else a plain type.", engine=Through("arithmetic"))
    grid: str = setting(
        "auto", "--grid", "numerics", choice(GRID_NAMES), "Grid of exact numerics; B is coarser and leaves more room.",
        written=_is_exact, engine=Through("arithmetic"))
    reference: str = setting(
        "reference", "--reference", "running", TEXT, "What is compared with: reference, or optimized:tp and the like.",
        metavar="SUBJECT[:SCHEME]", engine=Through("side"))
    candidate: str = setting(
        "optimized", "--candidate", "running", TEXT, "What is compared.",
        metavar="SUBJECT[:SCHEME]", engine=Through("side"))
    reference_world: int | None = setting(
        None, "--reference-world", "world", COUNT,
        "Ranks of a data-parallel rank's reference: 1, or the candidate's --tp (the default).",
        metavar="N", brief=True, engine=Through("side"))
    scheme: str = setting(
        "auto", "--scheme", "world", choice(SCHEMES), "Candidate's dataflow.", engine=Through("side"))
    require_scheme: str | None = setting(
        None, "--require-scheme", "running", choice(SCHEMES[1:]), "Exit 3 unless this scheme ran.",
        brief=True, engine=Without("it is asked of the result"))
    seed: int = setting(0, "--seed", "running", COUNT, "Random weights, tokens, padding.")
    backend: str = setting(
        "auto", "--backend", "running", choice(BACKENDS), "What joins the ranks.",
        engine=Without("an engine is connected to the groups of each case anew"))
    timeout: float = setting(
        60.0, "--timeout", "running", SECONDS,
        "Seconds that one step may take: a run in which no rank begins another one counts as hung.",
        engine=Without("it is how long the parent waits"))
    # fmt: on

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
        words = ["spcheck", "diff"]
        for named in in_order(type(self)):
            words += named.words_of(self)
        return command_line(words)

    def to_json(self) -> dict[str, Any]:
        """The case as plain data, for another process."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Case:
        """The case that :meth:`to_json` wrote.

        Raises:
            KeyError: there is no such setting.
        """
        codecs = {named.name: named.setting.codec for named in settings_of(cls)}
        return cls(**{name: codecs[name].from_json(value) for name, value in data.items()})


def in_order(kind: type[Case] = Case) -> list[Named]:
    """The settings in the order of a command line: the ranks come first."""
    requests, tp, *others = settings_of(kind)
    return [tp, requests, *others]
