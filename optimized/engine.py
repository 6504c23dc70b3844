"""One rank's engine: packs requests into batches, runs the model and the drafts, keeps what lives between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import cast

import torch
from torch import Tensor, nn

from optimized.attention import MLAAttention
from optimized.batch import Batch, Chunk, NewRows, SlotTable
from optimized.buffers import GraphPadding, InputBuffers
from optimized.dataflows import DATAFLOWS
from optimized.decoder import DecoderParts, MtpParts
from optimized.drafting import Drafted, TargetStep
from optimized.forward_context import (
    DPAgreement,
    DPMetadata,
    ForwardContext,
    coordinate_batch_across_dp,
    override_forward_context,
    set_forward_context,
)
from optimized.linear import GreedySampler, ParallelLMHead
from optimized.lora import add_adapters, request_adapters
from optimized.rejection_sampler import RejectionSampler
from optimized.setup import Setup

Active = AbstractContextManager[ForwardContext]


class Engine(nn.Module):
    """The target model, its head, and the MTP layers as drafters; all requests of a step in one forward."""

    def __init__(self, setup: Setup, scheme: str, padding: GraphPadding) -> None:
        super().__init__()
        self.scheme = scheme
        self.setup, self.padding = setup, padding
        config, loader = setup.config, setup.loader
        self.inputs = InputBuffers(config.hidden_size, loader.dtype, loader.device)
        dataflow = DATAFLOWS[scheme]
        self.has_moe = any(config.is_moe_layer(i) for i in range(config.mtp_layers.stop))
        self.use_sequence_parallel = dataflow.use_sequence_parallel
        self.model = dataflow.build(setup)
        add_adapters(self.model, setup)
        self.lm_head = ParallelLMHead(loader.at("lm_head"), config.vocab_size, setup.tp)
        self.sampler = GreedySampler()
        self.rejection_sampler = RejectionSampler()
        self.no_ids = self.inputs.ids[:0]
        self.start(())

    def start(self, lengths: Sequence[int], adapters: Sequence[int | None] | None = None) -> None:
        """Forgets all requests; request ``i`` will hold at most ``lengths[i]`` positions, with adapter ``adapters[i]``.

        Raises:
            ValueError: an adapter that was not loaded, or not one entry per request; None and -1 stand for none.
        """
        chosen = request_adapters(adapters, len(lengths), self.setup.lora_adapters)
        mtp_layers = self.setup.config.num_nextn_predict_layers
        self.inputs.clear()
        self.slots = SlotTable(lengths, self.setup.loader.device, chosen, mtp_layers=mtp_layers)
        self.setup.rotary.reserve(max([1, *lengths]))  # a row of padding has a position, too
        for attention in self._attentions():
            attention.allocate(self.slots.total)
        self.target: TargetStep | None = None
        self.drafted: Drafted | None = None

    @torch.no_grad()
    def step(self, chunks: Sequence[Chunk]) -> None:
        """One target forward over new tokens of some requests; of none, all its rows are padding.

        Before it every cache forgets what it holds of these requests at the new positions and behind.

        Raises:
            ValueError: a chunk has no row before its drafts, or more positions than its request has slots.
        """
        chunks = [Chunk(*chunk).checked() for chunk in chunks]
        for chunk in chunks:
            self.slots.forget(chunk.request, chunk.start)
        rows = [NewRows(c.request, c.start, c.ids.shape[0], sampled=c.num_drafts + 1) for c in chunks]
        ids = torch.cat([self.no_ids, *(c.ids.to(self.slots.device) for c in chunks)])
        verifies = any(c.drafts is not None for c in chunks)
        batch, active = self._prepare(rows, self.slots.held[0], self.padding.of_target, verifies_drafts=verifies)
        with active as context:
            hidden, *_ = self.model(self._ids(ids, batch), batch.positions, batch.attention)
            sampled = self.sampler(self.lm_head(hidden)[batch.logits_indices])
        drafted = ids.roll(-1)[batch.logits_indices]
        accepted = self._accepted(chunks, sampled, drafted) if verifies else [0] * len(chunks)
        self.target = TargetStep(chunks, ids, hidden, sampled, accepted, batch.num_tokens, context)
        self.drafted = None

    def _accepted(self, chunks: Sequence[Chunk], sampled: Tensor, drafted: Tensor) -> list[int]:
        """Sampled [S] and the tokens that stand behind these rows [S] -> how many drafts of each chunk hold."""
        drafts = torch.tensor([c.num_drafts for c in chunks], device=sampled.device)
        accepted: list[int] = self.rejection_sampler(sampled, drafted, drafts).tolist()
        return accepted

    @torch.no_grad()
    def draft(self, requests: Sequence[int], step: int) -> None:
        """One MTP forward: all rows of the last target step that hold (step 0), else one row per request.

        Raises:
            ValueError: the model has no MTP layer; no target step came before; in step 0, these are not all of its
                requests; in a later one, the step before did not draft for one of them.
        """
        if not self.setup.config.num_nextn_predict_layers:
            raise ValueError("a model without MTP layers cannot draft")
        if step == 0:
            self._draft_first(requests)
        else:
            self._draft_next(requests, step)

    def _draft_first(self, requests: Sequence[int]) -> None:
        if self.target is None:
            raise ValueError("a draft step needs a target step before it")
        target = self.target
        target.check(requests)
        if target.context.verifies_drafts:
            batch, active = self._prepare(target.kept, self.slots.held[1], self.padding.of_target)
        else:
            batch = self.slots.batch(target.kept, self.slots.held[1], target.num_tokens, self.inputs)
            active = override_forward_context(target.context)
        kept = target.kept_rows
        ids = target.ids.roll(-1)[kept].index_copy(0, batch.logits_indices, target.following)
        self._draft(0, batch, active, ids, target.hidden[kept])

    def _draft_next(self, requests: Sequence[int], step: int) -> None:
        if self.drafted is None or self.drafted.step != step - 1:
            raise ValueError(f"draft step {step} needs draft step {step - 1} before it")
        last = self.drafted.of(requests)
        rows = [NewRows(request, position, 1) for request, position in zip(requests, last.positions, strict=True)]
        batch, active = self._prepare(rows, self.slots.held[1 + self._mtp_index(step)], self.padding.of_draft)
        self._draft(step, batch, active, last.tokens, last.hidden)

    def _draft(self, step: int, batch: Batch, active: Active, ids: Tensor, hidden: Tensor) -> None:
        """Runs draft step ``step`` on ids [r] and hidden [r,D] of the real rows; keeps what the next one needs."""
        layer = cast(MtpParts, self.model.layers[self.setup.config.num_hidden_layers + self._mtp_index(step)])
        with active:
            hidden = self.inputs.place_hidden(hidden, batch.num_tokens)
            hidden = layer(self._ids(ids, batch), hidden, batch.positions, batch.attention)
            tokens = layer.shared_head.sampler(layer.shared_head.head(hidden)[batch.logits_indices])
        spans = batch.attention.spans
        requests, positions = [span.request for span in spans], [span.end for span in spans]
        self.drafted = Drafted(step, requests, hidden[batch.logits_indices], tokens, positions)

    def _mtp_index(self, step: int) -> int:
        return step % self.setup.config.num_nextn_predict_layers

    def _ids(self, ids: Tensor, batch: Batch) -> Tensor:
        return self.inputs.place_ids(ids, batch.num_tokens)

    def _prepare(
        self,
        rows: Sequence[NewRows],
        held: Tensor,
        graph_of: Callable[[int], int | None],
        *,
        verifies_drafts: bool = False,
    ) -> tuple[Batch, Active]:
        """A forward's batch, and its context to enter; ``graph_of``: how many rows the graph for so many rows runs."""
        count = max(1, sum(new.count for new in rows))
        graph = graph_of(count)
        n, agreed = self._agree(graph or count, graph_padded=graph is not None, verifies_drafts=verifies_drafts)
        batch = self.slots.batch(rows, held, n, self.inputs)
        metadata = DPMetadata.make(
            n,
            self.setup.parallel,
            agreed.num_tokens_across_dp,
            has_moe=self.has_moe,
            use_sequence_parallel=self.use_sequence_parallel,
        )
        return batch, set_forward_context(
            n, batch.is_padding, metadata, batch.adapter_rows, verifies_drafts=agreed.verifies_drafts
        )

    def _agree(self, rows: int, *, graph_padded: bool, verifies_drafts: bool) -> tuple[int, DPAgreement]:
        """Rows to run, and what all DP ranks agreed on; this one alone where no rows go from one to another."""
        dp_cpu = self.setup.dp_cpu
        if dp_cpu is None or not self.has_moe:
            return rows, DPAgreement(torch.tensor([rows]), verifies_drafts)
        agreed = coordinate_batch_across_dp(rows, dp_cpu, graph_padded=graph_padded, verifies_drafts=verifies_drafts)
        return int(agreed.num_tokens_across_dp[dp_cpu.rank]), agreed

    def state(self) -> dict[str, dict[int, Tensor]]:
        """Cache name -> request -> [positions held, width]."""
        requests = [self.slots.request_slots(r) for r in range(len(self.slots.lengths))]
        out: dict[str, dict[int, Tensor]] = {}
        for index, attention in enumerate(self._attentions()):
            held = self.slots.held[max(0, index - self.setup.config.num_hidden_layers + 1)]
            for name, cache in attention.caches().items():
                rows = {r: cache[slots][held[slots]] for r, slots in enumerate(requests)}
                out[f"model.layers.{index}.self_attn.cache.{name}"] = rows
        return out

    def _attentions(self) -> list[MLAAttention]:
        return [cast(DecoderParts, layer).self_attn for layer in self.model.layers]
