"""The page on algorithms names every method, and its lines of config are taken as they stand."""

import re

import pytest
import torch

from lightning_rl.config import compose
from lightning_rl.ppo_algorithm import PPO
from lightning_rl.rl import losses
from lightning_rl.rl.advantages import ESTIMATORS
from lightning_rl.rl.aggregation import MODES
from lightning_rl.rl.losses import LOSSES, LossInputs, LossOptions
from tests.pages import ROOT, check_examples

PAGE = (ROOT / "docs" / "algorithms.md").read_text()
LINES = re.findall(r"^\| .* \| `([\w.]+=[^`]*)` \|$", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_config_is_taken(line: str) -> None:
    PPO(compose(command_line=line.split()))


def test_its_examples_of_ones_own_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LOSSES", known := dict(LOSSES))
    assert check_examples("docs/algorithms.md") == 2
    nothing = torch.zeros(3)
    own = losses.token_loss_of("own", known["clipped_at_10"], LossInputs(*[nothing] * 4), LossOptions())
    assert own.loss.tolist() == [0.0] * 3


def test_every_method_is_named() -> None:
    assert len(LINES) == 16
    named = set(re.findall(r"`([\w-]+)`", PAGE))
    assert {*ESTIMATORS, *LOSSES, *MODES} - {"ppo_clip"} <= named


def test_bounds_are_quoted_as_the_page_says() -> None:
    quoted = re.search(r'`rollout_is_threshold="([^"]*)"`', PAGE)
    assert quoted is not None
    line = f"algorithm.rollout_correction.rollout_is_threshold={quoted[1]}"
    config = compose(command_line=["algorithm.rollout_correction.rollout_is=token", line])
    assert config.algorithm.rollout_correction.rollout_is_threshold == "0.5_5.0"
