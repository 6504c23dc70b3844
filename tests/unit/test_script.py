"""What a run feeds its subjects: prompts, then what the reference sampled, drafted and accepted."""

import pytest
import torch

from spcheck.case import Case
from spcheck.plan.plan import make_plan
from spcheck.worker.capture import TapError
from spcheck.worker.script import Script, token_ids

CPU = torch.device("cpu")


def script(**options):
    return Script(make_plan(Case(**{"requests": ((3,),), "tp": 2, "mtp_steps": 2, **options})), CPU)


def forwards(s):
    """All forwards that are known, each on all data-parallel ranks."""
    return list(zip(*s.plan.phases, strict=True))


def fed(s, phase, dp_rank=0):
    chunks = s.chunks(phase, dp_rank, phase.requests)
    return [(c.request, c.start, c.ids.tolist(), c.drafts, c.following) for c in chunks]


def test_a_longer_request_starts_with_the_tokens_of_a_shorter_one():
    short, long = (token_ids(make_plan(Case(requests=((n,),), tp=2)))[0] for n in (5, 40))
    assert long[:5] == short
    cached = make_plan(Case(requests=((5,),), cached=((35,),), tp=2))
    assert token_ids(cached) == [long]


def test_a_cached_prefix_is_followed_by_the_first_new_token():
    s = script(requests=((2, 3),), cached=((4, 0),))
    (first, _) = token_ids(s.plan)
    target, _, _, own, *_ = s.plan.phases[0]
    assert fed(s, target) == [(0, 0, first[:4], None, first[4])]
    assert fed(s, own)[0] == (0, 4, first[4:], None, None)


def test_what_was_drafted_is_verified_and_what_was_rejected_is_gone():
    s = script(requests=((3,), (1, 1)), generate=2, mtp_steps=2)
    target, draft, later = forwards(s)[:3]
    s.hear(target, [[7], [8, 9]])
    s.hear(draft, [[70], [80, 90]])
    s.hear(later, [[71], [81, 91]])
    verify = forwards(s)[3]
    assert fed(s, verify[0]) == [(0, 3, [7, 70, 71], 2, None)]
    assert fed(s, verify[1], 1) == [(0, 1, [8, 80, 81], 2, None), (1, 1, [9, 90, 91], 2, None)]
    s.hear(verify, [[70, 5, 6], [80, 81, 82, 1, 2, 3]])  # one accepted; both; none
    assert s.plan.accepted == (((1,), (2, 0)),)
    draft, later = forwards(s)[4:6]
    assert [phase.counts for phase in draft] == [(2,), (3, 1)]
    s.hear(draft, [[10], [11, 12]])
    s.hear(later, [[20], [21, 22]])
    last = forwards(s)[6]
    assert fed(s, last[0]) == [(0, 5, [5, 10, 20], 2, None)]
    assert fed(s, last[1], 1) == [(0, 4, [82, 11, 21], 2, None), (1, 2, [1, 12, 22], 2, None)]


def test_a_draft_that_is_right_behind_one_that_is_wrong_is_rejected():
    s = script(generate=1)
    for forward, tokens in zip(forwards(s), ([7], [70], [71]), strict=False):
        s.hear(forward, [tokens])
    s.hear(forwards(s)[3], [[0, 71, 5]])
    assert s.plan.accepted == (((0,),),)


def test_a_prompt_in_pieces_goes_on_beside_drafts_that_are_verified():
    s = script(requests=((5, 1),), prefill_chunk=2, generate=2, mtp_steps=1)
    long, short = token_ids(s.plan)
    target, draft, _ = forwards(s)
    assert fed(s, target[0]) == [(0, 0, long[:2], None, long[2]), (1, 0, short, None, None)]
    s.hear(target, [[7, 8]])
    s.hear(draft, [[70, 80]])
    verify = forwards(s)[2]
    assert fed(s, verify[0]) == [(0, 2, long[2:4], 0, long[4]), (1, 1, [8, 80], 1, None)]
    s.hear(verify, [[9, 80, 81]])
    assert s.plan.accepted == (((0, 1),),)
    s.hear(forwards(s)[3], [[90, 91]])
    assert fed(s, forwards(s)[4][0]) == [(0, 4, long[4:], 0, None), (1, 3, [81, 91], 1, None)]


def test_without_drafts_every_step_feeds_the_token_before():
    s = script(generate=2, mtp_steps=0)
    first, second, third = forwards(s)
    s.hear(first, [[7]])
    assert fed(s, second[0]) == [(0, 3, [7], None, None)]
    s.hear(second, [[8]])
    assert fed(s, third[0]) == [(0, 4, [8], None, None)]
    assert s.plan.accepted == ()


def test_a_row_without_a_token_is_told():
    s = script(requests=((3, 1),), generate=1)
    with pytest.raises(TapError, match="sampled 1 tokens in the target step, and 2 rows are sampled"):
        s.hear(forwards(s)[0], [[7]])


def test_a_case_that_generates_nothing_listens_to_nothing():
    s = script()
    s.hear(forwards(s)[0], [[]])
    assert s.plan.accepted == ()
