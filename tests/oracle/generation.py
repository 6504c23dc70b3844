"""Greedy generation with the reference engine: token by token, and with drafts that are verified."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from reference.engine import Chunk, Engine


def keep(*modules: nn.Module) -> list[Tensor]:
    """A list that gets every output of the modules."""
    outputs: list[Tensor] = []
    for module in modules:
        module.register_forward_hook(lambda _, __, out: outputs.append(out.clone()))
    return outputs


def greedy(engine: Engine, prompts: Tensor, new: int) -> Tensor:
    """Prompts [B, S] -> `new` tokens of each, [B, new]."""
    B, S = prompts.shape
    sampled = keep(engine.sampler)
    engine.start([S + new] * B)
    engine.step([Chunk(b, 0, prompts[b]) for b in range(B)])
    for position in range(S, S + new - 1):
        engine.step([Chunk(b, position, token) for b, token in enumerate(sampled[-B:])])
    return torch.cat(sampled).unflatten(0, (new, B)).T


class Verified(NamedTuple):
    """The drafts of a request that had `emitted` new tokens, and how many of them were accepted."""

    request: int
    emitted: int
    drafts: Tensor
    accepted: int


def speculative(engine: Engine, prompts: Tensor, new: int, drafts: int) -> tuple[Tensor, list[Verified]]:
    """`greedy` with so many drafts a step, fewer at the end; and every verification."""
    B, S = prompts.shape
    sampled, accepted = keep(engine.sampler), keep(engine.rejection_sampler)
    drafted = keep(*(engine.model.layers[i].shared_head.sampler for i in engine.config.mtp_layers))
    engine.start([S + new] * B)
    engine.step([Chunk(b, 0, prompts[b]) for b in range(B)])
    emitted, verified = list(sampled), []
    while going := [b for b in range(B) if len(emitted[b]) < new]:
        wanted = {b: min(drafts, new - 1 - len(emitted[b])) for b in going}
        ids = {b: emitted[b][-1:] for b in going}
        for step in range(drafts):
            drafted.clear()
            engine.draft(some := [b for b in going if step < wanted[b]], step)
            for b, token in zip(some, drafted, strict=True):
                ids[b] = torch.cat((ids[b], token))

        sampled.clear()
        accepted.clear()
        engine.step([Chunk(b, S + len(emitted[b]) - 1, ids[b], wanted[b]) for b in going])
        for b, tokens, count in zip(going, sampled, accepted, strict=True):
            verified.append(Verified(b, len(emitted[b]), ids[b][1:], int(count)))
            emitted[b] = torch.cat((emitted[b], tokens[: int(count) + 1]))
    return torch.stack(emitted), verified
