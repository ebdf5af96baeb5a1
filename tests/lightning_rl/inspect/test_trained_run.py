"""A run that PPO really trained, explained down to a token, and looked through by the doctor."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lightning_rl as lrl
from lightning_rl.inspect import call, recorded, rescore
from lightning_rl.telemetry.metrics import jsonl
from lightning_rl.trajectories import step_record
from lightning_rl_adapters.span import unpack_logprobs
from tests.lightning_rl.ppo.agents import two_calls

ROOT = Path(__file__).parents[3]
CHECKPOINT = ROOT / "examples" / "sql_agent" / "checkpoint"
CONFIG: dict[str, Any] = {
    "data": {"train_batch_size": 4, "max_response_length": 8},
    "actor_rollout_ref": {
        "model": {"path": str(CHECKPOINT)},
        "actor": {"optim": {"lr": 1e-3}},
        "rollout": {"n": 2, "renderer": "qwen3", "max_model_len": 128},
    },
    "trainer": {"total_training_steps": 1, "logger": ["jsonl"]},
}

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    lrl.Trainer(two_calls, n_runners=4, run_dir=folder).fit(lrl.PPO(CONFIG), [0, 1, 2, 3], val_dataset=[0])
    return folder


def command(run_dir: Path, *arguments: str) -> str:
    """What the command line prints, as the installed program does."""
    words = [sys.executable, "-m", "lightning_rl", *arguments, "--run-dir", str(run_dir)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_a_call_is_explained_with_what_its_tokens_were_and_are_now(run_dir: Path) -> None:
    rollout = json.loads(command(run_dir, "explain", "train-0-1-0-0", "--json"))
    assert rollout["training"]["step"] == 1
    [attempt] = rollout["attempts"]
    assert [one["training"]["credit"] for one in attempt["calls"]] == [rollout["reward"]] * 2
    told = json.loads(command(run_dir, "explain", "train-0-1-0-0", "--call", "2", "--now", "--json"))
    training, tokens = told["training"], told["tokens"]
    assert training["advantage"] == pytest.approx((training["credit"] - training["baseline"]) / training["scale"])
    assert training["trained_tokens"] == len(tokens) == sum(token["trained"] for token in tokens)
    assert told["checkpoint"] == "checkpoints/step-1"
    for token in tokens:
        assert abs(token["difference"]) < 1e-3
        assert token["now_logprob"] <= 0
        assert token["policy_version"] == 0
    said = "".join(token["text"] for token in tokens)
    assert told["answer"][0]["content"].strip() in said
    told = command(run_dir, "explain", "train-0-1-0-0", "--call", "2", "--token", "0", "--now")
    assert told.startswith("token 0 of call 2")
    assert "checkpoints/step-1 gives it now: logprob" in told


@pytest.mark.long
def test_what_weights_make_of_a_call_now_is_what_they_made_of_it_then(run_dir: Path) -> None:
    """Under the weights that sampled it every token has the logprob that was recorded."""
    with recorded.opened(run_dir) as connection:
        trace = recorded.trace(connection, recorded.find(connection, "train-0-1-0-0"))
    attempt, call_id = call.find(trace, "2")
    path = call.path_of(attempt, call_id)
    assert len(path) == 2
    assert rescore.log_probs(CHECKPOINT, path) == pytest.approx(path[-1].logprobs, abs=1e-4)
    assert rescore.log_probs(rescore.newest(run_dir), path) != pytest.approx(path[-1].logprobs, abs=1e-4)


@pytest.mark.long
def test_the_record_has_the_entropy_of_each_trained_token(run_dir: Path) -> None:
    [step] = step_record.read_all(run_dir)
    row = jsonl.read(run_dir / "metrics.jsonl")[-1]
    of_tokens = []
    for one in (each for rollout in step.rollouts for each in rollout.calls.values()):
        found = unpack_logprobs(one.entropies)
        assert len(found) == one.trained_tokens
        of_tokens += found
    assert min(of_tokens) >= 0
    assert sum(of_tokens) / len(of_tokens) == pytest.approx(row["actor/entropy"], rel=0.2)  # of several mini-batches


@pytest.mark.smoke
def test_validation_is_explained_as_what_it_is(run_dir: Path) -> None:
    printed = command(run_dir, "explain", "val-0-1-0-0")
    assert "counts, and is not trained: validation" in printed
    assert "not told what training made of it" not in printed


@pytest.mark.smoke
def test_the_doctor_looks_at_the_run(run_dir: Path) -> None:
    looked_at = json.loads(command(run_dir, "doctor", "--json"))["looked_at"]
    assert (looked_at["steps"], looked_at["rollouts"], looked_at["calls"]) == (1, 8, 16)
    assert next(number for name, number in looked_at.items() if name.startswith("share of received tokens")) > 0
    assert looked_at["mean distance of sampler and trainer"] < 1e-3
    printed = command(run_dir, "doctor")
    assert "looked at:" in printed
    assert not any(name in printed for name in ("missing_", "agent_error", "logprob_mismatch", "drift_"))
