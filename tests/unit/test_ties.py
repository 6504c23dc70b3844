"""Ties, wide enough that an unstable sort or a bare topk would show: the lowest index wins in both subjects."""

import pytest
import torch

import optimized.indexer
import optimized.router
import reference.attention
import reference.moe

ROWS, WIDTH, K = 20, 200, 8


@pytest.fixture
def tied():
    """Scores of five values only, so that every choice of eight is among equals."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 5, (ROWS, WIDTH), generator=generator).double()


def lowest_first(scores):
    order = [sorted(range(WIDTH), key=lambda i, row=row: (-row[i], i))[:K] for row in scores.tolist()]
    return torch.tensor(order).sort(dim=1).values


def test_every_row_has_more_best_scores_than_are_chosen(tied):
    """So any choice that is not the lowest of them shows, on every machine."""
    best = tied == tied.amax(dim=1, keepdim=True)
    assert (best.sum(dim=1) > 2 * K).all()
    assert not (lowest_first(tied) == lowest_first(tied.flip(1))).all(dim=1).any()


def test_keys(tied):
    visible = torch.arange(WIDTH).expand(ROWS, WIDTH)
    for ids in (reference.attention.ChooseKeys(K)(tied), optimized.indexer.ChooseKeys(K)(visible, tied)):
        assert torch.equal(ids.sort(dim=1).values, lowest_first(tied))


def test_experts(tied):
    for choose in (reference.moe.Choose(K), optimized.router.Best(K)):
        assert torch.equal(choose(tied).sort(dim=1).values, lowest_first(tied))
