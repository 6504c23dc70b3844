"""One rank's engine: packs requests into batches, runs the model and the drafts, keeps what lives between them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from optimized.attention import MLAAttention
from optimized.batch import Batch, SlotTable
from optimized.dataflows import DATAFLOWS
from optimized.decoder import DecoderParts, MtpParts
from optimized.forward_context import DPMetadata, ForwardContext, set_forward_context
from optimized.linear import GreedySampler, ParallelLMHead
from optimized.lora import add_adapters, request_adapters
from optimized.setup import Setup

Chunk = tuple[int, int, Tensor]


@dataclass(frozen=True)
class TargetStep:
    """What draft step 0 needs of the last target step: its rows, their ids, the final hidden and the sampled tokens."""

    spans: list[tuple[int, int, int]]  # (request, start position, rows)
    ids: Tensor  # [real rows]
    hidden: Tensor  # [n,D]
    sampled: Tensor  # [requests]


@dataclass(frozen=True)
class Drafted:
    """What the next draft step needs of one request."""

    hidden: Tensor  # [D], after shared_head.norm
    token: Tensor  # []
    position: int  # of the row to come


class Engine(nn.Module):
    """The target model, its head, and the MTP layers as drafters; all requests of a step in one forward."""

    def __init__(self, setup: Setup, scheme: str, pad_to: int | None) -> None:
        super().__init__()
        self.scheme = scheme
        self.setup, self.pad_to = setup, pad_to
        dataflow = DATAFLOWS[scheme]
        self.has_moe = any(setup.config.is_moe_layer(i) for i in range(setup.config.mtp_layers.stop))
        self.use_sequence_parallel = dataflow.use_sequence_parallel
        self.model = dataflow.build(setup)
        add_adapters(self.model, setup)
        self.lm_head = ParallelLMHead(setup.loader.at("lm_head"), setup.config.vocab_size, setup.tp)
        self.sampler = GreedySampler()
        self.start(())

    def start(self, lengths: Sequence[int], adapters: Sequence[int | None] | None = None) -> None:
        """Forgets all requests; request ``i`` will hold at most ``lengths[i]`` positions, with adapter ``adapters[i]``.

        Raises:
            ValueError: an adapter that was not loaded, or not one entry per request; None and -1 stand for none.
        """
        chosen = request_adapters(adapters, len(lengths), self.setup.lora_adapters)
        self.slots = SlotTable(lengths, self.setup.loader.device, chosen)
        self.setup.rotary.reserve(max(lengths, default=0))
        for attention in self._attentions():
            attention.allocate(self.slots.total)
        # The target's layers are written together; every MTP layer only by the draft steps it runs.
        self.held = [self.slots.empty() for _ in range(1 + self.setup.config.num_nextn_predict_layers)]
        self.target: TargetStep | None = None
        self.drafted: dict[int, Drafted] = {}

    @torch.no_grad()
    def step(self, chunks: Sequence[Chunk]) -> None:
        """One target forward over new tokens of some requests."""
        spans = [(request, start, ids.shape[0]) for request, start, ids in chunks]
        batch = self.slots.batch(spans, self.held[0], self.pad_to)
        ids = torch.cat([ids for _, _, ids in chunks]).to(self.slots.device)
        with self._context(batch):
            hidden, *_ = self.model(batch.pad(ids), batch.positions, batch.attention)
            sampled = self.sampler(self.lm_head(hidden)[batch.last_rows])
        self.target = TargetStep(spans, ids, hidden, sampled)

    @torch.no_grad()
    def draft(self, requests: Sequence[int], step: int) -> None:
        """One MTP forward: all rows of the last target step (step 0), else one row per request."""
        if step == 0:
            self._draft_first(requests)
        else:
            self._draft_next(requests, step)

    def _draft_first(self, requests: Sequence[int]) -> None:
        assert self.target is not None, "a draft follows a target step"
        target = self.target
        assert list(requests) == [request for request, _, _ in target.spans], "step 0 drafts for the whole step"
        batch = self.slots.batch(target.spans, self.held[1], self.pad_to)
        ids = target.ids.roll(-1).index_copy(0, batch.last_rows, target.sampled)
        self._draft(0, batch, ids, target.hidden)

    def _draft_next(self, requests: Sequence[int], step: int) -> None:
        last = [self.drafted[request] for request in requests]
        spans = [(request, row.position, 1) for request, row in zip(requests, last, strict=True)]
        index = step % self.setup.config.num_nextn_predict_layers
        batch = self.slots.batch(spans, self.held[1 + index])
        self._draft(index, batch, torch.stack([r.token for r in last]), torch.stack([r.hidden for r in last]))

    def _draft(self, index: int, batch: Batch, ids: Tensor, hidden: Tensor) -> None:
        """Runs MTP layer ``index`` on ids [real rows] and hidden [n,D]; keeps what the next step needs."""
        layer = cast(MtpParts, self.model.layers[self.setup.config.num_hidden_layers + index])
        with self._context(batch):
            hidden = layer(batch.pad(ids), hidden, batch.positions, batch.attention)
            tokens = layer.shared_head.sampler(layer.shared_head.head(hidden)[batch.last_rows])
        rows = zip(batch.attention.spans, hidden[batch.last_rows], tokens, strict=True)
        self.drafted |= {span.request: Drafted(row, token, span.end) for span, row, token in rows}

    def _context(self, batch: Batch) -> AbstractContextManager[ForwardContext]:
        metadata = DPMetadata.make(
            batch.num_tokens,
            self.setup.parallel,
            has_moe=self.has_moe,
            use_sequence_parallel=self.use_sequence_parallel,
        )
        return set_forward_context(batch.num_tokens, batch.is_padding, metadata, batch.adapter_rows)

    def state(self) -> dict[str, dict[int, Tensor]]:
        """Cache name -> request -> [positions held, width]."""
        requests = [self.slots.request_slots(r) for r in range(len(self.slots.lengths))]
        out: dict[str, dict[int, Tensor]] = {}
        for index, attention in enumerate(self._attentions()):
            held = self.held[max(0, index - self.setup.config.num_hidden_layers + 1)]
            for name, cache in attention.caches().items():
                rows = {r: cache[slots][held[slots]] for r, slots in enumerate(requests)}
                out[f"model.layers.{index}.self_attn.cache.{name}"] = rows
        return out

    def _attentions(self) -> list[MLAAttention]:
        return [cast(DecoderParts, layer).self_attn for layer in self.model.layers]
