"""Checkpoints: whole or not there, and what is saved is what is loaded."""

import resource
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_rl.training import checkpoint
from lightning_rl.training.checkpoint import CheckpointError

MODEL = Path(__file__).parents[3] / "examples" / "sql_agent" / "checkpoint"


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(MODEL)
    return loaded


def test_what_is_saved_is_loaded(model: torch.nn.Module, tmp_path: Path) -> None:
    state = {
        "step": 3,
        "actor": {"optimizer": {"state": {0: {"exp_avg": torch.randn(3)}}}},
        "rng": torch.get_rng_state(),
    }
    folder = checkpoint.save(model, MODEL, tmp_path / "step-3", state)
    found = checkpoint.load_state(folder)
    assert found["step"] == 3
    assert torch.equal(found["rng"], state["rng"])  # type: ignore[arg-type]
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_the_latest_is_the_newest_whole_one(model: torch.nn.Module, tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "none") is None
    for step in (2, 10):
        checkpoint.save(model, MODEL, tmp_path / f"step-{step}", {"step": step})
    (tmp_path / "step-11.partial").mkdir()
    (tmp_path / "step-12").mkdir()  # somebody's own
    assert checkpoint.latest(tmp_path) == tmp_path / "step-10"


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(model: torch.nn.Module, tmp_path: Path) -> None:
    """A real failing write: no file of this process may be longer than a megabyte."""
    checkpoint.save(model, MODEL, tmp_path / "step-1", {"step": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"checkpoint .*step-2 cannot be written \(.*\); make room, then resume"
        ):
            checkpoint.save(model, MODEL, tmp_path / "step-2", {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1"
    assert checkpoint.save(model, MODEL, tmp_path / "step-2", {"step": 2}) == checkpoint.latest(tmp_path)
