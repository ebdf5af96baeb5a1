"""The page on credit says what its examples print, and names every strategy."""

import re

from lightning_rl.config import keys
from tests.pages import ROOT, check_examples


def test_its_examples_print_what_it_says() -> None:
    assert check_examples("docs/concepts/credit.md") == 7


def test_it_names_every_strategy() -> None:
    [key] = [key for key in keys() if key.name == "algorithm.credit.strategy"]
    table = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs/concepts/credit.md").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"'(\w+)'", str(key.type))) == table
