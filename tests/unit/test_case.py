"""A case is a value; its id is a command that gives the same case again."""

import shlex

import pytest
from click.testing import CliRunner

from spcheck.case import DEFAULT_GRAPH_SIZES, Case
from spcheck.cli import diff as command
from spcheck.cli.app import cli

FULL = Case(
    requests=((5, 1), (11,), ()),
    tp=3,
    previous=((), (2, 2), (1,)),
    expert_parallel=False,
    all2all_backend="all_to_all",
    lora_rank=4,
    lora_adapters=2,
    reference="optimized:tp",
    candidate="optimized:full-sp",
    reference_world=1,
    overrides=(("index_topk", 4), ("model_type", "deepseek_v32"), ("norm_topk_prob", False)),
    weights="ties",
    numerics="float32",
    scheme="full-sp",
    require_scheme="full-sp",
    mtp_steps=2,
    aux_layers=(0, 5),
    pad_to=32,
    skip_padding=False,
    padding_content="nan",
    seed=7,
    backend="loopback",
    timeout=12.5,
)


PLAIN = Case(requests=((17,),), tp=2)
SIZES = Case(requests=((17,), (17,)), tp=1, graph_sizes=DEFAULT_GRAPH_SIZES, pp=2, padding_content="stale")


@pytest.mark.parametrize("case", [FULL, PLAIN, SIZES], ids=["full", "plain", "sizes"])
def test_the_id_repeats_the_case(case, monkeypatch):
    seen = []
    monkeypatch.setattr(command, "_compare", lambda case: seen.append(case) or (_ for _ in ()).throw(SystemExit(0)))
    CliRunner().invoke(cli, shlex.split(case.id)[1:], catch_exceptions=False)
    assert seen == [case]


def test_json_round_trip():
    import json

    assert Case.from_json(json.loads(json.dumps(FULL.to_json()))) == FULL


def test_the_environment_gives_the_default_of_skip_padding(monkeypatch):
    seen = []
    monkeypatch.setattr(command, "_compare", lambda case: seen.append(case) or (_ for _ in ()).throw(SystemExit(0)))
    for value in (None, "1", "0"):
        monkeypatch.delenv("VLLM_MOE_SKIP_PADDING", raising=False)
        if value is not None:
            monkeypatch.setenv("VLLM_MOE_SKIP_PADDING", value)
        CliRunner().invoke(cli, ["diff", "--tokens", "3"], catch_exceptions=False)
    monkeypatch.setenv("VLLM_MOE_SKIP_PADDING", "0")
    CliRunner().invoke(cli, ["diff", "--tokens", "3", "--skip-padding"], catch_exceptions=False)
    assert [case.skip_padding for case in seen] == [True, True, False, True]
