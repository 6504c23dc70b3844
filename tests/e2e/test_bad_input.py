"""Folders and files made to break the reader: each ends in one printable sentence that names the thing, and exit 2.

Config mistakes go through the command. Weights are read by the host, whose check runs here as it runs there; a few of
them go through the command as well.
"""

import json
import os
import pickle
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reference.checkpoint import CheckpointError, RandomWeights, write_checkpoint
from spcheck.case import Case
from spcheck.cli.output import JsonTarget
from spcheck.plan.model import load_model
from spcheck.plan.plan import make_plan
from spcheck.report.printable import sentence
from spcheck.worker.weights import check_weights

PRESET = Path(__file__).parents[2] / "spcheck" / "families" / "deepseek" / "presets" / "dsv32-tiny.json"
EXPERTS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
RAW = json.loads(PRESET.read_text()) | EXPERTS | {"num_hidden_layers": 3, "vocab_size": 50}
ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
FROM_HERE = {**os.environ, "PYTHONPATH": str(PRESET.parents[2])}
EVIL = "evil\n\x1b[31mname\x07\u202e\r\tx"


def spcheck(*words, timeout=120, **options):
    command = [sys.executable, "-m", "spcheck", "diff", "--tokens", "3", "--backend", "loopback", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)


def assert_refused(done, says):
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert_one_sentence(done.stderr.removesuffix("\n"), says)


def assert_one_sentence(text, says):
    assert says in text
    assert text.isprintable()
    assert "Traceback" not in text
    assert len(text) < 700


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A folder that can be run, in one file, and the same in three shards."""
    folder = tmp_path_factory.mktemp("sound")
    for name, shards in (("one", 1), ("three", 3)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(RAW))
        config = load_model(Case(((1,),), 1, model=str(folder / name)))
        write_checkpoint(folder / name, RAW, RandomWeights(config, 0), shards=shards)
    return folder


@pytest.fixture
def one(sound, tmp_path):
    return Path(shutil.copytree(sound / "one", tmp_path / "one"))


@pytest.fixture
def three(sound, tmp_path):
    return Path(shutil.copytree(sound / "three", tmp_path / "three"))


def refusal(folder):
    """What the host says of the folder, as it is printed."""
    with pytest.raises(CheckpointError) as caught:
        check_weights(make_plan(Case(((3,),), 2, model=str(folder))))
    return sentence(str(caught.value))


def edit(folder, change):
    tensors = load_file(folder / ONE)
    change(tensors)
    save_file(tensors, folder / ONE)


def header(text, data=b"", length=None):
    return struct.pack("<Q", len(text) if length is None else length) + text + data


F8 = torch.float8_e4m3fn
NORM = "model.norm.weight"
TENSORS = {
    "missing": (lambda t: t.pop(NORM), "the checkpoint lacks model.norm.weight"),
    "surplus": (lambda t: t.update({"model.extra": torch.zeros(2)}), "no place for model.extra"),
    "misshaped": (lambda t: t.update({NORM: torch.zeros(3)}), "model.norm.weight has shape (3,), but"),
    "scalar": (lambda t: t.update({NORM: torch.tensor(1.0)}), "model.norm.weight has shape (), but"),
    "many dimensions": (lambda t: t.update({NORM: torch.zeros([1] * 60)}), "model.norm.weight has shape (1, 1,"),
    "float8": (lambda t: t.update({NORM: t[NORM].to(F8)}), "model.norm.weight is stored as F8_E4M3, which is not"),
    "integers": (lambda t: t.update({NORM: t[NORM].to(torch.int32)}), "model.norm.weight is stored as I32"),
    "bad name": (lambda t: t.update({EVIL: torch.zeros(2)}), r"no place for 'evil\n\x1b[31mname\x07\u202e\r\tx'"),
    "long name": (lambda t: t.update({"x" * 50_000: torch.zeros(2)}), "no place for 'xxxxx"),
    "long number": (
        lambda t: t.update({f"model.layers.{'9' * 5000}.x": torch.zeros(2)}),
        "no place for 'model.layers.",
    ),
}


@pytest.mark.parametrize("what", TENSORS)
def test_tensors(one, what):
    change, says = TENSORS[what]
    edit(one, change)
    assert_one_sentence(refusal(one), says)


ENTRY = b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,4]}}'
FILES = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "header longer than the file": header(b"{}", length=1000),
    "header of 2^60 bytes": header(b"{}", length=2**60),
    "header of -1 bytes": header(b"{}", length=2**64 - 1),
    "header is no JSON": header(b"hello"),
    "header is a list": header(b"[]"),
    "header is no text": header(b"\xff\xfe{}"),
    "header nested deep": header(b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"),
    "unknown type": header(ENTRY.replace(b"F32", b"X\\n9") % b"1", b"\0" * 4),
    "negative size": header(ENTRY % b"-1", b"\0" * 4),
    "size beyond counting": header(ENTRY % b"1099511627776,1099511627776", b"\0" * 4),
    "bytes left over": header(ENTRY % b"1", b"\0" * 40),
    "a pickle": pickle.dumps({"a": 1}),
}


@pytest.mark.parametrize("what", FILES)
def test_files(one, what):
    (one / ONE).write_bytes(FILES[what])
    assert_one_sentence(refusal(one), f"{one / ONE} is not a whole safetensors file")


def test_a_file_cut_short(one):
    os.truncate(one / ONE, (one / ONE).stat().st_size - 1)
    assert_one_sentence(refusal(one), f"{one / ONE} is not a whole safetensors file")


def test_weights_of_another_name_and_an_empty_folder(one, tmp_path):
    (one / ONE).rename(one / "weights.safetensors")
    assert_one_sentence(refusal(one), f"{one} has neither model.safetensors nor model.safetensors.index.json")
    (tmp_path / "empty").mkdir()
    assert_refused(spcheck("--model", str(tmp_path / "empty")), "has no readable config.json")


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_no_pickle_is_ever_read(one, tmp_path, name):
    (one / ONE).rename(tmp_path / "away")
    bomb = pickle.dumps(Bomb(str(tmp_path / "it was read")))
    (one / name).write_bytes(bomb)
    assert_one_sentence(refusal(one), f"; {name} is not read, only safetensors is")
    (one / ONE).write_bytes(bomb)
    assert_one_sentence(refusal(one), "is not a whole safetensors file")
    assert not (tmp_path / "it was read").exists()


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


OUTSIDE = [
    "../one/model.safetensors",
    "/etc/passwd",
    "/x.safetensors",
    "a/x.safetensors",
    "..",
    "",
    f"{EVIL}.bin",
    3,
    None,
]


@pytest.mark.parametrize("file", OUTSIDE)
def test_an_index_that_points_outside_its_folder(one, three, file):
    edit_index(three, lambda files: files.update({NORM: file}))
    assert_one_sentence(refusal(three), "which is no safetensors file of its folder")


INDEXES = {
    "names a missing file": ({NORM: "gone.safetensors"}, "gone.safetensors is named by the index but does not exist"),
    "names a folder": ({NORM: "folder.safetensors"}, "folder.safetensors is named by the index but is no plain file"),
    "names a pipe": ({NORM: "pipe.safetensors"}, "pipe.safetensors is named by the index but is no plain file"),
    "names a device": ({NORM: "zero.safetensors"}, "zero.safetensors is named by the index but is no plain file"),
    "names a link in a circle": ({NORM: "circle.safetensors"}, "circle.safetensors cannot be read: Too many levels"),
    "names a text": ({NORM: "text.safetensors"}, "text.safetensors is not a whole safetensors file"),
    "names a long file": ({NORM: f"{'x' * 3000}.safetensors"}, "cannot be read: File name too long"),
    "names a bad file": ({NORM: f"{EVIL}.safetensors"}, r"evil\n\x1b[31mname"),
    "knows too much": ({"model.extra": "model-00001-of-00003.safetensors"}, "has no place for model.extra"),
    "says another shard": ({NORM: "model-00001-of-00003.safetensors"}, "which the index places in model-00001-of"),
}


@pytest.mark.parametrize("what", INDEXES)
def test_an_index(three, what):
    (three / "folder.safetensors").mkdir()
    os.mkfifo(three / "pipe.safetensors")
    (three / "zero.safetensors").symlink_to("/dev/zero")
    (three / "circle.safetensors").symlink_to("circle.safetensors")
    (three / "text.safetensors").symlink_to("/etc/passwd")
    files, says = INDEXES[what]
    if what == "says another shard":
        files = {NORM: next(f for f in (f"model-0000{i}-of-00003.safetensors" for i in (1, 2)) if f != holder(three))}
        says = f"which the index places in {files[NORM]}"
    edit_index(three, lambda known: known.update(files))
    assert_one_sentence(refusal(three), says)


def holder(folder):
    return json.loads((folder / INDEX).read_text())["weight_map"][NORM]


def test_a_tensor_in_two_shards(three):
    extra = three / "model-00001-of-00003.safetensors"
    twin = NORM if holder(three) != extra.name else "lm_head.weight"
    save_file(load_file(extra) | {twin: torch.zeros(2)}, extra)
    assert_one_sentence(refusal(three), f"holds the tensor {twin}, which the index places in model-0000")


def test_a_tensor_the_index_does_not_know(three):
    edit_index(three, lambda files: files.pop(NORM))
    assert_one_sentence(refusal(three), "holds the tensor model.norm.weight, which the index does not name")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "has no weight_map"),
        ('{"weight_map": []}', "has no weight_map"),
    ],
)
def test_an_index_that_is_none(three, text, says):
    (three / INDEX).write_text(text)
    assert_one_sentence(refusal(three), f"{three / INDEX} {says}")


def test_links_of_a_download_cache_are_followed(three, tmp_path):
    (tmp_path / "blobs").mkdir()
    for path in three.iterdir():
        path.rename(tmp_path / "blobs" / path.name)
        path.symlink_to(tmp_path / "blobs" / path.name)
    check_weights(make_plan(Case(((3,),), 2, model=str(three))))


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user to be")
def test_weights_that_may_not_be_read(three):
    """As another user: root may read all."""
    for path in three.iterdir():
        path.chmod(0 if path.name in (holder(three), INDEX) else 0o644)
    assert_one_sentence(as_nobody(three, lambda: refusal(three)), f"{three / INDEX} cannot be read: Permission denied")
    (three / INDEX).chmod(0o644)
    assert_one_sentence(
        as_nobody(three, lambda: refusal(three)), f"{three / holder(three)} cannot be read: Permission denied"
    )


def as_nobody(folder, say):
    """What ``say`` returns as a user who owns nothing, in a folder that is open to all."""
    for path in (folder, *folder.parents[:-1]):
        path.chmod(path.stat().st_mode | 0o055)
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        try:
            os.write(send, say().encode())
        except BaseException as error:
            os.write(send, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(send)
    os.waitpid(child, 0)
    with os.fdopen(receive) as pipe:
        return pipe.read()


YARN = RAW["rope_scaling"]
CONFIGS = {
    "no model_type": ({"model_type": None}, "model_type None is not supported"),
    "another model": ({"model_type": "llama"}, "model_type 'llama' is not supported (deepseek_v3, deepseek_v32"),
    "an evil model_type": ({"model_type": EVIL}, r"model_type 'evil\n\x1b[31mname"),
    "a long model_type": ({"model_type": "x" * 10**6}, "model_type 'xxx"),
    "a list for a model_type": ({"model_type": ["deepseek_v3"]}, "model_type ['deepseek_v3'] is not supported"),
    "groups that do not divide": ({"n_group": 3}, "n_group 3 does not divide n_routed_experts 8"),
    "more groups kept than are": ({"topk_group": 5}, "topk_group 5 is more than n_group 4"),
    "more experts than kept": ({"num_experts_per_tok": 5}, "num_experts_per_tok 5 is more than the 4 experts"),
    "an odd rotary size": ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even, not 7"),
    "more dense layers than are": ({"first_k_dense_replace": 4}, "first_k_dense_replace 4 is more than"),
    "heads that contradict": ({"num_key_value_heads": 3}, "num_key_value_heads 3 contradicts num_attention_heads 12"),
    "sizes that contradict": ({"qk_head_dim": 3}, "qk_head_dim 3 contradicts qk_nope_head_dim + qk_rope_head_dim 26"),
    "two rope_thetas": ({"rope_scaling": YARN | {"rope_theta": 5}}, "rope_theta 10000 contradicts rope_theta 5"),
    "zero": ({"hidden_size": 0}, "hidden_size must be positive, not 0"),
    "negative": ({"num_hidden_layers": -3}, "num_hidden_layers must be positive, not -3"),
    "a bool": ({"hidden_size": True}, "hidden_size must be int, not True"),
    "a number for a bool": ({"norm_topk_prob": 1}, "norm_topk_prob must be bool, not 1"),
    "a string": ({"hidden_size": EVIL}, r"hidden_size must be int, not 'evil\n\x1b"),
    "a long list": ({"hidden_size": list(range(10**5))}, "hidden_size must be int, not [0, 1, 2"),
    "not a number": ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be positive, not nan"),
    "infinite": ({"routed_scaling_factor": float("inf")}, "routed_scaling_factor must be at most 1e+30, not inf"),
    "a huge size": ({"hidden_size": 10**4000}, "hidden_size must be at most 2147483647, not 1000"),
    "a million layers": ({"num_hidden_layers": 10**6}, "num_hidden_layers must be at most 1000"),
    "too many experts": ({"num_hidden_layers": 900, "n_routed_experts": 9000}, "9000 in 900 layers are more than"),
    "null for a size": ({"q_lora_rank": None}, "q_lora_rank must be int, not None"),
    "a bias": ({"attention_bias": True}, "attention_bias True is not supported"),
    "a stretch of another kind": ({"rope_scaling": {"type": EVIL}}, r"rope_scaling type 'evil\n"),
    "a tiny stretch": ({"rope_scaling": YARN | {"factor": 1e-300}}, "factor of rope_scaling must be from 1 to 1e+06"),
    "a huge stretch": ({"rope_scaling": YARN | {"factor": 10**400}}, "factor of rope_scaling must be from 1"),
    "scales that cancel": ({"rope_scaling": YARN | {"mscale_all_dim": -4.8}}, "mscale_all_dim of rope_scaling must be"),
    "a huge beta": ({"rope_scaling": YARN | {"beta_fast": 1e30}}, "beta_fast of rope_scaling must be from"),
    "betas the wrong way": ({"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 32}}, "is less than beta_slow 32"),
    "half a position": (
        {"rope_scaling": YARN | {"original_max_position_embeddings": 512.5}},
        "original_max_position_embeddings of rope_scaling must be a whole number, not 512.5",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CONFIGS)
def test_a_config(tmp_path, what):
    changes, says = CONFIGS[what]
    (tmp_path / "config.json").write_text(json.dumps(RAW | changes))
    assert_refused(spcheck("--model", str(tmp_path)), says)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 200_000, "is not JSON"),
        (b"1" * 5000, "holds a whole number of too many digits"),
        (b"[1]", "config.json must hold one JSON object"),
        (b"{}", "config lacks model_type"),
        (b'{"model_type": "deepseek_v3"}', "config lacks vocab_size"),
        (b'{"model_type": "deepseek_v3", "model_type": "deepseek_v32"}', "config.json has the key model_type twice"),
    ],
)
def test_a_config_that_is_none(tmp_path, content, says):
    (tmp_path / "config.json").write_bytes(content)
    assert_refused(spcheck("--model", str(tmp_path)), says)


def test_a_quantized_checkpoint(one):
    (one / "config.json").write_text(json.dumps(RAW | {"quantization_config": {"quant_method": "fp8"}}))
    assert_refused(spcheck("--model", str(one)), "quantized checkpoints are not supported")


def test_null_means_absent(one):
    absent = ["attention_bias", "quantization_config", "mlp_bias", "rope_interleave", "mlp_layer_types", "qk_head_dim"]
    (one / "config.json").write_text(json.dumps(RAW | dict.fromkeys(absent) | {"rope_parameters": None}))
    check_weights(make_plan(Case(((3,),), 2, model=str(one))))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["hiden_size=1"], "unknown config key 'hiden_size' (did you mean hidden_size?)"),
        (["index_top_k=1"], "unknown config key 'index_top_k' (did you mean index_topk?)"),
        (["zzz=1"], "unknown config key 'zzz'"),
        (["yarn={}"], "unknown config key 'yarn'"),
        (["rope_scaling.fact=2"], "unknown config key 'rope_scaling.fact' (did you mean rope_scaling.factor?)"),
        (["rope_scaling.factor=0"], "factor of rope_scaling must be positive, not 0"),
        (["torch_dtype=float32"], "config key 'torch_dtype' cannot be set: it changes nothing that is computed"),
        ([f"{EVIL}=2"], r"unknown config key 'evil\n\x1b"),
        (["hidden_size=ninety"], "hidden_size must be int, not 'ninety'"),
        (["hidden_size=96.0"], "hidden_size must be int, not 96.0"),
        (["hidden_size=true"], "hidden_size must be int, not True"),
        (["hidden_size="], "hidden_size must be int, not ''"),
        (["hidden_size=" + "1" * 5000], "hidden_size must be int, not '111"),
        (['hidden_size={"a":1}'], "hidden_size must be int, not {'a': 1}"),
        (["hidden_size=null"], "hidden_size must be int, not None"),
        (["rms_norm_eps=NaN"], "rms_norm_eps must be positive, not nan"),
        (["n_group=4", "n_group=2"], "--set n_group is given 2 times"),
        (["model_type=deepseek_v3", "index_topk=4"], "index_topk cannot be set: model_type deepseek_v3 has no indexer"),
        (["=3"], "is not key=value"),
    ],
)
def test_set(settings, says):
    assert_refused(spcheck(*(word for setting in settings for word in ("--set", setting))), says)


@pytest.mark.parametrize("name", ["", EVIL, "x" * 5000, "/dev/null", "model.safetensors", "\udcff"])
def test_a_model_that_is_no_folder(name):
    assert_refused(spcheck("--model", os.fsdecode(os.fsencode(name))), "is neither a preset")


@pytest.mark.parametrize("words", [["--requests", "1," + "x" * 9000], ["--numerics", f"{EVIL}{'x' * 9000}"], [EVIL]])
def test_words_that_are_long_or_odd(words):
    assert_refused(spcheck(*words), "spcheck: ")


def test_a_folder_with_a_bad_name(tmp_path):
    folder = tmp_path / EVIL
    folder.mkdir()
    assert_refused(spcheck("--model", str(folder)), r"evil\n\x1b[31mname\x07\u202e\r\tx")


def test_through_the_command(one):
    """The weights' sentences come from another process: they end like all others, and no file is left."""
    edit(one, TENSORS["bad name"][0])
    target = one / "out.json"
    done = spcheck("--model", str(one), "--json", str(target))
    assert_refused(done, TENSORS["bad name"][1])
    assert sorted(p.name for p in one.iterdir()) == ["config.json", ONE]
    edit(one, lambda t: t.update({NORM: t[NORM].to(F8)}) or t.pop(EVIL))
    assert_refused(spcheck("--model", str(one)), "is stored as F8_E4M3")


def test_a_name_with_a_line_break_can_be_run_and_repeated(one, tmp_path):
    """The report prints it in one line, and the command in it is one that a shell reads back."""
    folder = one.rename(tmp_path / "it's\na\x1b[31m\\name")
    done = spcheck("--model", str(folder))
    assert done.returncode == 0, done.stderr
    assert all(line.isprintable() for line in done.stdout.splitlines())
    repeat = next(line for line in done.stdout.splitlines() if line.startswith("repeat")).removeprefix("repeat")
    script = f'spcheck() {{ {sys.executable} -m spcheck "$@"; }}; {repeat.strip()} --json -'
    again = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    assert json.loads(again.stdout)["outcome"] == "EQUAL", again.stderr


JSON_TARGETS = {
    "": "it names no file",
    ".": "it is a folder",
    "new/": "it names no file",
    "missing/out.json": "there is no such folder",
    "file/out.json": "Not a directory",
    "x" * 300: "File name too long",
    "x" * 5000: "File name too long",
    "circle": "Too many levels of symbolic links",
    "dangling": "there is no such folder",
    "socket": "it is neither a file nor a pipe",
    "/proc/out.json": "cannot be written",
    f"{EVIL}/out.json": "there is no such folder",
}


@pytest.mark.parametrize("name", JSON_TARGETS)
def test_json_targets(tmp_path, monkeypatch, name):
    """Before the run: there is no report on stdout, and nothing new in the folder."""
    (tmp_path / "file").write_text("old")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "dangling").symlink_to("missing/out.json")
    with socket.socket(socket.AF_UNIX) as bound:
        monkeypatch.chdir(tmp_path)  # a socket's path must be short
        bound.bind("socket")
    before = sorted(p.name for p in tmp_path.iterdir())
    assert_refused(spcheck("--json", name, cwd=tmp_path, env=FROM_HERE), JSON_TARGETS[name])
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert (tmp_path / "file").read_text() == "old"


def test_a_json_target_of_the_longest_name_there_is(tmp_path):
    name = "x" * 255
    assert spcheck("--json", name, cwd=tmp_path, env=FROM_HERE).returncode == 0
    assert json.loads((tmp_path / name).read_text())["outcome"] == "EQUAL"
    assert len(list(tmp_path.iterdir())) == 1


def test_json_beside_the_report_on_stdout():
    done = spcheck("-q", "--json", "/dev/stdout")
    assert done.returncode == 0
    line, _, document = done.stdout.partition("\n")
    assert line.startswith("EQUAL")
    assert json.loads(document)["outcome"] == "EQUAL"


def test_a_disk_that_is_full_after_all():
    done = spcheck("--json", "/dev/full")
    assert done.returncode == 2
    assert_one_sentence(done.stderr.strip(), "--json /dev/full cannot be written: No space left on device")


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user to be")
def test_json_targets_that_may_not_be_written(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(0o444)
    for name, says in (("file", "it may not be written"), ("new", "Permission denied")):
        told = as_nobody(tmp_path, lambda name=name: JsonTarget(str(tmp_path / name)).name)
        assert told == f"UsageError: --json {tmp_path / name} cannot be written: {says}"
