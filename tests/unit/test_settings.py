"""A setting is declared once; its option, id, JSON, place in an engine's key and what ``build`` is told follow."""

import dataclasses
import json
import shlex
import typing
from dataclasses import dataclass

import pytest
import torch
from click.testing import CliRunner

import optimized.build_setup
import reference.subject
from spcheck.case import (
    DEFAULT_GRAPH_SIZES,
    GROUPS,
    Case,
    Setting,
    Through,
    Without,
    handed_values,
    in_order,
    settings_of,
)
from spcheck.case.codecs import COUNT
from spcheck.case.settings import setting
from spcheck.cli.app import cli
from spcheck.cli.diff import diff
from spcheck.cli.options import case_of
from spcheck.comm.loopback import run_loopback
from spcheck.comm.recorded import Recorded
from spcheck.plan.plan import make_plan
from spcheck.subjects.setup import Setup
from spcheck.worker.built import build, build_key, own_groups

CPU = torch.device("cpu")
PLAIN = Case(requests=((5,),), tp=2)
ADAPTED = dataclasses.replace(PLAIN, lora_rank=4, lora_adapters=2)
PAIR = dataclasses.replace(PLAIN, reference="optimized:tp", candidate="optimized:full-sp")

# For every field: a case, and another value of it.
CHANGES = {
    "requests": (PLAIN, ((5,), (3,))),
    "tp": (PLAIN, 3),
    "cached": (PLAIN, ((7,),)),
    "previous": (PLAIN, ((4,),)),
    "generate": (PLAIN, 2),
    "prefill_chunk": (PLAIN, 3),
    "pp": (PLAIN, 2),
    "expert_parallel": (PLAIN, False),
    "all2all_backend": (PLAIN, "naive"),
    "model": (PLAIN, "dsv3-tiny"),
    "scale": (PLAIN, "tiny"),
    "overrides": (PLAIN, (("index_topk", 4), ("rope_scaling", None), ("model_type", "deepseek_v32"))),
    "weights": (PLAIN, "ties"),
    "mtp_steps": (PLAIN, 2),
    "aux_layers": (PLAIN, (0, 2)),
    "lora_rank": (ADAPTED, 5),
    "lora_adapters": (ADAPTED, 3),
    "pad_to": (PLAIN, 8),
    "graph_sizes": (PLAIN, (4, 8)),
    "skip_padding": (PLAIN, False),
    "padding_content": (PLAIN, "nan"),
    "numerics": (PLAIN, "float64"),
    "grid": (PLAIN, "B"),
    "reference": (PAIR, "reference"),
    "candidate": (PAIR, "optimized:moe-sp"),
    "reference_world": (PLAIN, 1),
    "scheme": (PLAIN, "tp"),
    "require_scheme": (PLAIN, "full-sp"),
    "seed": (PLAIN, 7),
    "backend": (PLAIN, "loopback"),
    "timeout": (PLAIN, 12.5),
}
IMPOSSIBLE = {"pp"}  # no plan is made of these
EXPECTED_IDS = {
    PLAIN: "--tp 2 --dp 1 --tokens 5 --expert-parallel --all2all-backend allgather_reducescatter --model dsv32-tiny"
    " --mtp-steps 1 --aux-layers none --graph-sizes none --skip-padding --padding-content zero --numerics exact"
    " --grid auto --reference reference --candidate optimized --scheme auto --seed 0 --backend auto --timeout 60",
    Case(
        requests=((5, 1), (11,), ()), tp=3, cached=((0, 40), (7,), ()), previous=((), (2, 2), (1,)), generate=2,
        prefill_chunk=4, pp=2, expert_parallel=False, all2all_backend="all_to_all", model="my model's\n", scale="tiny",
        overrides=(("index_topk", 4), ("rope_scaling", {"a": [1]}), ("x", "y z"), ("n", None), ("b", False)),
        weights="ties", lora_rank=4, reference="optimized:tp", candidate="optimized:full-sp", numerics="float32",
        grid="B", reference_world=1, scheme="full-sp", require_scheme="full-sp", mtp_steps=2, aux_layers=(0, 5),
        pad_to=32, skip_padding=False, padding_content="nan", seed=7, backend="loopback", timeout=12.5,
    ): r"--tp 3 --dp 3 --requests 5,1@40/11@7/- --previous -/2,2/1 --generate 2 --prefill-chunk 4 --pp 2"
    r" --no-expert-parallel --all2all-backend all_to_all --model $'my model\x27s\x0a' --scale tiny --set index_topk=4"
    r""" --set 'rope_scaling={"a": [1]}' --set 'x=y z' --set n=null --set b=false --weights ties --mtp-steps 2"""
    r" --aux-layers 0,5 --lora-rank 4 --lora-adapters 0 --pad-to 32 --no-skip-padding --padding-content nan"
    r" --numerics float32 --reference optimized:tp --candidate optimized:full-sp --reference-world 1 --scheme full-sp"
    r" --require-scheme full-sp --seed 7 --backend loopback --timeout 12.5",
    Case(requests=((17,), (17,)), tp=1, graph_sizes=DEFAULT_GRAPH_SIZES, grid="B", timeout=1e5):
    "--tp 1 --dp 2 --requests 17/17 --expert-parallel --all2all-backend allgather_reducescatter --model dsv32-tiny"
    " --mtp-steps 1 --aux-layers none --graph-sizes default --skip-padding --padding-content zero --numerics exact"
    " --grid B --reference reference --candidate optimized --scheme auto --seed 0 --backend auto --timeout 100000",
    Case(requests=((1,),), cached=((40,),), tp=2, graph_sizes=(1, 4)):
    "--tp 2 --dp 1 --requests 1@40 --expert-parallel --all2all-backend allgather_reducescatter --model dsv32-tiny"
    " --mtp-steps 1 --aux-layers none --graph-sizes 1,4 --skip-padding --padding-content zero --numerics exact"
    " --grid auto --reference reference --candidate optimized --scheme auto --seed 0 --backend auto --timeout 60",
}  # fmt: skip


def pair_of(name):
    case, value = CHANGES[name]
    return case, dataclasses.replace(case, **{name: value})


def keys_of(case):
    """Of both sides, on the first rank."""
    impossible = {name: getattr(PLAIN, name) for name in IMPOSSIBLE}
    plan = dataclasses.replace(make_plan(dataclasses.replace(case, **impossible)), case=case)
    return [build_key(side, plan, 0, CPU) for _, side in plan.sides]


def declarations():
    return {named.name: named.setting for named in settings_of(Case)}


def test_every_field_of_a_case_is_declared():
    assert all(isinstance(field.metadata["setting"], Setting) for field in dataclasses.fields(Case))
    assert all(declared.help and declared.group in GROUPS for declared in declarations().values())
    assert [name for name, declared in declarations().items() if declared.option is None] == ["cached"]


def test_there_is_a_change_of_every_field():
    assert list(CHANGES) == [named.name for named in settings_of(Case)]


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_is_in_the_key_of_an_engine_or_says_why_not(name):
    before, after = map(keys_of, pair_of(name))
    depends = declarations()[name].engine
    if isinstance(depends, Without):
        assert len(depends.reason.split()) >= 4
        assert before == after  # else an engine would be built again for nothing
    else:
        assert before != after


def test_settings_that_come_to_the_same_share_an_engine():
    named = {"grid": "A"}, {"overrides": (("index_topk", make_plan(PLAIN).config.index_topk),)}
    for options in named:
        assert keys_of(dataclasses.replace(PLAIN, **options)) == keys_of(PLAIN)
    assert all(isinstance(declarations()[name].engine, Through) for options in named for name in options)


def test_what_only_a_run_depends_on_keeps_the_engine():
    kept = {name for name, declared in declarations().items() if isinstance(declared.engine, Without)}
    requests = {"cached", "previous", "generate", "prefill_chunk", "mtp_steps"}
    assert kept == requests | {"padding_content", "require_scheme", "backend", "timeout"}


@dataclass(frozen=True)
class Undeclared(Case):
    """A case with fields that nobody thought of when the key was written."""

    bare: int = 0
    told: int = setting(0, "--told", "padding", COUNT, "Of a test.", handed=True)

    __hash__ = Case.__hash__


@pytest.mark.parametrize("name", ["bare", "told"])
def test_a_new_field_is_in_the_key_without_being_asked(name):
    case = Undeclared(requests=((5,),), tp=2)
    assert keys_of(case) == keys_of(dataclasses.replace(case))
    assert keys_of(case) != keys_of(dataclasses.replace(case, **{name: 1}))


def test_a_new_field_that_is_handed_must_be_taken():
    values = handed_values(Undeclared(requests=((5,),), told=3))
    assert values["told"] == 3
    others = {field.name: None for field in dataclasses.fields(Setup) if field.name not in values}
    with pytest.raises(TypeError, match="told"):
        Setup(**others, **values)


def test_what_is_handed_cannot_be_left_out_of_the_key():
    with pytest.raises(ValueError, match="--told is handed to a subject, so it belongs to the engine's key"):
        setting(0, "--told", "padding", COUNT, "Of a test.", handed=True, engine=Without("it is of no use to it"))


def test_what_a_subject_is_told_has_the_type_that_is_declared():
    handed, told = typing.get_type_hints(Case), typing.get_type_hints(Setup, localns=TYPES)
    names = set(handed_values(PLAIN))
    assert {name: told[name] for name in names} == {name: handed[name] for name in names}
    assert set(told) - names == {"config", "weights", "groups", "dtype", "device", "scheme"}


TYPES = {
    "torch": torch,
    "ModelConfig": reference.subject.ModelConfig,
    "TensorReader": reference.subject.TensorReader,
    "Communicator": reference.subject.Communicator,
}


@pytest.mark.parametrize("protocol", [reference.subject.Setup, optimized.build_setup.BuildSetup])
def test_a_subject_reads_nothing_that_it_is_not_told(protocol):
    read = {name for name, value in vars(protocol).items() if isinstance(value, property)}
    assert {"config", "weights", "groups", "dtype", "device"} <= read <= {f.name for f in dataclasses.fields(Setup)}


@pytest.mark.parametrize("case", EXPECTED_IDS, ids=["plain", "full", "sizes", "cached"])
def test_the_id_is_spelled_as_ever(case):
    assert case.id == f"spcheck diff {EXPECTED_IDS[case]}"


@pytest.mark.parametrize("name", CHANGES)
def test_each_value_is_read_as_it_is_written(name):
    case = pair_of(name)[1]
    assert case_of(options_of(shlex.split(case.id)[2:])) == case
    assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case


def test_a_setting_that_is_unknown_is_not_passed_over():
    with pytest.raises(KeyError, match="seeds"):
        Case.from_json({"requests": [[5]], "seeds": 3})
    assert Case.from_json({"requests": [[5]], "seed": 3}) == Case(requests=((5,),), seed=3)


def options_of(words):
    shown = ("verbose", "quiet", "collectives", "json_target")
    return {name: value for name, value in diff.make_context("diff", words).params.items() if name not in shown}


def test_the_defaults_of_the_command_are_those_of_the_case(monkeypatch):
    monkeypatch.delenv("VLLM_MOE_SKIP_PADDING", raising=False)
    assert case_of(options_of(["--tokens", "5"])) == Case(requests=((5,),))


def test_help_shows_the_groups_and_every_option_in_its_own():
    text = CliRunner().invoke(cli, ["diff", "--help"]).output
    found = [text.index(f"\n{group.capitalize()}:\n") for group in (*GROUPS, "output")]
    assert found == sorted(found)
    ends = [*found[1:], len(text)]
    for named in in_order():
        index = GROUPS.index(named.setting.group)
        for option in (named.setting.option or "--requests").split("/"):
            assert option in text[found[index] : ends[index]].split()


class Spied(Case):
    """A case that notes which of its fields are read; it is its own hash, since an id reads them all."""

    read: typing.ClassVar[set[str]] = set()

    def __getattribute__(self, name):
        if name in CHANGES:
            Spied.read.add(name)
        return object.__getattribute__(self, name)

    def __hash__(self):
        return id(self)


@pytest.mark.parametrize(
    "options",
    [{"lora_rank": 4, "lora_adapters": 1}, {"graph_sizes": (8, 16), "numerics": "float32", "weights": "ties"}],
)
def test_whoever_builds_an_engine_reads_nothing_that_the_key_leaves_out(options):
    case = dataclasses.replace(PLAIN, tp=1, **options)
    plan = dataclasses.replace(make_plan(case), case=Spied(**case.to_json()))
    read = run_loopback(1, lambda world: [read_while_building(world, plan, side) for _, side in plan.sides])[0]
    names = set().union(*read)
    assert {"seed", "weights", "skip_padding", "numerics"} <= names
    assert not [name for name in names if isinstance(declarations()[name].engine, Without)]


def read_while_building(world, plan, side):
    groups = own_groups(world, side, plan.case)
    recorded = {name: Recorded(group, [], lambda: "", world.trace) for name, group in groups.items()}
    Spied.read.clear()
    with torch.inference_mode():
        build(side, plan, 0, CPU, recorded)
    return set(Spied.read)
