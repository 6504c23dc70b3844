"""One rank's engine: packs requests into batches, runs the model and the drafts, keeps what lives between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from optimized.attention import MLAAttention
from optimized.batch import Batch, SlotTable
from optimized.buffers import GraphPadding, InputBuffers
from optimized.dataflows import DATAFLOWS
from optimized.decoder import DecoderParts, MtpParts
from optimized.forward_context import (
    DPMetadata,
    ForwardContext,
    coordinate_batch_across_dp,
    override_forward_context,
    set_forward_context,
)
from optimized.linear import GreedySampler, ParallelLMHead
from optimized.lora import add_adapters, request_adapters
from optimized.setup import Setup

Chunk = tuple[int, int, Tensor]
Active = AbstractContextManager[ForwardContext]


@dataclass(frozen=True)
class TargetStep:
    """What draft step 0 needs of the last target step: its rows, their ids, the final hidden and the sampled tokens.

    Step 0 runs in the same forward context.
    """

    spans: list[tuple[int, int, int]]  # (request, start position, rows)
    ids: Tensor  # [real rows]
    hidden: Tensor  # [real rows, D]
    sampled: Tensor  # [requests]
    num_tokens: int  # rows, padding included
    context: ForwardContext


@dataclass(frozen=True)
class Drafted:
    """What the next draft step needs of one request."""

    hidden: Tensor  # [D], after shared_head.norm
    token: Tensor  # []
    position: int  # of the row to come


class Engine(nn.Module):
    """The target model, its head, and the MTP layers as drafters; all requests of a step in one forward."""

    def __init__(self, setup: Setup, scheme: str, padding: GraphPadding) -> None:
        super().__init__()
        self.scheme = scheme
        self.setup, self.padding = setup, padding
        self.inputs = InputBuffers(setup.loader.device)
        dataflow = DATAFLOWS[scheme]
        self.has_moe = any(setup.config.is_moe_layer(i) for i in range(setup.config.mtp_layers.stop))
        self.use_sequence_parallel = dataflow.use_sequence_parallel
        self.model = dataflow.build(setup)
        add_adapters(self.model, setup)
        self.lm_head = ParallelLMHead(setup.loader.at("lm_head"), setup.config.vocab_size, setup.tp)
        self.sampler = GreedySampler()
        self.no_ids = self.inputs.ids[:0]
        self.no_hidden = self.lm_head.weight.new_empty(0, setup.config.hidden_size)
        self.start(())

    def start(self, lengths: Sequence[int], adapters: Sequence[int | None] | None = None) -> None:
        """Forgets all requests; request ``i`` will hold at most ``lengths[i]`` positions, with adapter ``adapters[i]``.

        Raises:
            ValueError: an adapter that was not loaded, or not one entry per request; None and -1 stand for none.
        """
        chosen = request_adapters(adapters, len(lengths), self.setup.lora_adapters)
        self.inputs.clear()
        self.slots = SlotTable(lengths, self.setup.loader.device, chosen)
        self.setup.rotary.reserve(max([1, *lengths]))  # a row of padding has a position, too
        for attention in self._attentions():
            attention.allocate(self.slots.total)
        # The target's layers are written together; every MTP layer only by the draft steps it runs.
        self.held = [self.slots.empty() for _ in range(1 + self.setup.config.num_nextn_predict_layers)]
        self.target: TargetStep | None = None
        self.drafted: dict[int, Drafted] = {}

    @torch.no_grad()
    def step(self, chunks: Sequence[Chunk]) -> None:
        """One target forward over new tokens of some requests; of none, all its rows are padding."""
        spans = [(request, start, ids.shape[0]) for request, start, ids in chunks]
        ids = torch.cat([self.no_ids, *(ids.to(self.slots.device) for _, _, ids in chunks)])
        batch, active = self._prepare(spans, self.held[0], self.padding.of_target)
        with active as context:
            hidden, *_ = self.model(self._ids(ids, batch), batch.positions, batch.attention)
            sampled = self.sampler(self.lm_head(hidden)[batch.last_rows])
        self.target = TargetStep(spans, ids, hidden[: ids.shape[0]], sampled, batch.num_tokens, context)

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
        batch = self.slots.batch(target.spans, self.held[1], target.num_tokens, self.inputs)
        ids = target.ids.roll(-1).index_copy(0, batch.last_rows, target.sampled)
        self._draft(0, batch, override_forward_context(target.context), ids, target.hidden)

    def _draft_next(self, requests: Sequence[int], step: int) -> None:
        last = [self.drafted[request] for request in requests]
        spans = [(request, row.position, 1) for request, row in zip(requests, last, strict=True)]
        index = step % self.setup.config.num_nextn_predict_layers
        batch, active = self._prepare(spans, self.held[1 + index], self.padding.of_draft)
        ids = torch.cat([self.no_ids, *(row.token.view(1) for row in last)])
        hidden = torch.cat([self.no_hidden, *(row.hidden.unsqueeze(0) for row in last)])
        self._draft(index, batch, active, ids, hidden)

    def _draft(self, index: int, batch: Batch, active: Active, ids: Tensor, hidden: Tensor) -> None:
        """Runs MTP layer ``index`` on ids [r] and hidden [r,D] of the real rows; keeps what the next step needs."""
        layer = cast(MtpParts, self.model.layers[self.setup.config.num_hidden_layers + index])
        with active:
            hidden = layer(self._ids(ids, batch), batch.pad(hidden), batch.positions, batch.attention)
            tokens = layer.shared_head.sampler(layer.shared_head.head(hidden)[batch.last_rows])
        rows = zip(batch.attention.spans, hidden[batch.last_rows], tokens, strict=True)
        self.drafted |= {span.request: Drafted(row, token, span.end) for span, row, token in rows}

    def _ids(self, ids: Tensor, batch: Batch) -> Tensor:
        return self.inputs.place_ids(ids, batch.num_tokens)

    def _prepare(
        self, spans: Sequence[tuple[int, int, int]], held: Tensor, graph_of: Callable[[int], int | None]
    ) -> tuple[Batch, Active]:
        """A forward's batch, and its context to enter; ``graph_of``: how many rows the graph for so many rows runs."""
        rows = max(1, sum(count for _, _, count in spans))
        graph = graph_of(rows)
        n, agreed = self._agree(graph or rows, graph_padded=graph is not None)
        batch = self.slots.batch(spans, held, n, self.inputs)
        metadata = DPMetadata.make(
            n,
            self.setup.parallel,
            agreed,
            has_moe=self.has_moe,
            use_sequence_parallel=self.use_sequence_parallel,
        )
        return batch, set_forward_context(n, batch.is_padding, metadata, batch.adapter_rows)

    def _agree(self, rows: int, *, graph_padded: bool) -> tuple[int, Tensor | None]:
        """Rows to run, and those of all DP ranks [dp]; None where no rows are dispatched between them."""
        if self.setup.dp_cpu is None or not self.has_moe:
            return rows, None
        agreed = coordinate_batch_across_dp(rows, self.setup.dp_cpu, graph_padded=graph_padded)
        return int(agreed[self.setup.dp_cpu.rank]), agreed

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
