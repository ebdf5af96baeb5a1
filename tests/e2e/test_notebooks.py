"""The notebooks of `docs/notebooks` run from top to bottom, in a folder of their own, and show what they say."""

from pathlib import Path

import nbformat
import pytest

from tests.pages import ROOT
from website.rerun import executed

pytestmark = pytest.mark.e2e
NOTEBOOKS = ROOT / "docs" / "notebooks"


@pytest.mark.long
@pytest.mark.parametrize("name", ["first_hour", "own_agent", "look_at_a_run"])
def test_it_runs_and_shows_what_it_showed(name: str, tmp_path: Path) -> None:
    kept = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    book = executed(NOTEBOOKS / f"{name}.ipynb", tmp_path)
    for before, after in zip(kept.cells, book.cells, strict=True):
        if before.cell_type == "code":
            assert bool(after.outputs) == bool(before.outputs), after.source
            for kind in ("<iframe", "<svg"):
                assert (kind in str(after.outputs)) == (kind in str(before.outputs)), after.source


def test_every_notebook_is_run() -> None:
    assert {file.stem for file in NOTEBOOKS.glob("*.ipynb")} == {"first_hour", "own_agent", "look_at_a_run"}
