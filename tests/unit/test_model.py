"""spcheck.plan.model: where a case's config and weights come from, and what scale and settings make of them."""

import json
import os
from pathlib import Path

import pytest

from spcheck.case import Case
from spcheck.errors import UsageError
from spcheck.judge.notes import notes, weights_text
from spcheck.plan.model import open_model
from spcheck.plan.plan import make_plan
from spcheck.worker.weights import check_room, open_weights
from tests.unit.published import FP8, KIMI_K2, PUBLISHED, V32

PRESET = Path(__file__).parents[2] / "spcheck" / "families" / "deepseek" / "presets" / "dsv32-tiny.json"
GOLDEN = Path(__file__).parents[2] / "fixtures" / "golden" / "deepseek_v32"


def model_of(path, **options):
    return open_model(case_of(path, **options))


def case_of(path, **options):
    return Case(**{"requests": ((3,),), "tp": 2, "model": str(path), **options})


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(PRESET.read_text())
    return tmp_path


def test_a_config_has_random_weights_and_a_checkpoint_its_own(folder):
    (folder / "mine.json").write_text(PRESET.read_text())
    for path in (folder, folder / "config.json", folder / "mine.json", GOLDEN / "config.json"):
        model = model_of(path)
        assert (model.folder, model.named) == (None, True)
        assert weights_text(make_plan(case_of(path, seed=7))) == "random weights, seed 7"
    assert (model_of("dsv32-tiny").folder, model_of("dsv32-tiny").named) == (None, False)
    assert model_of(GOLDEN).folder == GOLDEN
    assert weights_text(make_plan(case_of(GOLDEN))) == f"weights of {GOLDEN}"


def test_random_weights_are_those_of_a_preset_with_the_same_numbers(folder):
    readers = [open_weights(make_plan(case_of(path, seed=3))) for path in (folder, "dsv32-tiny")]
    assert readers[0].names() == readers[1].names()
    assert readers[0].tensor("model.norm.weight").equal(readers[1].tensor("model.norm.weight"))


@pytest.mark.parametrize(
    "name",
    [
        *("model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors.incomplete"),
        *("pytorch_model.bin", "pytorch_model.bin.index.json", "model.Q4_K_M.gguf", "consolidated.00.pth"),
        *("flax_model.msgpack", "tf_model.h5", "adapter_model.safetensors", "WEIGHTS.PT"),
    ],
)
def test_a_folder_with_files_of_weights_never_gets_random_ones(folder, name):
    (folder / name).write_text("")
    assert model_of(folder).folder == folder
    assert model_of(folder / "config.json").folder is None


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "tokenizer.model", "README.md", "bin"])
def test_other_files_are_no_weights(folder, name):
    (folder / name).write_text("")
    assert model_of(folder).folder is None


def test_quantization_is_ignored_with_random_weights_alone(folder):
    quantized = json.loads(PRESET.read_text()) | {"quantization_config": FP8}
    (folder / "config.json").write_text(json.dumps(quantized))
    assert notes(make_plan(case_of(folder))) == ["the weights are random: quantization_config is ignored"]
    assert notes(make_plan(case_of(folder, overrides=(("quantization_config", None),)))) == []
    assert notes(make_plan(case_of("dsv32-tiny", overrides=(("quantization_config", FP8),)))) != []
    (folder / "model.safetensors").write_text("")
    with pytest.raises(UsageError, match="quantized checkpoints are not supported yet"):
        make_plan(case_of(folder))
    make_plan(case_of(folder, overrides=(("quantization_config", None),)))


def test_settings_come_behind_the_scale(folder):
    (folder / "config.json").write_text(json.dumps(V32))
    model = model_of(folder, scale="tiny", overrides=(("hidden_size", 40), ("rope_scaling.factor", 4)))
    assert (model.config.hidden_size, model.config.yarn.factor, model.config.q_lora_rank) == (40, 4, 44)
    assert "hidden_size 7168 -> 96" in map(str, model.scaled)
    assert model_of(folder).scaled == ()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"scale": "tiny"}, "--scale tiny is for random weights, and"),
        ({"model": "no-such-model"}, " nor a folder nor a .json file"),
        ({"model": "no-such-file.json"}, "--model no-such-file.json is neither a preset"),
        ({"overrides": (("rope_scaling.facto", 2),)}, "(did you mean rope_scaling.factor?)"),
    ],
)
def test_refused(options, says):
    with pytest.raises(UsageError) as error:
        model_of(**{"path": GOLDEN, **options})
    assert says in str(error.value)


def test_a_pipe_and_a_folder_of_the_name_are_no_config(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    for name, says in (("pipe.json", "is no readable file"), ("folder.json", "has no readable config.json")):
        with pytest.raises(UsageError, match=says):
            model_of(tmp_path / name)


def test_the_file_is_named_in_a_mistake(tmp_path):
    (tmp_path / "mine.json").write_text('{"model_type": "deepseek_v3", "model_type": "deepseek_v3"}')
    with pytest.raises(UsageError, match=r"mine\.json has the key model_type twice"):
        model_of(tmp_path / "mine.json")


@pytest.mark.parametrize("name", PUBLISHED)
def test_full_sizes_cannot_be_held_and_small_ones_can(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    drafts = 0 if PUBLISHED[name] is KIMI_K2 else 1
    full = make_plan(case_of(tmp_path, mtp_steps=drafts))
    with pytest.raises(UsageError, match=r"GiB at least, and 64\.0 GiB of memory are free: try --scale tiny"):
        check_room(full, 64 * 2**30)
    check_room(full, None)
    check_room(make_plan(case_of(tmp_path, scale="tiny", mtp_steps=drafts)), 2**30)


def test_weights_are_counted_as_drawn_and_once_in_the_working_type():
    plan = make_plan(case_of("dsv32-tiny"))
    reader = open_weights(plan)
    elements = sum(reader.tensor(name).numel() for name in reader.names())
    check_room(plan, elements * 10)
    with pytest.raises(UsageError, match="try --scale tiny"):
        check_room(plan, elements * 10 - 1)
    check_room(make_plan(case_of("dsv32-tiny", numerics="bfloat16")), elements * 4)
    check_room(make_plan(case_of(GOLDEN)), 1)


def test_a_case_of_objects_can_be_a_key():
    settings = (("rope_scaling", {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}),)
    case = case_of("dsv32-tiny", overrides=settings, scale="tiny")
    again = Case.from_json(json.loads(json.dumps(case.to_json())))
    assert (again, hash(again)) == (case, hash(case))
    assert "--model dsv32-tiny --scale tiny --set 'rope_scaling={" in case.id
    assert "--scale" not in case_of("dsv32-tiny").id
