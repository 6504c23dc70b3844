"""docs/reading-a-report.md shows what the program prints today: the script's own runs, but for the last digits."""

import pytest

from docs.make_reading_a_report import DOCUMENT, EXAMPLES, ROOT, block_of, output_of
from tests.e2e.test_readme import skeleton

TEXT = DOCUMENT.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_output(name):
    shown, printed = block_of(name, TEXT)[2], output_of(EXAMPLES[name])
    assert skeleton(shown) == skeleton(printed), "run python docs/make_reading_a_report.py"


def test_the_verbose_lines_name_the_same_probes():
    """A skeleton has no names: their places depend on rounding. Where every probe has its line they do not."""
    shown, printed = block_of("verbose", TEXT)[2], output_of(EXAMPLES["verbose"])
    assert [line.split()[-1] for line in shown.splitlines()] == [line.split()[-1] for line in printed.splitlines()]


def test_the_faults_show_what_the_document_says_of_them():
    value, contract = block_of("value", TEXT)[2], block_of("contract", TEXT)[2]
    assert "only on rank 1" in value
    assert "DIFFERS" in value
    assert value.count("BROKEN") == 1
    assert "parameters   BROKEN" in value
    differs = "differs from the checkpoint on rank 1: first at [3, 5], "
    assert f"parameters  model.layers.0.mlp.down_proj.weight {differs}" in value
    assert "DIFFERS" not in contract
    assert "expert work  BROKEN" in contract


@pytest.mark.parametrize("page", ["reading-a-report.md", "shell-completion.md"])
def test_it_is_linked_from_the_front_page(page):
    assert f"(docs/{page})" in (ROOT / "README.md").read_text(encoding="utf-8")
