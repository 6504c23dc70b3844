"""`spcheck diff` as a user runs it: real processes, real output, and nothing left behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SPCHECK = [sys.executable, "-m", "spcheck"]


def spcheck(*words, timeout=120, cwd=None):
    return subprocess.run([*SPCHECK, *words], capture_output=True, text=True, timeout=timeout, cwd=cwd)


def ranks_of(pid):
    """Pids of the host and the ranks below a running command."""
    found, todo = [], [pid]
    while todo:
        parent = todo.pop()
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += (more := [int(p) for p in (task / "children").read_text().split()])
                todo += more
    return found


def heed_interrupts():
    """A test run in the background of a script ignores SIGINT, and its children would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError("it did not happen")


def result_of(*words):
    done = spcheck("diff", *words, "--json", "-")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


GLOO = [
    "--tp 2 --tokens 17",
    "--tp 1 --tokens 17 --mtp-steps 2",
    "--tp 2 --tokens 1 --mtp-steps 3",
    "--tp 2 --tokens 2 --no-skip-padding",
    "--tp 3 --tokens 17 --mtp-steps 2 --aux-layers 0,2,5",
    "--tp 3 --requests 5,1,11 --pad-to 32 --padding-content nan",
    "--tp 4 --tokens 33 --mtp-steps 3",
    "--tp 4 --tokens 3 --mtp-steps 2 --no-skip-padding",
    "--tp 4 --requests 5,1,11 --pad-to 32 --padding-content random --no-skip-padding --aux-layers 5",
    "--tp 2 --tokens 17 --scheme tp --mtp-steps 2 --aux-layers 1,5",
    "--tp 3 --tokens 16 --scheme tp",
    "--tp 2 --tokens 17 --numerics float32",
    "--tp 3 --requests 5,1,11 --reference-world 1 --mtp-steps 2",
    "--tp 2 --requests 5,1/11 --all2all-backend all_to_all --mtp-steps 2",
    "--tp 2 --requests 5/- --scheme moe-sp --all2all-backend naive --model dsv32-alternating --reference-world 1",
    "--tp 1 --dp 3 --tokens 3 --lora-rank 2 --lora-adapters 1 --no-expert-parallel",
    "--tp 2 --tokens 9 --graph-sizes 32 --previous 17 --padding-content stale",
]


@pytest.mark.parametrize("line", GLOO)
def test_gloo(line):
    result = result_of(*line.split(), "--backend", "gloo")
    assert result["outcome"] in ("EQUAL", "EQUIVALENT")
    words = line.split()
    asked = words[words.index("--scheme") + 1] if "--scheme" in words else "full-sp"
    assert result["scheme"] == ("tp" if "--tp 1" in line else asked)
    assert all(contract["held"] for contract in result["contracts"].values())
    assert result["environment"]["backend"] == "gloo"


def test_both_backends_give_the_same_numbers():
    """Two ranks: a sum of two has one order, so that even the last bit must agree."""
    line = ["--tp", "2", "--requests", "5,1,11", "--mtp-steps", "2", "--pad-to", "32", "--aux-layers", "0,3"]
    threads, processes = (result_of(*line, "--backend", backend) for backend in ("loopback", "gloo"))
    assert threads["probes"] == processes["probes"]
    assert threads["contracts"] == processes["contracts"]


def test_the_json_document(tmp_path):
    target = tmp_path / "out.json"
    done = spcheck("diff", "--tp", "2", "--tokens", "17", "--backend", "loopback", "--json", str(target))
    assert done.returncode == 0
    assert "EQUAL, scheme full-sp" in done.stdout
    result = json.loads(target.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert result["schema"] == "spcheck.diff/1"
    assert (result["outcome"], result["scheme"], result["first_divergence"]) == ("EQUAL", "full-sp", None)
    assert result["case"].startswith("spcheck diff --tp 2 --dp 1 --tokens 17")
    assert result["activations"]["compared"] == len(result["probes"]) == 200
    assert result["activations"]["bitwise_equal"] == 200
    assert result["numerics"]["guard"]["doubts"] == []
    assert result["choices"]["compared"] == result["choices"]["agreeing"] > 0
    assert result["findings"] == []
    assert result["environment"]["torch"]
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_json_on_stdout_leaves_it_to_json():
    done = spcheck("diff", "--tokens", "3", "--backend", "loopback", "--json", "-")
    assert json.loads(done.stdout)["outcome"] == "EQUAL"
    assert "EQUAL, scheme full-sp" in done.stderr


def test_a_required_scheme_that_did_not_run_is_exit_3():
    done = spcheck("diff", "--tp", "1", "--tokens", "3", "--backend", "loopback", "--require-scheme", "full-sp")
    assert done.returncode == 3
    assert "scheme full-sp is required and tp ran" in done.stdout


def test_a_pass_without_sp_says_so():
    done = spcheck("diff", "--tp", "2", "--tokens", "3", "--backend", "loopback", "--scheme", "tp")
    assert done.returncode == 0
    assert "EQUAL, scheme tp: SP not exercised" in done.stdout


def test_the_report_fits_80_columns_but_for_sentences():
    done = spcheck("diff", "--tp", "2", "--tokens", "17", "--backend", "loopback")
    assert "\x1b" not in done.stdout
    long = [line for line in done.stdout.splitlines() if len(line) > 80]
    assert [line.split()[0] for line in long] == ["repeat"]


def test_a_folder_named_reference_where_the_user_stands_is_not_imported(tmp_path):
    for name in ("reference", "optimized"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong package')")
    script = Path(sys.executable).parent / "spcheck"
    words = [str(script), "diff", "--tokens", "3", "--backend", "loopback"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_checkpoint_folder(tmp_path):
    from reference.checkpoint import RandomWeights, write_checkpoint
    from spcheck.case import Case
    from spcheck.plan.model import load_model

    preset = Path(__file__).parents[2] / "spcheck" / "families" / "deepseek" / "presets" / "dsv32-tiny.json"
    raw = json.loads(preset.read_text())
    write_checkpoint(tmp_path, raw, RandomWeights(load_model(Case(((1,),), 1)), 3, own_tables=True))
    folder = result_of("--tokens", "5", "--model", str(tmp_path), "--backend", "loopback", "--seed", "3")
    preset_run = result_of("--tokens", "5", "--backend", "loopback", "--seed", "3")
    assert folder["probes"] == preset_run["probes"]


LONG = ["diff", "--tp", "2", "--tokens", "3000", "--mtp-steps", "3", "--timeout", "300", "--backend", "gloo"]


@pytest.fixture
def long_run(tmp_path):
    """A run that goes on long enough to be disturbed; its temporary files are under ``tmp_path``."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [*SPCHECK, *LONG], stdout=pipe, stderr=pipe, text=True, env=environment, preexec_fn=heed_interrupts
    )
    yield process
    process.kill()
    process.wait()


def test_ctrl_c_ends_every_rank(long_run, tmp_path):
    started = wait_until(lambda: len(found := ranks_of(long_run.pid)) == 3 and found)
    long_run.send_signal(signal.SIGINT)
    _, errors = long_run.communicate(timeout=20)
    assert long_run.returncode == 130
    assert errors.strip() == "spcheck: interrupted"  # click ends the line of a ^C first
    wait_until(lambda: not any(map(alive, started)))
    assert list(tmp_path.iterdir()) == []


def test_a_killed_rank_is_named(long_run, tmp_path):
    started = wait_until(lambda: len(found := ranks_of(long_run.pid)) == 3 and found)
    os.kill(started[2], signal.SIGKILL)
    output, errors = long_run.communicate(timeout=60)
    assert long_run.returncode == 4, errors
    assert "rank 1 killed by signal 9" in output
    assert "FAILED, scheme full-sp" in output
    wait_until(lambda: not any(map(alive, started)))
    assert list(tmp_path.iterdir()) == []


def test_threads_that_take_their_process_down_are_failed(tmp_path):
    words = [*LONG[:-1], "loopback"]
    process = subprocess.Popen([*SPCHECK, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    (host,) = wait_until(lambda: ranks_of(process.pid))
    wait_until(lambda: len(list(Path(f"/proc/{host}/task").iterdir())) >= 3)
    os.kill(host, signal.SIGSEGV)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 4, errors
    assert "the process of all ranks was killed by signal 11 (SIGSEGV), and left no report" in output


def test_a_killed_command_leaves_no_rank(long_run):
    started = wait_until(lambda: len(found := ranks_of(long_run.pid)) == 3 and found)
    long_run.kill()
    wait_until(lambda: not any(map(alive, started)))


def test_a_reader_that_goes_away_does_not_change_the_exit_code():
    command = " ".join([*SPCHECK, "diff", "--tp", "1", "--tokens", "3", "--backend", "loopback"])
    for options, code in (("", 0), ("--require-scheme full-sp", 3)):
        words = ["bash", "-c", f"{command} {options} | true; echo ${{PIPESTATUS[0]}}"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        assert (done.stdout, done.stderr) == (f"{code}\n", "")


def test_a_run_over_its_time_is_failed():
    done = spcheck("diff", "--tokens", "3000", "--timeout", "2")
    assert done.returncode == 4
    assert "no rank began a step within 2 s" in done.stdout
