"""Verification of drafted tokens against those that the target sampled: greedy speculative decoding."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RejectionSampler(nn.Module):
    """How many of the leading drafts of each request the target would have sampled itself.

    The sampled rows of all requests lie one after the other: of a request with d drafts the rows before each of them,
    and the last one, d + 1 in all.
    """

    def forward(self, sampled: Tensor, drafted: Tensor, num_drafts: Tensor) -> Tensor:
        """Tokens sampled at the rows [S] and given behind them [S], drafts [requests] -> accepted [requests].

        ``drafted`` holds anything at the last row of a request, behind which nothing was given.
        """
        rows = num_drafts + 1
        request = torch.arange(rows.shape[0], device=rows.device).repeat_interleave(rows, output_size=sampled.shape[0])
        accepted_before = torch.arange(sampled.shape[0], device=rows.device) - (rows.cumsum(0) - rows)[request]
        accepted = torch.where(sampled == drafted, num_drafts[request], accepted_before)
        return num_drafts.scatter_reduce(0, request, accepted, "amin")
