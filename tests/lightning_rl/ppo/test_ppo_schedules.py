"""PPO under each schedule, through the real parts: versions are bounded, generations outlive updates, tokens add up."""

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import lightning_rl as lrl
from lightning_rl.ppo.policy_learner import PolicyLearner
from lightning_rl.rewards import FinishedRollout
from lightning_rl.store.sql import SqlStore
from lightning_rl.telemetry.metrics.jsonl import read
from lightning_rl.training import checkpoint
from lightning_rl.trajectories import step_record
from lightning_rl.trajectories.run_warnings import InfrastructureFailed
from lightning_rl_adapters.call import calls_of
from tests.lightning_rl.ppo.agents import needs_service, says_something, straggles
from tests.lightning_rl.ppo.test_ppo import config

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[3]
STEPS, N, BATCH = 6, 2, 4

PROGRAM = """
import os, signal, sys
from pathlib import Path

import lightning_rl as lrl
from lightning_rl.ppo.policy_learner import PolicyLearner
from tests.lightning_rl.ppo import test_ppo_schedules as tests

class DyingLearner(PolicyLearner):
    def update(self, *arguments):
        if self.run.step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().update(*arguments)

class DiesInStep4(lrl.PPO):
    learner = DyingLearner

tests.fit(DiesInStep4(tests.RESUMED), Path(sys.argv[1]))
"""


def given(schedule: str, *, algorithm: dict[str, Any] | None = None, **trainer: Any) -> dict[str, Any]:
    found = config(**{"schedule": schedule, "total_training_steps": STEPS, **trainer}) | {"algorithm": algorithm or {}}
    found["actor_rollout_ref"]["actor"] = {"optim": {"lr": 1e-3}}
    return found


RESUMED = given("async", save_freq=2, resume_mode="auto")


def fit(ppo: lrl.PPO, run_dir: Path, **datasets: Any) -> lrl.PPO:
    lrl.Trainer(straggles, run_dir=run_dir).fit(ppo, list(range(12)), **datasets)
    return ppo


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    return [row for row in read(run_dir / "metrics.jsonl") if row["step"]]


def assert_conserved(rows: list[dict[str, float]]) -> None:
    for row in rows:
        excluded = sum(value for name, value in row.items() if name.startswith("tokens/excluded/"))
        assert row["tokens/received"] == row["tokens/trained"] + excluded + row["tokens/pending"]


def assert_trained_once(run_dir: Path) -> None:
    rollouts = [rollout for record in step_record.read_all(run_dir) for rollout in record.rollouts]
    times = Counter(rollout.rollout_id for rollout in rollouts if rollout.left_out is None)
    assert set(times.values()) == {1}
    assert len(times) == STEPS * N * BATCH


class Watched(PolicyLearner):
    """Lets the algorithm, `learns_for`, do something before weights are published."""

    learns_for: "BeforeUpdates"

    def publish_weights(self) -> None:
        self.learns_for.before_update()
        super().publish_weights()


class BeforeUpdates(lrl.PPO):
    learner = Watched

    def on_init_end(self) -> None:
        for learner in self.learners:
            assert isinstance(learner, Watched)
            learner.learns_for = self

    def before_update(self) -> None:
        raise NotImplementedError


class UpdatesLast(BeforeUpdates):
    """Publishes weights when a rollout in flight has ended with those before, however fast the update was."""

    def before_update(self) -> None:
        rollouts = self.parts.rollouts
        if rollouts.in_flight is not None and (waiting := rollouts.in_flight.waiting):
            assert rollouts.ended(waiting, wait_seconds=60)


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_a_step_that_infrastructure_loses_ends_the_run_which_samples_it_anew_when_it_is_resumed(
    tmp_path: Path, schedule: str
) -> None:
    class OutageInStep2(lrl.PPO):
        def on_step_begin(self) -> None:
            if self.step == 2:
                service.unlink()

    service, run_dir = tmp_path / "service", tmp_path / "run"
    service.touch()
    threshold = 1 if schedule == "async" else None
    keys = given(schedule, save_freq=1, max_off_policy_threshold=threshold, resume_mode="auto")
    trainer = lrl.Trainer(needs_service, run_dir=run_dir)
    with pytest.raises(
        InfrastructureFailed, match=r"step \d: .* of all 8 rollouts.*\n.*\n.*service is not there"
    ) as lost:
        trainer.fit(OutageInStep2(keys), [str(service)] * 12)
    assert "resume_mode=auto" in lost.value.__notes__[0]
    made = len(rows_of(run_dir))
    with pytest.raises(InfrastructureFailed, match=f"step {made + 1}: .* rollouts, last in again\\.train-"):
        trainer.fit(lrl.PPO(keys), [str(service)] * 12)
    service.touch()
    trainer.fit(lrl.PPO(keys), [str(service)] * 12)
    rows = rows_of(run_dir)
    assert_conserved(rows)
    assert rows[-1]["tokens/excluded/infrastructure"] > 0
    assert [row["critic/score/mean"] for row in rows] == [1.0] * STEPS
    assert len({row["rollouts/rows"] for row in rows}) == len({row["num_turns/mean"] for row in rows}) == 1
    assert {row["rollouts/without_reward"] for row in rows} == {0.0}


@pytest.mark.smoke
@pytest.mark.parametrize(("schedule", "bound"), [pytest.param("one_step_off", 1, marks=pytest.mark.long), ("async", 4)])
def test_off_policy_runs_stay_within_the_bound_and_balance(tmp_path: Path, schedule: str, bound: int) -> None:
    fit(UpdatesLast(given(schedule, test_freq=2)), tmp_path, val_dataset=[0, 1])
    rows = rows_of(tmp_path)
    assert len(rows) == STEPS
    assert rows[0]["training/staleness/max"] == 0
    assert 0 < max(row["training/staleness/max"] for row in rows) <= bound
    assert any(row["schedule/groups_in_flight"] > 0 for row in rows[:-1])  # when the account was checked
    assert_conserved(rows)
    assert rows[-1]["tokens/pending"] == 0
    assert "tokens/excluded/stale" not in rows[-1]
    assert all("rollout_corr/rollout_is_mean" in row for row in rows)  # corrected by default
    for record in step_record.read_all(tmp_path):
        for rollout in record.rollouts:
            asked_as = int(rollout.rollout_id.split("-")[2])
            found = step_record.find(tmp_path, rollout.rollout_id, asked_as, ahead=True)
            assert found is not None
            assert found[0].step == record.step
    assert_trained_once(tmp_path)


@pytest.mark.long
def test_a_run_killed_with_rollouts_in_flight_goes_on_and_trains_none_twice(tmp_path: Path) -> None:
    """What the killed run had made of steps 3 and 4 went with its weights; the rest is that of an unbroken run."""
    killed = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    saved = checkpoint.load_state(tmp_path / "checkpoints" / "step-2")
    assert (saved["step"], saved["in_flight"]["asked"]) == (2, STEPS * BATCH)
    assert len(saved["in_flight"]["groups"]) == STEPS * BATCH - 2 * BATCH
    fit(lrl.PPO(RESUMED), tmp_path)
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert_conserved(rows)
    assert rows[-1]["tokens/pending"] == 0
    assert "tokens/excluded/stale" not in rows[-1]
    assert_trained_once(tmp_path)


class Impatient(lrl.PPO):
    """Looks for hangs more often."""

    def ended(self, waiting: Any, watchdog: Any, wait_seconds: float = 0.1, gather_seconds: float = 0.01) -> Any:
        return super().ended(waiting, watchdog, min(wait_seconds, 0.1), gather_seconds)


@pytest.mark.long
def test_groups_that_say_nothing_are_replaced_and_greedy_ones_compared_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def judge(rollouts: Sequence[FinishedRollout]) -> list[float]:
        """Of every fourth task both rollouts are alike."""
        return [float(place * (rollout.task % 4 > 0)) for place, rollout in enumerate(rollouts)]

    rules = {"adv_estimator": "remax", "filter_groups": {"enable": True}}
    config = given("async", algorithm=rules, max_off_policy_threshold=1, watchdog_seconds=0.05)
    fit(Impatient(config, reward=judge), tmp_path)
    rows = rows_of(tmp_path)
    assert_conserved(rows)
    assert rows[-1]["tokens/pending"] == 0
    assert rows[-1]["tokens/excluded/greedy_logprobs"] > 0
    assert rows[-1]["tokens/excluded/zero_variance"] > 0
    assert max(row["training/staleness/max"] for row in rows) <= 1
    assert_trained_once(tmp_path)
    for record in step_record.read_all(tmp_path):
        groups = {one.rollout_id.rpartition("-")[0] for one in record.rollouts if one.left_out is None}
        assert len(groups) == BATCH
    left_out = {one.left_out for record in step_record.read_all(tmp_path) for one in record.rollouts}
    assert {None, "zero_variance"} <= left_out
    told = [text for text in caplog.messages if text.startswith("no rollout has ended for")]
    assert any(" is open since " in text and ", claimed by worker " in text for text in told)


class UpdatesInMidCall(BeforeUpdates):
    """Publishes weights when the engine samples something, if it does soon."""

    def before_update(self) -> None:
        for _ in range(300):
            if self.store.state()["models"][self.policy.name]["in_flight"]:
                break
            time.sleep(0.01)


@pytest.mark.long
def test_generations_in_flight_go_on_over_updates(tmp_path: Path) -> None:
    """Each token has the version that sampled it, no agent notices, and all of it is trained."""
    config = given("async", max_off_policy_threshold=4)
    config["data"]["max_response_length"] = 160
    config["actor_rollout_ref"]["rollout"] |= {"temperature": 50.0, "max_model_len": 320}  # so hot, answers are long
    ppo = UpdatesInMidCall(config, reward=lambda group: [float(len(each.answer)) for each in group])
    tasks = [{"n": n} for n in range(12)]
    lrl.Trainer(says_something, n_runners=2, run_dir=tmp_path).fit(ppo, tasks)
    store = SqlStore(f"sqlite:///{tmp_path / 'store.db'}")
    rollouts = store.page(limit=1000)[0]
    traces = store.traces([rollout.rollout_id for rollout in rollouts]).values()
    store.close()
    calls = [call for trace in traces for attempt in trace.attempts for call in calls_of(attempt.spans)]
    of_several = [call for call in calls if len(call.versions) > 1]
    assert of_several
    assert all(call.policy_versions() == sorted(call.policy_versions()) for call in calls)  # type: ignore[type-var]
    assert {rollout.status for rollout in rollouts} == {"succeeded"}
    assert {rollout.attempt_count for rollout in rollouts} == {1}
    rows = rows_of(tmp_path)
    assert_conserved(rows)
    assert rows[-1]["tokens/trained"] == rows[-1]["tokens/received"] == sum(call.sampled_tokens for call in calls)
