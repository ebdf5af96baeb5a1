"""A trainer killed in every phase of a step, whatever the checkpoints and the schedule: each resume goes on at once.

The kills of a case follow one another in one run: each process dies in its phase, the next one goes on, and only the
last one comes to the end. Between two checkpoints steps are done again, over what the store holds of them.
"""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lightning_rl as lrl
from lightning_rl.ppo.policy_learner import PolicyLearner
from lightning_rl.store.contract import Rollout, RolloutTrace
from lightning_rl.store.sql import SqlStore
from lightning_rl.telemetry.metrics.jsonl import read
from lightning_rl.trajectories import step_record
from lightning_rl_adapters.call import calls_of
from tests.lightning_rl.ppo.agents import plan_and_execute, straggles
from tests.lightning_rl.ppo.test_ppo import CHECKPOINT

ROOT = Path(__file__).parents[2]
STEPS, BATCH, N = 6, 2, 2

PHASES = (
    ("asked", 4), ("sampling", 4), ("sampled", 4), ("entered", 4), ("recorded", 4), ("updated", 4), ("sent", 4),
    ("published", 4), ("validating", 4), ("measured", 4), ("told", 4), ("saved", 4), ("saved", 5),
    ("sampling", 6), ("saved", 6),
)  # fmt: skip
PROGRAM = """
import sys
from pathlib import Path

from tests.chaos import test_resumed as tests

folder, schedule, save_freq, vllm, policies, phase, step = sys.argv[1:]
tests.train(Path(folder), schedule, int(save_freq), vllm, policies.split(), phase, int(step))
"""

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]


class DyingLearner(PolicyLearner):
    """Says what it comes to, `of` whom; of several policies the last."""

    of: "Dies"

    def reach(self, phase: str) -> None:
        if self is self.of.learners[-1]:
            self.of.reach(phase)

    def write_record(self, of_rollouts: Any, version: int) -> None:
        self.reach("entered")
        super().write_record(of_rollouts, version)
        self.reach("recorded")

    def publish_weights(self) -> None:
        self.reach("updated")
        store = self.of.store
        resume = store.resume

        def reached(*given: Any) -> Any:
            self.reach("sent")
            return resume(*given)

        store.resume = reached  # type: ignore[method-assign]
        super().publish_weights()
        store.resume = resume  # type: ignore[method-assign]
        self.reach("published")


class Dies(lrl.PPO):
    """Is killed in a `phase` of step `at`; "" lives."""

    learner = DyingLearner

    def __init__(self, config: Any, phase: str, at: int) -> None:
        super().__init__(config)
        self._phase, self._at = phase, at
        self._measures = False
        self._does_again = False

    def on_init_end(self) -> None:
        self._does_again = any(self.run_dir.glob("steps/*"))
        for learner in self.learners:
            assert isinstance(learner, DyingLearner)
            learner.of = self

    def reach(self, phase: str) -> None:
        if (phase, self.step) == (self._phase, self._at):
            os.kill(os.getpid(), signal.SIGKILL)

    def ask(self, requests: Any) -> list[Rollout]:
        made = super().ask(requests)
        self.reach("validating" if self._measures else "asked")
        return made

    def ended(self, waiting: Any, *given: Any, **more: Any) -> list[Rollout]:
        found = super().ended(waiting, *given, **more)
        if found and not self._measures:
            self.reach("sampling")
        return found

    def on_sample_end(self, trajectories: Any) -> None:
        """A step that is done again is not quicker than runners that take what the killed process left queued."""
        while self._does_again and not self.store.state()["claims_waiting"]:
            time.sleep(0.05)
        self._does_again = False
        self.reach("sampled")

    def on_validate_begin(self) -> None:
        self._measures = True

    def on_validate_end(self, metrics: dict[str, float]) -> None:
        self._measures = False

    def on_step_end(self, metrics: dict[str, float]) -> None:
        self.reach("measured")

    def _log(self, metrics: dict[str, float]) -> None:
        super()._log(metrics)
        self.reach("told")

    def save(self) -> Path:
        saved = super().save()
        self.reach("saved")
        return saved


def train(
    folder: Path,
    schedule: str,
    save_freq: int,
    vllm: str = "",
    policies: Sequence[str] = (),
    phase: str = "",
    at: int = 0,
) -> None:
    """The run, or what is left of it. `vllm`: the interpreter of the engine, where it is not the embedded one;
    `policies`: those that the agent asks, where there are several."""
    rollout = {"n": N, "renderer": "qwen3", "max_model_len": 128} | ({"name": "vllm", "python": vllm} if vllm else {})
    config: dict[str, Any] = {
        "data": {"train_batch_size": BATCH, "max_response_length": 8},
        "actor_rollout_ref": {"rollout": rollout, "actor": {"optim": {"lr": 1e-3}}},
        "trainer": {
            "total_training_steps": STEPS,
            "save_freq": save_freq,
            "test_freq": 2,
            "schedule": schedule,
            "max_off_policy_threshold": 1 if schedule == "async" else None,
            "logger": ["jsonl"],
            "resume_mode": "auto",
        },
    }
    if policies:
        config["policies"] = {name: {} for name in policies}
        rollout["temperature"] = 4.0  # the checkpoint is sure of its words
    agent = plan_and_execute if policies else straggles
    lrl.Trainer(agent, n_runners=2, run_dir=folder).fit(Dies(config, phase, at), [*range(5)], [0, 4])


def survives(
    folder: Path,
    schedule: str,
    save_freq: int,
    kills: tuple[tuple[str, int], ...],
    vllm: str = "",
    policies: Sequence[str] = (),
) -> None:
    """Each process of the run is killed where it is to be, the last one comes to the end; everything is checked."""
    for phase, step in (*kills, ("", 0)):
        if phase == "saved" and step % save_freq and step != STEPS:
            continue
        words = [str(folder), schedule, str(save_freq), vllm, " ".join(policies), phase, str(step)]
        told = subprocess.run(
            [sys.executable, "-c", PROGRAM, *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert told.returncode == (-signal.SIGKILL if phase else 0), f"{phase or 'the end'} {step}: {told.stderr}"
    check(folder, 0 if schedule == "sync" else 1)


def check(folder: Path, oldest: int) -> None:
    """Every step is there once, every sampled token trained once or excluded, and nothing is left open."""
    rows = [row for row in read(folder / "metrics.jsonl") if row["step"]]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    ages = [age for row in rows for name, age in row.items() if name.endswith("training/staleness/max")]
    assert max(ages) <= oldest
    assert next((folder / "model").rglob("model.safetensors"), None)
    store = SqlStore(f"sqlite:///{folder / 'store.db'}")
    rollouts, _ = store.page(limit=1000)
    traces = store.traces([rollout.rollout_id for rollout in rollouts])
    store.close()
    assert not {rollout.status for rollout in rollouts} & {"queued", "running"}
    records = list(step_record.read_all(folder))
    trained = Counter(rollout.rollout_id for record in records for rollout in record.rollouts)
    assert set(trained.values()) == {1}
    assert len(trained) == STEPS * BATCH * N
    last = rows[-1]
    assert last["tokens/pending"] == 0
    excluded = sum(value for name, value in last.items() if name.startswith("tokens/excluded/"))
    assert last["tokens/received"] == last["tokens/trained"] + excluded == sum(map(_sampled, traces.values()))


def _sampled(trace: RolloutTrace) -> int:
    return sum(call.sampled_tokens for attempt in trace.attempts for call in calls_of(attempt.spans))


def test_a_trainer_killed_between_two_checkpoints_goes_on_at_the_first_resume(tmp_path: Path) -> None:
    survives(tmp_path, "sync", 2, (("asked", 4),))


@pytest.mark.long
def test_killed_while_the_second_of_two_policies_learns_it_ends_with_the_weights_of_an_unbroken_run(
    tmp_path: Path,
) -> None:
    policies = ["planner", "executor"]
    kills = tuple((phase, 4) for phase in ("entered", "recorded", "updated", "sent", "published"))
    survives(tmp_path / "killed", "sync", 2, kills, policies=policies)
    survives(tmp_path / "whole", "sync", 2, (), policies=policies)
    begun = load_file(CHECKPOINT / "model.safetensors")
    for name in policies:
        killed, whole = (
            load_file(tmp_path / run / "model" / name / "model.safetensors") for run in ("killed", "whole")
        )
        assert all(torch.equal(weight, whole[key]) for key, weight in killed.items()), name
        assert not any(torch.equal(weight, begun[key]) for key, weight in killed.items() if "proj" in key), name


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_an_engine_in_a_process_of_its_own_goes_on_at_once_too(tmp_path: Path, schedule: str) -> None:
    """Where vLLM would be; `tests/vllm/test_training.py` has vLLM there."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT / "tests/chaos/engine.py"} "$@"\n')
    python.chmod(0o755)
    survives(tmp_path / "run", schedule, 2, (("asked", 4), ("sent", 4), ("sampling", 6)), str(python))


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["sync", "one_step_off", "async"])
@pytest.mark.parametrize("save_freq", [1, 2, 5])
def test_a_trainer_killed_in_every_phase_goes_on_at_once(tmp_path: Path, schedule: str, save_freq: int) -> None:
    survives(tmp_path, schedule, save_freq, PHASES)
