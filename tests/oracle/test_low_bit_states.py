"""Optimizer states of 8 and 4 bits, by torchao itself: they go on from a checkpoint as if there had been none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rl.training.optimizer import Optimizer
from lightning_rl.training.state import opened, write
from tests.lightning_rl.training.test_optimizer import config, give_gradients

pytest.importorskip("torchao.optim", exc_type=ImportError)

pytestmark = pytest.mark.oracle


def of_few_bits(
    folder: Path | None, name: str, steps: range, begin: tuple[list[nn.Parameter], Any] | None = None
) -> Any:
    """Weights and state after some steps of one of torchao's optimizers, whose state may go through a folder."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(4))] if begin is None else begin[0]
    optimizer = Optimizer(parameters, config(optimizer=name, optimizer_impl="torchao.optim", lr=0.01))
    if begin is not None:
        optimizer.load_state_dict(begin[1])
    for step in steps:
        give_gradients(parameters, step)
        optimizer.step()
        optimizer.offload()
        optimizer.onload()
        optimizer.schedule_step()
    state = optimizer.state_dict()
    if folder is not None:
        write(folder, state)
        state = opened(folder)
    return parameters, state


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_states_of_few_bits_go_on_from_a_folder_bit_by_bit(tmp_path: Path, name: str) -> None:
    with torch.compiler.set_stance("force_eager"):  # what torchao compiles is the same uncompiled
        whole, _ = of_few_bits(None, name, range(4))
        half, state = of_few_bits(tmp_path / "state", name, range(2))
        rest, _ = of_few_bits(None, name, range(2, 4), (half, state))
    assert state["optimizer"]["state"][0]["exp_avg"]["low_bit"].startswith("OptimState")
    assert all(torch.equal(one, other) for one, other in zip(whole, rest, strict=True))
