"""The model with the state of its requests: target steps, draft steps, caches. One request at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from reference.cache import LayerCache
from reference.config import ModelConfig
from reference.layers import GreedySampler
from reference.lora import ActiveAdapter
from reference.model import Decoder, MtpLayer
from reference.parallel import Communicator, VocabularyParallelHead

Chunk = tuple[int, int, Tensor]
"""(request, start position, token ids [T] int64)."""


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
        """One target forward per chunk of new tokens. A chunk behind the first one of its request uses the caches."""
        for request, start, ids_T in chunks:
            self._target(self.requests[request], start, ids_T.to(self.lm_head.weight.device))

    def draft(self, requests: Sequence[int], step: int) -> None:
        """One MTP forward per request. Step 0 follows a target step; step j uses MTP layer j modulo their number.

        Raises:
            ValueError: the model has no MTP layer, or no target step came before.
        """
        if not self.config.mtp_layers:
            raise ValueError("a model without MTP layers cannot draft")
        layer = self.config.mtp_layers[step % len(self.config.mtp_layers)]
        for request in requests:
            self._draft(self.requests[request], layer)

    def state(self) -> dict[str, dict[int, Tensor]]:
        """The caches: name -> request -> [positions held, width]."""
        caches: dict[str, dict[int, Tensor]] = {}
        for number, request in enumerate(self.requests):
            for layer, cache in enumerate(request.caches):
                for name, table in cache.tables.items():
                    caches.setdefault(f"model.layers.{layer}.self_attn.cache.{name}", {})[number] = table
        return caches

    def _target(self, request: Request, start: int, ids_T: Tensor) -> None:
        positions_T = torch.arange(start, start + len(ids_T), device=ids_T.device)
        self.active_adapter.number = request.adapter
        h_TD = self.model(ids_T, positions_T, request.caches)[0]
        token_1 = self.sampler(self.lm_head(h_TD)[-1:])
        request.next_draft = DraftInput(h_TD, torch.cat((ids_T[1:], token_1)), positions_T)

    def _draft(self, request: Request, layer: int) -> None:
        rows = request.next_draft
        if rows is None:
            raise ValueError("a draft step needs a target step before it")
        mtp = self.model.layers[layer]
        assert isinstance(mtp, MtpLayer)
        g_TD = mtp(rows.ids, rows.hidden, rows.positions, request.caches[layer])
        token_1 = mtp.shared_head(g_TD)
        request.next_draft = DraftInput(g_TD[-1:], token_1, rows.positions[-1:] + 1)
