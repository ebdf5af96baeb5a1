"""A run that was killed in the middle of an update, and resumed, ends with the weights of an unbroken one, bit by bit.

What is compared are runs over the same stored rollouts: a run asks for its rollouts by ids that its seed and step make,
so that one that begins with another's store, or takes up an earlier checkpoint of its own, reads instead of sampling.
"""

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_rl as lrl
from lightning_rl.store.sql import SqlStore
from lightning_rl.telemetry.metrics.jsonl import read
from lightning_rl.training import checkpoint
from tests.lightning_rl.ppo.agents import two_calls

ROOT = Path(__file__).parents[3]
CHECKPOINT = ROOT / "examples" / "sql_agent" / "checkpoint"
STEPS, TASKS = 4, [0, 1, 2, 3, 4]

# Critic and actor make two optimizer steps each in a training step: the eleventh is in the midst of the actor's third.
PROGRAM = """
import os, signal, sys
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.lightning_rl.ppo import test_ppo_resume

left = 11

def die_at_last(*_):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

register_optimizer_step_post_hook(die_at_last)
test_ppo_resume.train(Path(sys.argv[1]))
"""

pytestmark = pytest.mark.e2e


def train(run_dir: Path) -> lrl.PPO:
    """A run of much that has a state: critic, schedules, shuffled mini-batches, adaptive KL coefficient, tuning."""
    config: dict[str, Any] = {
        "data": {"train_batch_size": 4, "max_response_length": 8},
        "actor_rollout_ref": {
            "model": {"path": str(CHECKPOINT)},
            "actor": {
                "ppo_mini_batch_size": 2,
                "shuffle": True,
                "optim": {"lr": 1e-3, "lr_warmup_steps": 2, "lr_scheduler_type": "cosine"},
            },
            "rollout": {"n": 2, "renderer": "qwen3", "max_model_len": 128},
        },
        "algorithm": {
            "adv_estimator": "gae",
            "use_kl_in_reward": True,
            "kl_ctrl": {"type": "adaptive", "horizon": 100},
        },
        "critic": {"shared_trunk": False, "optim": {"lr": 1e-3}},
        "trainer": {
            "total_training_steps": STEPS,
            "save_freq": 1,
            "test_freq": 2,
            "logger": ["jsonl"],
            "resume_mode": "auto",
        },
    }
    ppo = lrl.PPO(config, tune_dataset=[5, 6, 7, 8])
    lrl.Trainer(two_calls, n_runners=4, run_dir=run_dir).fit(ppo, TASKS)
    return ppo


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in the midst of its third step, and then ran to its end."""
    run_dir = tmp_path_factory.mktemp("killed")
    killed = subprocess.run([sys.executable, "-c", PROGRAM, str(run_dir)], cwd=ROOT, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert checkpoint.latest(run_dir / "checkpoints") == run_dir / "checkpoints" / "step-2"
    train(run_dir)
    return run_dir


def stored(run_dir: Path) -> int:
    store = SqlStore(f"sqlite:///{run_dir / 'store.db'}")
    rollouts = len(store.page(limit=1000)[0])
    store.close()
    return rollouts


def assert_same(a: Any, b: Any, at: str = "state") -> None:
    assert type(a) is type(b), at
    if isinstance(a, dict):
        assert a.keys() == b.keys(), at
        for key in a:
            assert_same(a[key], b[key], f"{at}[{key!r}]")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), at
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            assert_same(one, other, f"{at}[{i}]")
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, at


def assert_same_end(one: Path, other: Path, steps: int = STEPS) -> None:
    """Weights, optimizer, schedule and all that a further step would go on from."""
    ends = [run_dir / "checkpoints" / f"step-{steps}" for run_dir in (one, other)]
    files, of_other = (
        {file.relative_to(end): file.read_bytes() for file in end.rglob("*.safetensors")} for end in ends
    )
    assert files
    assert files == of_other
    begun = (CHECKPOINT / "model.safetensors").read_bytes()
    assert files.get(Path("model.safetensors")) != begun  # none where an adapter alone is written
    state, others = (checkpoint.load_state(end) for end in ends)
    for each in (state, others):
        each.pop("rng")  # of the process that samples too: how many numbers it drew depends on what was stored
    assert_same(state, others)


@pytest.mark.smoke
def test_a_killed_run_ends_with_the_weights_of_an_unbroken_one(resumed: Path, tmp_path: Path) -> None:
    """The unbroken one begins with the store of the killed one alone, and so samples nothing."""
    for name in ("store.db", "run.id"):
        shutil.copy(resumed / name, tmp_path / name)
    before = stored(tmp_path)
    train(tmp_path)
    assert stored(tmp_path) == before
    assert_same_end(resumed, tmp_path)
    for run_dir in (resumed, tmp_path):
        assert [row["step"] for row in read(run_dir / "metrics.jsonl")][-STEPS:] == list(range(1, STEPS + 1))
        assert read(run_dir / "metrics.jsonl")[-1]["tokens/pending"] == 0


@pytest.mark.long
def test_a_run_goes_on_from_the_checkpoint_before_a_broken_one(
    resumed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And comes to the same end, with the best checkpoint's weights as the final model."""
    again = tmp_path / "again"
    shutil.copytree(resumed, again)
    last = again / "checkpoints" / f"step-{STEPS}"
    (last / "model.safetensors").write_bytes((last / "model.safetensors").read_bytes()[:-1])
    shutil.rmtree(again / "checkpoints" / "step-3")
    shutil.rmtree(again / "model")
    ppo = train(again)
    assert [m for m in caplog.messages if f"{last} is broken and passed over: model.safetensors has" in m]
    assert_same_end(resumed, again)
    best = ppo.tuning.best_step
    assert best is not None
    expected = (again / "checkpoints" / f"step-{best}" / "model.safetensors").read_bytes()
    assert (again / "model" / "model.safetensors").read_bytes() == expected
    assert (resumed / "model" / "model.safetensors").read_bytes() == expected
