"""What a report says of the rows that ran, and of settings that changed nothing, against sentences by hand."""

import pytest

from spcheck.case import Case
from spcheck.judge.notes import batch_text, notes
from spcheck.plan.plan import make_plan


def plan_of(**options):
    return make_plan(Case(**{"requests": ((17,),), "tp": 2, **options}))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "batch 17 rows, shards of 9, 1 padded (not routed)"),
        ({"scheme": "tp"}, "batch 17 rows"),
        ({"requests": ((16,),)}, "batch 16 rows, shards of 8"),
        (
            {"graph_sizes": (32,), "padding_content": "nan", "skip_padding": False},
            "batch 17 rows, graph 32, shards of 16, 15 padded (nan, routed)",
        ),
        (
            {"requests": ((5, 1), (11,), ())},
            "batch 6/11/idle rows, shards of 3/6/1, 3 padded (zero, not routed)",
        ),
        ({"reference": "optimized:tp", "candidate": "reference"}, "batch 17 rows"),
    ],
)
def test_the_batch(options, text):
    assert batch_text(plan_of(**options)) == text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, []),
        ({"padding_content": "nan"}, ["no row is padded: --padding-content nan changes nothing"]),
        ({"padding_content": "nan", "pad_to": 18}, []),
        ({"padding_content": "nan", "requests": ((17,), ())}, []),
        ({"graph_sizes": (8, 16), "mtp_steps": 0}, ["no captured size adds a row: --graph-sizes changes nothing"]),
        ({"graph_sizes": (8, 16), "mtp_steps": 2}, []),  # the later draft step has 1 row, and runs 8
        (
            {"scheme": "tp", "all2all_backend": "naive"},
            ["no row is dispatched: --all2all-backend naive changes nothing"],
        ),
        ({"scheme": "tp", "all2all_backend": "naive", "requests": ((3,), (3,))}, []),
        ({"lora_rank": 2, "lora_adapters": 3}, ["no request uses LoRA adapters 1, 2"]),
        ({"lora_rank": 2, "lora_adapters": 3, "requests": ((3, 3), (3,))}, []),
    ],
)
def test_what_changes_nothing(options, said):
    assert notes(plan_of(**options)) == said
