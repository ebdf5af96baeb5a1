"""The page on training says what its examples print, and names keys that there are."""

import re

from lightning_rl.config import compose
from tests.pages import ROOT, check_examples


def test_its_examples_print_what_it_says() -> None:
    assert check_examples("docs/training.md") == 3


def test_its_lines_of_config_are_taken() -> None:
    lines = re.findall(r"`((?:actor_rollout_ref|critic)\.[\w.]+=\w+)`", (ROOT / "docs" / "training.md").read_text())
    assert len(lines) == 5
    compose(command_line=lines)
