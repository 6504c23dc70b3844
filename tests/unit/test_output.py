"""The edge: what ``--json`` writes into, and streams that are not there."""

import os
import stat
import sys
import threading

import pytest

from spcheck.errors import UsageError
from spcheck.output import JsonTarget, echo


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
