"""Taps are checked: a misspelt word must not switch a check off."""

import pytest
from torch import nn

from spcheck.subjects.protocol import Tap
from spcheck.worker.capture import Capture, TapError

GOOD = ("0", "out", 0, "Replicate", "value")


@pytest.mark.parametrize(
    ("position", "word"), [(0, "1"), (1, "inn"), (2, -1), (3, "Replicated"), (4, "values")], ids=str
)
def test_a_misspelt_tap_is_refused(position, word):
    root = nn.Sequential(nn.Linear(2, 2))
    Capture(root, {"probe": Tap(*GOOD)}).close()
    with pytest.raises(TapError, match="probe"):
        Capture(root, {"probe": Tap(*GOOD[:position], word, *GOOD[position + 1 :])})
