"""The edge: what ``--json`` writes into, and streams that are not there."""

import os
import stat
import subprocess
import sys
import threading

import pytest

from spcheck.cli.output import JsonTarget, echo
from spcheck.errors import UsageError


def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path):
    target = tmp_path / "out.json"
    target.write_text("an old and longer text")
    target.chmod(0o640)
    JsonTarget(str(target)).write("{}")
    assert target.read_text() == "{}"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    JsonTarget(str(tmp_path / "link.json")).write("{}")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "{}"


def test_a_pipe_is_written_into(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    JsonTarget(str(tmp_path / "pipe")).write("{}")
    reader.join(10)
    assert read == ["{}"]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize("name", ["missing/out.json", "."])
def test_what_cannot_be_written_is_told_before_the_run(tmp_path, name):
    with pytest.raises(UsageError, match="cannot be written"):
        JsonTarget(str(tmp_path / name))


def test_a_full_disk_is_a_plain_error():
    with pytest.raises(UsageError, match="--json /dev/full cannot be written: No space left on device"):
        JsonTarget("/dev/full").write("{}")


def test_closed_streams_are_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    echo("text")


def test_what_a_stream_cannot_show_is_replaced(monkeypatch, tmp_path):
    with (tmp_path / "out").open("w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        echo("cut\u2026\n")
    assert (tmp_path / "out").read_text() == "cut?\n"


@pytest.mark.parametrize(("stream", "code"), [(2, 2), (1, 2)])
def test_a_full_stream_is_never_exit_1(stream, code):
    command = (
        f"{sys.executable} -m spcheck diff --tokens {0 if stream == 2 else 1} --backend loopback {stream}>/dev/full"
    )
    assert subprocess.run(["bash", "-c", command], timeout=120, capture_output=True).returncode == code
