"""An internal error's report, and files without a name where the system has none."""

import os
import stat
import tempfile
from contextlib import closing

import pytest

from spcheck.cli.internal import internal_error, report_text
from spcheck.errors import HostFailed, UsageError
from spcheck.launch import files


def raised():
    try:
        raise ZeroDivisionError("by\nzero")
    except ZeroDivisionError as error:
        return error


def test_the_file_is_new_and_holds_the_traceback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sentence = internal_error(raised())
    (path,) = tmp_path.iterdir()
    assert sentence.startswith("internal error: ZeroDivisionError: by zero; please open an issue and attach")
    assert str(path) in sentence
    assert 'raise ZeroDivisionError("by\\nzero")' in path.read_text()


def test_what_the_host_said_is_in_it():
    assert "The host process said:\nTraceback of the host" in report_text(
        HostFailed("it broke", "Traceback of the host")
    )


def test_the_temporary_folder_is_the_second_choice(tmp_path, monkeypatch):
    monkeypatch.chdir("/proc")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert str(tmp_path) in internal_error(raised())
    assert len(list(tmp_path.iterdir())) == 1


def test_no_folder_takes_it(monkeypatch):
    monkeypatch.chdir("/proc")
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    said = "internal error: ZeroDivisionError: by zero (no folder takes a report file)"
    assert internal_error(raised()) == said


@pytest.fixture
def no_files_in_memory(monkeypatch):
    """As on systems that have none."""
    monkeypatch.setattr(files, "_in_memory", lambda: False)


@pytest.mark.usefixtures("no_files_in_memory")
def test_a_private_folder_where_there_are_no_files_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with closing(files.MeetingPlace()) as meeting, files.nameless_file() as file:
        store = meeting.fresh()
        assert meeting.handles == ()
        assert store != meeting.fresh(), "each case has a place of its own"
        assert stat.S_IMODE(store.parent.stat().st_mode) == 0o700
        file.write(b"x")
        assert list(tmp_path.iterdir()) == [store.parent]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_files_in_memory")
def test_no_usable_temporary_folder_is_a_usage_error(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    for made in (files.nameless_file, files.MeetingPlace):
        with pytest.raises(UsageError, match="no temporary file can be made"):
            made()


def test_a_file_in_memory_is_met_in_by_its_handle():
    with closing(files.MeetingPlace()) as meeting:
        (handle,) = meeting.handles
        meeting.fresh().write_text("met")
        assert os.pread(handle, 3, 0) == b"met"
        meeting.fresh()
        assert os.pread(handle, 3, 0) == b"", "the next case must not read what this one left"
