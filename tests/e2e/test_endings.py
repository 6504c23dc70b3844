"""However the command ends: its exit code, what it says, and that nothing of it is left.

What goes wrong is put into the host, or the command, by a ``sitecustomize`` of Python's own, on PYTHONPATH.
"""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.e2e.test_cli import LONG, alive, heed_interrupts, ranks_of, wait_until

ROOT = Path(__file__).parents[2]
IN_HOST = 'import sys\nif "spcheck.launch.host" in sys.orig_argv:\n'


def environment(folder, code="", **variables):
    """That of a command which runs ``code`` first, in itself and in its host, and has its own temporary folder."""
    (folder / "site").mkdir()
    (folder / "tmp").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(code)
    path = os.pathsep.join((str(folder / "site"), str(ROOT)))
    return {**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder / "tmp"), **variables}


def in_host(code):
    return IN_HOST + textwrap.indent(textwrap.dedent(code), "    ")


def spcheck(*words, env, cwd=None):
    command = [sys.executable, "-m", "spcheck", "diff", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, cwd=cwd)


HANG = """
    import threading, time
    import torch
    from torch.nn.modules import module

    def rank():
        name = threading.current_thread().name
        return name if name.startswith("rank ") else f"rank {torch.distributed.get_rank()}"

    def here_it_hangs(module, args):
        if type(module).__module__ == "optimized.router" and rank() == "rank 1":
            time.sleep(1000)

    module.register_module_forward_pre_hook(here_it_hangs)
"""


@pytest.mark.parametrize("backend", ["gloo", "loopback"])
def test_a_rank_that_hangs_ends_within_the_timeout(backend, tmp_path):
    env = environment(tmp_path, in_host(HANG))
    begun = time.monotonic()
    done = spcheck(
        "--tokens", "5", "--backend", backend, "--timeout", "12", "--json", str(tmp_path / "o.json"), env=env
    )
    assert time.monotonic() - begun < 12 + 20
    assert done.returncode == 4, done.stdout + done.stderr
    assert "no rank began a step within 12 s: rank 1 hangs in model.layers.2.mlp of optimized.subject" in done.stdout
    assert "rank 0   waits in " in done.stdout
    assert "in here_it_hangs" in done.stdout
    failure = json.loads((tmp_path / "o.json").read_text())["failure"]
    assert failure["first"] == 1
    assert [rank["step"] for rank in failure["ranks"]] == ["target step"] * 2
    assert "full_sp_block" in failure["ranks"][1]["stack"]
    assert list((tmp_path / "tmp").iterdir()) == []


HOLD = HANG.replace("time.sleep(1000)", "re.match('(a+)+$', 'a' * 60 + 'b')").replace(
    "threading, time", "re, threading"
)


def test_a_thread_that_keeps_all_others_from_running_is_named(tmp_path):
    """A regular expression holds the interpreter's lock: the host can do nothing then, the parent must."""
    done = spcheck(
        "--tokens", "5", "--backend", "loopback", "--timeout", "10", env=environment(tmp_path, in_host(HOLD))
    )
    assert done.returncode == 4, done.stdout + done.stderr
    assert "no rank began a step within 10 s: rank 1 hangs in model.layers.2.mlp of optimized.subject" in done.stdout
    assert "rank 0   waits in " in done.stdout
    assert "in here_it_hangs" in done.stdout


def test_threads_that_take_their_process_down_are_told_from_their_traces(tmp_path):
    crash = HANG.replace("time.sleep(1000)", "os.abort()").replace("threading, time", "os, threading")
    done = spcheck("--tokens", "5", "--backend", "loopback", env=environment(tmp_path, in_host(crash)))
    assert done.returncode == 4
    assert "the process of all ranks was killed by signal 6 (SIGABRT), and left no report" in done.stdout
    assert "rank 1   was still running" in done.stdout
    assert "  module     model.layers.2.mlp\n" in done.stdout
    assert "in here_it_hangs" in done.stdout


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "import optimized.subject as s\ndef build(*_, **__): raise ValueError('no')\ns.build = build",
            "ValueError: no",
        ),
        ("sys.modules['optimized.subject'] = None", "ModuleNotFoundError: import of optimized.subject halted"),
    ],
    ids=["build", "import"],
)
def test_a_subject_that_cannot_be_made_is_named(code, says, tmp_path):
    done = spcheck("--tokens", "5", "--backend", "loopback", env=environment(tmp_path, in_host(code)))
    assert done.returncode == 4
    assert f"raised {says}" in done.stdout
    assert "in optimized.subject, build" in done.stdout


BREAK = "import gc\ndef broken(): raise ZeroDivisionError('planned')\ngc.freeze = broken"


def test_an_internal_error_leaves_a_report_file(tmp_path):
    env = environment(tmp_path, in_host(BREAK), SECRET_TOKEN="hunter2")
    done = spcheck("--tokens", "5", env=env, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (70, "")
    (path,) = tmp_path.glob("spcheck-error-*.txt")
    assert done.stderr == (
        "spcheck: internal error: the host process broke: ZeroDivisionError: planned; "
        f"please open an issue and attach {path}: it says what ran and where it broke\n"
    )
    text = path.read_text()
    assert "ZeroDivisionError: planned" in text
    assert "diff --tokens 5" in text
    assert "torch     2." in text
    assert "hunter2" not in text
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("backend", ["gloo", "loopback"])
def test_a_mistake_of_spcheck_on_a_rank_is_an_internal_error(backend, tmp_path):
    code = """
    import spcheck.worker.compare

    def broken(*_):
        raise ZeroDivisionError("planned")

    spcheck.worker.compare.Comparer.__call__ = broken
    """
    env = environment(tmp_path, in_host(code))
    done = spcheck("--tokens", "5", "--backend", backend, env=env, cwd=tmp_path)
    assert done.returncode == 70, done.stdout + done.stderr
    assert "raised ZeroDivisionError: planned; please open an issue and attach" in done.stderr
    (report,) = tmp_path.glob("spcheck-error-*.txt")
    assert "in broken" in report.read_text()


def test_a_host_that_does_not_start_is_an_internal_error(tmp_path):
    done = spcheck("--tokens", "5", env=environment(tmp_path, in_host("raise SystemExit('cannot')")), cwd=tmp_path)
    assert done.returncode == 70
    assert "the host process ended without an answer: SystemExit: cannot" in done.stderr
    assert len(done.stderr.splitlines()) == len(list(tmp_path.glob("spcheck-error-*.txt"))) == 1


KILLED = {
    "while it starts": "import os\nos.kill(os.getpid(), {signal})",
    "while it reads the weights": """
        import os
        import spcheck.worker.weights

        def killed(plan):
            os.kill(os.getpid(), {signal})

        spcheck.worker.weights.check_weights = killed
    """,
}


@pytest.mark.parametrize("when", KILLED)
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSEGV])
def test_a_host_that_is_killed_before_its_ranks_start_is_a_failed_run(when, kind, tmp_path):
    env = environment(tmp_path, in_host(KILLED[when].format(signal=int(kind))))
    done = spcheck("--tokens", "5", "--json", str(tmp_path / "o.json"), env=env, cwd=tmp_path)
    assert done.returncode == 4, done.stdout + done.stderr
    said = f"the process of all ranks was killed by signal {int(kind)} ({kind.name}) before its ranks started"
    assert f"failed  {said}\n" in done.stdout
    assert done.stdout.splitlines()[-1] == "FAILED, scheme full-sp  0 probes compared, 0 bitwise equal"
    assert "Traceback" not in done.stderr
    document = json.loads((tmp_path / "o.json").read_text())
    assert (document["outcome"], document["exit_code"]) == ("FAILED", 4)
    assert [finding["message"] for finding in document["findings"]] == [said]
    assert list(tmp_path.glob("spcheck-error-*.txt")) == list((tmp_path / "tmp").iterdir()) == []


def test_a_host_that_is_killed_while_its_ranks_run_names_the_signal(tmp_path):
    kill = HANG.replace("time.sleep(1000)", "os.kill(os.getppid(), 9); time.sleep(1000)")
    env = environment(tmp_path, in_host(kill.replace("threading, time", "os, threading, time")))
    done = spcheck("--tokens", "5", "--backend", "gloo", "--quiet", env=env, cwd=tmp_path)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "the process of all ranks was killed by signal 9 (SIGKILL), and left no report" in done.stdout
    assert list(tmp_path.glob("spcheck-error-*.txt")) == []


def test_a_folder_that_is_gone_is_a_usage_error(tmp_path):
    env = environment(tmp_path)
    (tmp_path / "gone").mkdir()
    script = f"rmdir {tmp_path}/gone; exec {sys.executable} -m spcheck diff --tokens 3"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=env, cwd=tmp_path / "gone")
    assert done.returncode == 2
    assert done.stderr == "spcheck: the current folder cannot be used: No such file or directory\n"


INTERRUPT = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

if "spcheck.launch.host" not in sys.orig_argv:
    sys.meta_path.insert(0, Interrupts())
"""


@pytest.mark.parametrize(
    "name", ["spcheck.cli.app", "click", "spcheck.cli.output", "spcheck.plan.plan", "spcheck.launch.parent"]
)
def test_ctrl_c_while_the_command_is_imported(name, tmp_path):
    env = environment(tmp_path, INTERRUPT.format(name=name))
    command = [sys.executable, "-m", "spcheck", "diff", "--tokens", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, preexec_fn=heed_interrupts)
    assert (done.returncode, done.stdout) == (130, "")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("seed", range(6))
def test_ctrl_c_at_any_moment(seed, tmp_path):
    pipe, env = subprocess.PIPE, environment(tmp_path)
    command = [sys.executable, "-m", "spcheck", *LONG]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env, preexec_fn=heed_interrupts) as process:
        wait_until(lambda: ranks_of(process.pid))
        time.sleep(random.Random(seed).uniform(0.0, 3.0))
        started = ranks_of(process.pid)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert (process.returncode, output, errors.strip()) == (130, "", "spcheck: interrupted")
    wait_until(lambda: not any(map(alive, started)))
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_killed_command_leaves_no_file(tmp_path):
    command = [sys.executable, "-m", "spcheck", *LONG]
    with subprocess.Popen(command, env=environment(tmp_path), stdout=subprocess.DEVNULL) as process:
        started = wait_until(lambda: len(found := ranks_of(process.pid)) == 3 and found)
        process.kill()
    wait_until(lambda: not any(map(alive, started)))
    assert list((tmp_path / "tmp").iterdir()) == []
