"""How a host without a report is told: a signal is never spcheck's own mistake, an exit before the start always is."""

import pytest

from spcheck.launch.ending import ending, signal_text


@pytest.mark.parametrize(
    ("code", "began", "says"),
    [
        (-9, False, "was killed by signal 9 (SIGKILL) before its ranks started"),
        (-9, True, "was killed by signal 9 (SIGKILL), and left no report"),
        (3, True, "ended with exit code 3 and no report"),
        (None, True, "goes on with its channel closed and no report"),
    ],
)
def test_what_took_the_run_down(code, began, says):
    assert ending(code, began=began) == f"the process of all ranks {says}"


@pytest.mark.parametrize("code", [0, 1, None])
def test_an_exit_before_the_ranks_start_is_no_failed_run(code):
    assert ending(code, began=False) is None


def test_a_signal_without_a_name_is_a_number():
    assert signal_text(63) == "signal 63"
