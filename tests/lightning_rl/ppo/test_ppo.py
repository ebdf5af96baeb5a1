"""PPO through the real parts, a step or two: it refuses a wrong engine, and agents that fail are data."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lightning_rl as lrl
from lightning_rl.config import ConfigError
from lightning_rl.files import RunFolderBusy
from lightning_rl.ppo.rollout_correction import SamplerMismatch
from lightning_rl.ppo.weight_sync import WeightSync
from lightning_rl.processes.child import ChildDied
from lightning_rl.store.sql import SqlStore
from lightning_rl.telemetry.metrics.jsonl import read
from lightning_rl.trainer import RunFolderUsed
from lightning_rl.training.actor import Actor
from lightning_rl.trajectories import step_record
from lightning_rl.trajectories.run_warnings import AllFailed
from lightning_rl_adapters.call import calls_of
from lightning_rl_adapters.span import unpack_logprobs
from tests.lightning_rl.ppo.agents import some_fail, two_calls

ROOT = Path(__file__).parents[3]
CHECKPOINT = ROOT / "examples" / "sql_agent" / "checkpoint"

pytestmark = pytest.mark.e2e


def config(**trainer: Any) -> dict[str, Any]:
    return {
        "data": {"train_batch_size": 4, "max_response_length": 8},
        "actor_rollout_ref": {
            "model": {"path": str(CHECKPOINT)},
            "rollout": {"n": 2, "renderer": "qwen3", "max_model_len": 128},
        },
        "trainer": {"total_training_steps": 1, "logger": ["jsonl"], **trainer},
    }


@pytest.mark.smoke
def test_agents_that_fail_are_data(tmp_path: Path) -> None:
    algorithm = lrl.PPO(config())
    lrl.Trainer(some_fail, n_runners=4, run_dir=tmp_path).fit(algorithm, [0, 1, 2, 3])
    [row] = read(tmp_path / "metrics.jsonl")
    assert row["rollouts/agent_failed"] == 4  # of tasks 1 and 2, two each
    assert row["critic/rewards/mean"] == 0.5
    assert row["rollouts/rows"] == 6
    assert row["tokens/received"] == row["tokens/trained"] > 0


@pytest.mark.long
def test_rollouts_without_calls_train_nothing(tmp_path: Path) -> None:
    with pytest.raises(AllFailed, match="step 1: all 8 rollouts made no call to the model"):
        lrl.Trainer(some_fail, n_runners=4, run_dir=tmp_path / "stops").fit(lrl.PPO(config()), [3, 3, 3, 3])
    algorithm = lrl.PPO(config(all_failed="go_on"))
    lrl.Trainer(some_fail, n_runners=4, run_dir=tmp_path).fit(algorithm, [3, 3, 3, 3])
    [row] = read(tmp_path / "metrics.jsonl")
    assert (row["rollouts/rows"], row["tokens/received"], row["critic/rewards/mean"]) == (0, 0, 1)
    assert "actor/pg_loss" not in row


@pytest.mark.long
def test_a_rule_may_leave_failed_agents_out(tmp_path: Path) -> None:
    algorithm = lrl.PPO(config() | {"algorithm": {"agent_failure": "exclude"}})
    lrl.Trainer(some_fail, n_runners=4, run_dir=tmp_path).fit(algorithm, [0, 1, 2, 3])
    [row] = read(tmp_path / "metrics.jsonl")
    assert row["rollouts/without_reward"] == 4
    assert row["critic/rewards/mean"] == 1.0
    assert row["tokens/excluded/no_reward"] > 0


@pytest.mark.long
def test_an_engine_with_other_weights_is_refused(tmp_path: Path) -> None:
    class WrongEngine(lrl.PPO):
        def open(self, run_dir: Path) -> Any:
            endpoint = super().open(run_dir)
            torch.manual_seed(0)
            weights = {name: w + 0.01 * torch.randn_like(w) for name, w in self.models.model.named_parameters()}
            self.policy.update_weights(weights, 0)
            return endpoint

    trainer = lrl.Trainer(some_fail, n_runners=4, run_dir=tmp_path)
    with pytest.raises(SamplerMismatch, match=r"on the first batch the log probabilities of sampler .* are up to"):
        trainer.fit(WrongEngine(config()), [0, 1, 2, 3])
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.long
def test_a_server_that_dies_ends_the_run_by_name_and_leaves_no_process(tmp_path: Path) -> None:
    def children(module: str) -> list[int]:
        command = ["pgrep", "-P", str(os.getpid()), "-f", module]
        return [int(pid) for pid in subprocess.run(command, capture_output=True, text=True).stdout.split()]

    class ServerDies(lrl.PPO):
        def on_sample_begin(self) -> None:
            [server] = children("lightning_rl.control_plane.process")
            os.kill(server, signal.SIGKILL)

    killed = r"the server was killed by SIGKILL, most often since .* memory ran out; the end of .*server\.log"
    with pytest.raises(ChildDied, match=killed) as died:
        lrl.Trainer(some_fail, n_runners=2, run_dir=tmp_path).fit(ServerDies(config()), [0, 1, 2, 3])
    assert str(tmp_path) in died.value.__notes__[0]
    assert "resume_mode=auto" in died.value.__notes__[0]
    assert children("lightning_rl") == []


@pytest.mark.parametrize("mini_batch", [4, 2])
def test_old_log_probs_are_the_trainers_own_and_of_one_mini_batch_those_that_the_update_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mini_batch: int
) -> None:
    passes: list[int] = []
    once = Actor.log_probs
    monkeypatch.setattr(Actor, "log_probs", lambda actor, rows: passes.append(len(rows)) or once(actor, rows))
    given = config(total_training_steps=2, save_freq=1)
    given["actor_rollout_ref"]["actor"] = {"ppo_mini_batch_size": mini_batch}
    algorithm = lrl.PPO(given)
    lrl.Trainer(some_fail, n_runners=4, run_dir=tmp_path).fit(algorithm, [0, 1, 2, 3], val_dataset=[0, 3])
    assert len(passes) == (1 if mini_batch == 4 else 2), "the first batch is compared before anything is trained on it"
    for record in step_record.read_all(tmp_path):
        calls = [call for one in record.rollouts for call in one.calls.values() if call.trained_tokens]
        assert calls
        assert all(len(unpack_logprobs(call.old_log_probs)) == call.trained_tokens for call in calls)
    rows = read(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(0 <= row["training/rollout_probs_diff_max"] < 1e-4 for row in rows[1:])
    assert all(0 <= row["training/mismatch_kl"] < 1e-6 for row in rows[1:])
    assert rows[1].keys() - rows[2].keys() == ({"timing_s/old_log_prob"} if mini_batch == 4 else set())
    assert rows[-1]["val/reward"] == 1.0
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-1", "step-2"]
    assert json.loads((tmp_path / "checkpoints" / "step-2" / "config.json").read_text())["model_type"] == "qwen2"


@pytest.mark.long
def test_with_the_samplers_own_numbers_a_run_trains_as_with_recomputed_ones(tmp_path: Path) -> None:
    """Over the same stored rollouts; the old log probabilities are the trainer's, or the sampler's, bit by bit."""
    runs = {bypass: tmp_path / str(bypass) for bypass in (False, True)}
    for bypass, run_dir in runs.items():
        if bypass:
            run_dir.mkdir()
            shutil.copy(runs[False] / "store.db", run_dir / "store.db")
        given = config(total_training_steps=2, resume_mode="auto")
        given["algorithm"] = {"rollout_correction": {"bypass_mode": bypass}}
        given["actor_rollout_ref"]["actor"] = {"optim": {"lr": 1e-3}, "ppo_mini_batch_size": 2}
        lrl.Trainer(two_calls, n_runners=4, run_dir=run_dir).fit(lrl.PPO(given), [0, 1, 2, 3])
    store = SqlStore(f"sqlite:///{runs[True] / 'store.db'}")
    traces = store.traces([rollout.rollout_id for rollout in store.page(limit=100)[0]]).values()
    store.close()
    sampled = {call.call_id: call.logprobs for t in traces for a in t.attempts for call in calls_of(a.spans)}
    for bypass, run_dir in runs.items():
        calls = {
            k: v for record in step_record.read_all(run_dir) for one in record.rollouts for k, v in one.calls.items()
        }
        trained = {call_id: call for call_id, call in calls.items() if call.trained_tokens}
        assert len(trained) == 2 * 8 * 2
        same = [unpack_logprobs(call.old_log_probs) == sampled[call_id] for call_id, call in trained.items()]
        assert all(same) if bypass else not all(same)
    rows = {bypass: read(run_dir / "metrics.jsonl") for bypass, run_dir in runs.items()}
    assert "training/rollout_probs_diff_max" in rows[True][0], "sampler and trainer are compared once"
    assert "training/rollout_probs_diff_max" not in rows[True][1]
    assert "training/rollout_probs_diff_max" in rows[False][1]
    before, *ends = (
        load_file(folder / "model.safetensors") for folder in (CHECKPOINT, *(r / "model" for r in runs.values()))
    )
    for name, weights in ends[0].items():
        moved = (weights - before[name]).abs().max()
        assert (weights - ends[1][name]).abs().max() <= 0.05 * moved
    assert any(not torch.equal(weights, before[name]) for name, weights in ends[1].items())


def test_too_few_tasks_are_named() -> None:
    with pytest.raises(ConfigError, match="2 tasks are fewer than data"):
        lrl.PPO(config(total_training_steps=None)).prepare([0, 1], None)
    with pytest.raises(ConfigError, match="train_dataset is empty"):
        lrl.PPO(config()).prepare([], None)


@pytest.mark.long
def test_failures_are_told_once_with_what_to_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    algorithm = lrl.PPO(config(total_training_steps=2))
    lrl.Trainer(some_fail, n_runners=4, run_dir=tmp_path).fit(algorithm, [0, 1, 2, 3])
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 3
    assert "step 1: 2 of 8 rollouts failed in the agent" in told[0] + told[1] + told[2]
    assert any("RuntimeError: this agent has a bug" in text and "runner-*.log" in text for text in told)
    assert any("ended without a reward: return a number" in text for text in told)
    assert any("made no call to the model: the agent must use llm.base_url" in text for text in told)


@pytest.mark.long
def test_the_documented_dict_of_agent_lightning_runs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    documented = json.loads((ROOT / "tests" / "data" / "agent_lightning_verl_config.json").read_text())
    documented["actor_rollout_ref"]["model"]["path"] = str(CHECKPOINT)
    documented["actor_rollout_ref"]["rollout"]["name"] = "embedded"
    documented["trainer"]["logger"] += ["jsonl"]
    lrl.Trainer(some_fail, n_runners=8, run_dir=tmp_path).fit(lrl.PPO(documented), [0] * 32, [0])
    rows = read(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[2]["rollouts/rows"] == 32 * 4
    assert rows[2]["tokens/trained"] > 0
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store.db").touch()
    with pytest.raises(RunFolderUsed, match="holds a run already: resume it"):
        lrl.Trainer(some_fail, run_dir=tmp_path).fit(lrl.PPO(config()), [0, 1, 2, 3])


class StopsAt(lrl.PPO):
    """Is interrupted in mid-step, as by a Ctrl-C, after the rollouts of step `at`."""

    at = 0

    def on_sample_end(self, trajectories: Any) -> None:
        if self.step == self.at:
            raise KeyboardInterrupt


@pytest.mark.long
def test_an_interrupted_run_goes_on_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    """Cut short twice, before and after its first checkpoint; then once more in one go from what it had recorded."""
    resumed = config(total_training_steps=5, save_freq=2, resume_mode="auto")
    resumed["actor_rollout_ref"]["actor"] = {"optim": {"lr": 1e-3}}
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    for at in (1, 4):
        algorithm = StopsAt(resumed)
        algorithm.at = at
        with pytest.raises(KeyboardInterrupt):
            lrl.Trainer(two_calls, n_runners=4, run_dir=cut).fit(algorithm, [0, 1, 2, 3, 4], [5])
    finished = lrl.PPO(resumed)
    lrl.Trainer(two_calls, n_runners=4, run_dir=cut).fit(finished, [0, 1, 2, 3, 4], [5])
    rows = read(cut / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert finished.history == [{name: value for name, value in row.items() if name != "time"} for row in rows]
    assert rows[-1]["tokens/pending"] == 0
    assert rows[-1]["tokens/received"] == rows[-1]["tokens/trained"] + rows[-1]["tokens/excluded/validation"]

    whole.mkdir()
    shutil.copy(cut / "store.db", whole / "store.db")
    lrl.Trainer(two_calls, n_runners=4, run_dir=whole).fit(lrl.PPO(resumed), [0, 1, 2, 3, 4], [5])
    weights = [(run / "checkpoints" / "step-5" / "model.safetensors").read_bytes() for run in (cut, whole)]
    assert weights[0] == weights[1] != (CHECKPOINT / "model.safetensors").read_bytes()
    assert read(whole / "metrics.jsonl")[-1]["tokens/received"] == rows[-1]["tokens/received"]


@pytest.mark.long
def test_another_trainer_cannot_use_the_same_folder(tmp_path: Path) -> None:
    class Second(lrl.PPO):
        def run(self, *datasets: Any) -> None:
            with pytest.raises(RunFolderBusy, match="another process is using the run folder"):
                lrl.Trainer(some_fail, run_dir=tmp_path).fit(lrl.PPO(config()), [0, 1, 2, 3])

    lrl.Trainer(some_fail, run_dir=tmp_path).fit(Second(config()), [0] * 4)


@pytest.mark.long
def test_validation_alone_trains_nothing(tmp_path: Path) -> None:
    lrl.Trainer(some_fail, n_runners=4, run_dir=tmp_path).fit(lrl.PPO(config(val_only=True)), None, [0, 1])
    [row] = read(tmp_path / "metrics.jsonl")
    assert row["val/reward"] == 0.5
    assert not (tmp_path / "checkpoints").exists()


def test_an_update_that_runs_out_of_memory_says_what_to_lower(tmp_path: Path) -> None:
    """A real allocation that the machine refuses, in the place of the update."""

    class Hungry(lrl.PPO):
        def on_init_end(self) -> None:
            self.models.actor.update = lambda _: torch.empty(2**55, dtype=torch.uint8)  # type: ignore[method-assign]

    with pytest.raises(RuntimeError, match="allocate memory") as raised:
        lrl.Trainer(some_fail, n_runners=4, run_dir=tmp_path).fit(Hungry(config()), [0, 0, 0, 0])
    assert "ran out of memory: lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu" in raised.value.__notes__[0]


@pytest.mark.smoke
def test_an_engine_that_dies_ends_the_run_with_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dies(lrl.PPO):
        def open(self, run_dir: Path) -> Any:
            endpoint = super().open(run_dir)
            monkeypatch.setattr(self.policy.engine._policy, "forward", _out_of_memory)
            return endpoint

    with pytest.raises(RuntimeError, match="allocate memory"):
        lrl.Trainer(some_fail, n_runners=2, run_dir=tmp_path).fit(Dies(config()), [0, 1, 2, 3])
    store = SqlStore(f"sqlite:///{tmp_path / 'store.db'}")
    ended = {rollout.status for rollout in store.page(limit=100)[0]}
    store.close()
    assert "failed" not in ended, "the run ends at once, not when every rollout has used up its attempts"


def _out_of_memory(*_: Any, **__: Any) -> None:
    torch.empty(2**55, dtype=torch.uint8)


def test_weights_are_published_under_a_pause_that_ends_without_the_trainer(tmp_path: Path) -> None:
    """A trainer that dies between the two does not park its agents for ever."""
    said: list[Any] = []

    class Store:
        def pause(self, model: str, **more: Any) -> None:
            said.append(("pause", model, more))

        def resume(self, model: str, policy_version: int, **more: Any) -> None:
            said.append(("resume", model, policy_version))

    class Policy:
        name = "policy"

    class Models:
        policy = Policy()

        def send_weights(self, version: int) -> None:
            said.append(("update", version))

    store: Any = Store()
    models: Any = Models()
    WeightSync(lrl.PPO(config()).config, store, models).publish(1)
    [pause, update, resume] = said
    assert pause[:2] == ("pause", "policy")
    assert 600 < pause[2]["lease_seconds"] <= 3600  # a single request of an update may take ten minutes
    assert (update, resume) == (("update", 1), ("resume", "policy", 1))
