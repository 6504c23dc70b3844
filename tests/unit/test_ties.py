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


def test_bare_topk_would_fail_here(tied):
    assert not torch.equal(tied.topk(K, dim=1).indices.sort(dim=1).values, lowest_first(tied))


def test_keys(tied):
    visible = torch.arange(WIDTH).expand(ROWS, WIDTH)
    for ids in (reference.attention.ChooseKeys(K)(tied), optimized.indexer.ChooseKeys(K)(visible, tied)):
        assert torch.equal(ids.sort(dim=1).values, lowest_first(tied))


def test_experts(tied):
    for choose in (reference.moe.Choose(K), optimized.router.Best(K)):
        assert torch.equal(choose(tied).sort(dim=1).values, lowest_first(tied))
