"""The model with the state of its requests: target steps, draft steps, caches. One request at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from reference.cache import LayerCache
from reference.config import ModelConfig
from reference.layers import GreedySampler, RejectionSampler
from reference.lora import ActiveAdapter
from reference.model import Decoder, MtpLayer
from reference.parallel import Communicator, VocabularyParallelHead


class Chunk(NamedTuple):
    """New tokens ``ids`` [T] int64 of one request, at the positions from ``start`` on.

    ``drafts`` is how many of the last ones were drafted and are to be verified, maybe 0; None in an ordinary chunk.
    ``following`` is the token behind the chunk where it is known; None where the target's own is to be drafted from.
    """

    request: int
    start: int
    ids: Tensor
    drafts: int | None = None
    following: int | None = None


@dataclass
class DraftInput:
    """The rows of a request's next draft step: hidden [T, D], the id of the token after each, positions [T]."""

    hidden: Tensor
    ids: Tensor
    positions: Tensor


@dataclass
class Request:
    """What is kept of one request between two calls: a cache per layer, its adapter, and what drafting goes on from."""

    caches: list[LayerCache]
    adapter: int | None = None
    next_draft: DraftInput | None = None


class Engine(nn.Module):
    """The whole model. Its module names are the published checkpoint's."""

    scheme = "reference"

    def __init__(
        self, config: ModelConfig, tp: Communicator, aux_layers: Sequence[int], lora_adapters: int = 0
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, tp, aux_layers)
        self.lm_head = VocabularyParallelHead(config.vocab_size, config.hidden_size, tp)
        self.sampler = GreedySampler()
        self.rejection_sampler = RejectionSampler()
        self.active_adapter = ActiveAdapter(lora_adapters)
        self.requests: list[Request] = []

    def start(self, lengths: Sequence[int], adapters: Sequence[int | None] | None = None) -> None:
        """Forgets all requests and makes room for ``len(lengths)`` new ones; caches grow, so no length is reserved.

        ``adapters[i]`` is the LoRA adapter of request i, None or -1 for none.

        Raises:
            ValueError: there is no such adapter, or not one entry per request.
        """
        wanted = [None] * len(lengths) if adapters is None else adapters
        chosen = [self.active_adapter.checked(number) for number in wanted]
        self.requests = [
            Request([LayerCache() for _ in self.model.layers], adapter)
            for _, adapter in zip(lengths, chosen, strict=True)
        ]

    def step(self, chunks: Sequence[Chunk]) -> None:
        """One target forward per chunk of new tokens. A chunk behind the first one of its request uses the caches.

        First all layers forget what stands at the chunk's positions and behind: rejected drafts, rows of draft steps.
        Plain tuples of the fields of :class:`Chunk` will do.

        Raises:
            ValueError: more drafts than rows that can be verified: the first row of a chunk is no draft.
        """
        for chunk in chunks:
            self._target(Chunk(*chunk))

    def draft(self, requests: Sequence[int], step: int) -> None:
        """One MTP forward per request. Step 0 follows a target step; step j uses MTP layer j modulo their number.

        Step 0 has the rows of the request's chunk without its rejected drafts, each later one a row per request.
        ``requests`` may be some of those of the step before.

        Raises:
            ValueError: the model has no MTP layer, or no target step came before.
        """
        if not self.config.mtp_layers:
            raise ValueError("a model without MTP layers cannot draft")
        layer = self.config.mtp_layers[step % len(self.config.mtp_layers)]
        for request in requests:
            self._draft(self.requests[request], layer)

    def state(self) -> dict[str, dict[int, Tensor]]:
        """The caches that hold rows: name -> request -> [positions held, width], in the order of the positions."""
        caches: dict[str, dict[int, Tensor]] = {}
        for number, request in enumerate(self.requests):
            for layer, cache in enumerate(request.caches):
                for name, rows in cache.held().items():
                    caches.setdefault(f"model.layers.{layer}.self_attn.cache.{name}", {})[number] = rows
        return caches

    def _target(self, chunk: Chunk) -> None:
        drafts = _drafts(chunk)
        request = self.requests[chunk.request]
        for cache in request.caches:
            cache.forget(chunk.start)
        ids_T = chunk.ids.to(self.lm_head.weight.device)
        positions_T = torch.arange(chunk.start, chunk.start + len(ids_T), device=ids_T.device)
        self.active_adapter.number = request.adapter
        h_TD = self.model(ids_T, positions_T, request.caches)[0]
        sampled_R = self.sampler(self.lm_head(h_TD)[-(drafts + 1) :])

        accepted = 0
        if chunk.drafts is not None:
            accepted = int(self.rejection_sampler(ids_T[len(ids_T) - drafts :], sampled_R))
        kept = len(ids_T) - drafts + accepted
        behind_1 = sampled_R[accepted : accepted + 1]
        if chunk.following is not None:
            behind_1 = torch.full_like(behind_1, chunk.following)
        request.next_draft = DraftInput(h_TD[:kept], torch.cat((ids_T[1:kept], behind_1)), positions_T[:kept])

    def _draft(self, request: Request, layer: int) -> None:
        rows = request.next_draft
        if rows is None:
            raise ValueError("a draft step needs a target step before it")
        mtp = self.model.layers[layer]
        assert isinstance(mtp, MtpLayer)
        g_TD = mtp(rows.ids, rows.hidden, rows.positions, request.caches[layer])
        token_1 = mtp.shared_head(g_TD)
        request.next_draft = DraftInput(g_TD[-1:], token_1, rows.positions[-1:] + 1)


def _drafts(chunk: Chunk) -> int:
    """How many of the chunk's last tokens were drafted."""
    drafts = chunk.drafts or 0
    if not 0 <= drafts < len(chunk.ids):
        raise ValueError(
            f"request {chunk.request}: {drafts} drafts in a chunk of {len(chunk.ids)} rows; "
            "a draft is verified at the row before it, so a chunk has more rows than drafts"
        )
    return drafts
