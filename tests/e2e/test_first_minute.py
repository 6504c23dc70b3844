"""What somebody meets first: help, completion, the progress line, and how much of a report is shown."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fixtures.mutants import MUTANTS
from spcheck.case import Case
from spcheck.cli.app import cli
from spcheck.report.text import to_line, to_text
from tests.conftest import compare_case

SCRIPT = str(Path(sys.executable).parent / "spcheck")
HERE = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
SPCHECK = [sys.executable, "-m", "spcheck"]
RUN = ["diff", "--tp", "2", "--tokens", "5", "--backend", "loopback"]


def spcheck(*words, **environment):
    return subprocess.run(
        [*SPCHECK, *words], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


def test_alone_it_says_what_it_is_for_and_how_to_start():
    done = spcheck()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == spcheck("--help").stdout
    for text in ("spcheck doctor  ", "spcheck diff --tp 2 --tokens 17  ", "Exit codes:", "Commands:"):
        assert text in done.stdout


@pytest.mark.parametrize("words", [[], *[[name] for name in cli.commands]])
def test_every_help_has_an_example_and_fits(words):
    done = spcheck(*words, "--help")
    assert re.search(r"^  +spcheck \w+", done.stdout, re.MULTILINE)
    assert "Exit codes:" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_help_imports_neither_torch_nor_rich():
    code = (
        "import sys\nfrom spcheck.cli.app import cli\n"
        "try: cli.main(['diff', '--help'])\nexcept SystemExit: pass\n"
        "sys.exit(any(m.split('.')[0] in ('torch', 'rich', 'numpy', 'hypothesis') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def completions(line):
    """What bash would offer at the end of this line: ``(kind, text)``."""
    words = line.split(" ")
    environment = {"_SPCHECK_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run([SCRIPT], capture_output=True, text=True, timeout=60, env={**HERE, **environment})
    assert done.stderr == ""
    return [tuple(answer.split(",", 1)) for answer in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("spcheck d", {"diff", "doctor"}),
        ("spcheck diff --numerics floa", {"float32", "float64"}),
        ("spcheck diff --scheme f", {"full-sp"}),
        ("spcheck diff --padd", {"--padding-content"}),
        ("spcheck diff --backend ", {"auto", "gloo", "nccl", "loopback"}),
        ("spcheck doctor --j", {"--json"}),
    ],
)
def test_completion(line, offered):
    assert {text for kind, text in completions(line) if kind == "plain"} == offered


def test_files_and_folders_are_left_to_the_shell():
    assert completions("spcheck diff --json ")[0][0] == "file"
    kinds = {kind for kind, _ in completions("spcheck diff --model ")}
    assert kinds == {"plain", "file"}
    assert ("plain", "dsv32-tiny") in completions("spcheck diff --model dsv")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell(shell):
    environment = {**HERE, "_SPCHECK_COMPLETE": f"{shell}_source"}
    done = subprocess.run([SCRIPT], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0
    assert "_SPCHECK_COMPLETE" in done.stdout


def test_bash_completes_with_it():
    """A real bash: the script of README's line is evaluated and its function asked."""
    bash = (
        f'PATH="{Path(SCRIPT).parent}:$PATH"; eval "$(_SPCHECK_COMPLETE=bash_source spcheck)"; '
        "COMP_WORDS=(spcheck diff --numerics floa); COMP_CWORD=3; _spcheck_completion spcheck floa --numerics; "
        'echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", bash], capture_output=True, text=True, timeout=60, env=HERE)
    assert done.stdout.split() == ["float64", "float32"], done.stderr


def test_completion_imports_no_torch():
    code = "import sys\nfrom spcheck.cli.app import main\ntry: main()\nexcept SystemExit: pass\n"
    code += "sys.exit('torch' in sys.modules)"
    environment = {"_SPCHECK_COMPLETE": "bash_complete", "COMP_WORDS": "spcheck diff --model d", "COMP_CWORD": "3"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, env=os.environ | environment)
    assert done.returncode == 0


def on_a_terminal(words, **environment):
    """(stdout and stderr as a terminal of 80 columns gets them, exit code)."""
    receive, send = pty.openpty()
    process = subprocess.Popen([*SPCHECK, *words], stdout=send, stderr=send, env={**os.environ, **environment})
    os.close(send)
    data = b""
    while True:
        try:
            chunk = os.read(receive, 1 << 16)
        except OSError:  # Linux says so at the end
            break
        if not chunk:
            break
        data += chunk
    os.close(receive)
    return data.decode(), process.wait(60)


def test_progress_on_a_terminal_and_nowhere_else():
    shown, code = on_a_terminal(RUN, TERM="xterm")
    assert code == 0
    steps = re.findall(r"\r\x1b\[K(\[\d/3\] [^\r]*?) \.\.\.", shown)
    named = [step for step in steps if ": " not in step]  # others say how far the first rank is
    assert named == ["[1/3] starting ranks", "[2/3] running 2 ranks on loopback", "[3/3] judging"]
    assert shown.index("judging ...\r\x1b[K") < shown.index("dsv32-tiny")  # wiped before the report
    dumb, _ = on_a_terminal(RUN, TERM="dumb")
    assert "starting ranks" not in dumb
    assert "\x1b" not in dumb
    piped = spcheck(*RUN)
    assert piped.stderr == ""
    assert "\x1b" not in piped.stdout


def test_a_long_run_says_how_far_it_is():
    shown, code = on_a_terminal([*RUN, "--generate", "8"], TERM="xterm")
    assert code == 0
    where = re.findall(r"\[2/3\] running 2 ranks on loopback: (\w+), (generated step \d+)'s", shown)
    assert {side for side, _ in where} <= {"reference", "optimized"}
    assert len({step for _, step in where}) > 1


def test_quiet_is_one_line():
    done = spcheck(*RUN, "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"EQUAL, scheme full-sp  \d+ probes compared, \d+ bitwise equal\n", done.stdout)
    shown, _ = on_a_terminal([*RUN, "-q"], TERM="xterm")
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown).count("\n") == 1
    assert "starting" not in shown


def test_quiet_and_json_on_stdout():
    done = spcheck(*RUN, "-q", "--json", "-")
    assert done.stdout.startswith("{")
    assert len(done.stderr.splitlines()) == 1


def test_quiet_and_verbose_is_a_mistake():
    done = spcheck(*RUN, "-q", "-v")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "spcheck: give --verbose or --quiet, not both\n"


def test_verbose_shows_every_probe_once_and_fits():
    done = spcheck(*RUN, "--mtp-steps", "2", "-v")
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines if not line.startswith("repeat")) <= 80
    seen = [line.split()[-1] for line in lines if re.match(r"(ok|DIFFERS|-) +\d+ +\d+ ", line)]
    # 140 of the target step, 42 of each draft step, 18 caches; 3 less a layer where all keys are chosen unscored.
    assert len(seen) == 242 - 3 * 7
    headings = [
        line.split(",")[0] for line in lines if line.endswith("exact (a step that rounds: 4e-15 of the largest)")
    ]
    assert headings == ["target step", "draft step 0", "draft step 1", "caches after the last step"]
    assert lines[-1].startswith("EQUAL, scheme full-sp  221 probes compared")


def mutated(name):
    mutant = next(m for m in MUTANTS if m.name == name)
    with mutant.seam():
        return compare_case(Case(**{"backend": "loopback", **mutant.kills}))


def test_one_line_of_a_divergence_names_the_place():
    line = to_line(mutated("one-rank-holds-another-replica"))
    assert line.count("\n") == 1
    assert line.startswith("DIVERGED, scheme full-sp  ")
    assert "bitwise equal, first at model.layers.0.mlp.out, request 0 token " in line


def test_one_line_of_a_failure_says_what_failed():
    line = to_line(mutated("attention-input-not-trimmed"))
    assert line.count("\n") == 1
    assert line.startswith("FAILED, scheme full-sp  ")


def test_verbose_marks_what_differs():
    comparison = mutated("dropped-expert-groups-masked-with-zero")
    lines = to_text(comparison, verbose=True).splitlines()
    over = [r.probe for r in comparison.results if r.over]
    assert [line.split()[-1] for line in lines if line.startswith("DIFFERS ")] == over
    assert any(re.match(r"DIFFERS +17 +\d+ +choice  model\.layers\.2\.mlp\.gate\.choose\.out$", line) for line in lines)


def test_a_narrow_page_cuts_no_name():
    comparison = compare_case(Case(requests=((3,),), tp=2))
    lines = to_text(comparison, verbose=True, width=60).splitlines()
    assert {line.split()[-1] for line in lines if line} >= {r.probe for r in comparison.results}


def test_a_summary_line_keeps_the_end_of_a_name():
    text = to_text(compare_case(Case(requests=((3,),), tp=2)))
    assert not re.search(r"…$", text, re.MULTILINE)


def test_click_itself_finds_every_command():
    assert CliRunner().invoke(cli, ["--help"]).exit_code == 0
