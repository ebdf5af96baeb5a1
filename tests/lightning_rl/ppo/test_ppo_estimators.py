"""PPO through the real parts, a step: estimators other than the default, and what the step wrote down of them."""

from pathlib import Path
from typing import Any

import pytest

import lightning_rl as lrl
from lightning_rl.telemetry.metrics.jsonl import read
from lightning_rl.trajectories import step_record
from lightning_rl.trajectories.step_record import CallRecord, RolloutRecord
from tests.lightning_rl.ppo.agents import two_calls
from tests.lightning_rl.ppo.test_ppo import config

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def trained(tmp_path: Path, **sections: Any) -> step_record.StepRecord:
    """The record of a step that trained on every call, whose rewards are told apart by length."""
    lrl.Trainer(two_calls, n_runners=4, run_dir=tmp_path).fit(lrl.PPO(config() | sections), [0, 1, 2, 3])
    [row], [record] = read(tmp_path / "metrics.jsonl"), list(step_record.read_all(tmp_path))
    assert row["tokens/received"] == row["tokens/trained"] > 0
    assert "actor/pg_loss" in row
    return record


def others(record: step_record.StepRecord, rollout: RolloutRecord) -> list[RolloutRecord]:
    return [other for other in record.rollouts if other.group_id == rollout.group_id and other is not rollout]


def holds(call: CallRecord) -> bool:
    """Whether the record says how the advantage came about."""
    assert call.credit is not None
    second = 0.0 if call.plus is None else call.plus.advantage
    return call.advantage == pytest.approx((call.credit - call.baseline) / call.scale + second)


def test_rloo_trains_on_what_the_others_of_the_group_did_not_reach(tmp_path: Path) -> None:
    record = trained(tmp_path, algorithm={"adv_estimator": "rloo"})
    assert record.estimator == "rloo"
    for rollout in record.rollouts:
        [other] = others(record, rollout)
        for call in rollout.calls.values():
            assert (call.credit, call.baseline, call.scale) == (rollout.reward, other.reward, 1.0)
            assert holds(call)
            assert call.trained_tokens > 0


def test_step_groups_compare_the_first_calls_of_a_task(tmp_path: Path) -> None:
    algorithm = {"credit": {"strategy": "step_groups", "step_weight": 0.5}, "norm_adv_by_std_in_grpo": False}
    record = trained(tmp_path, algorithm=algorithm | {"gamma": 0.5})
    assert (record.rule, record.estimator) == ("step_groups", "grpo")
    for rollout in record.rollouts:
        [other] = others(record, rollout)
        assert rollout.reward is not None
        assert other.reward is not None
        first, second = rollout.calls.values()
        assert first.plus is not None
        assert first.plus.compared_with is not None
        assert first.plus.compared_with.startswith("state:")  # one prompt began both, so their returns meet
        assert first.plus.credit == 0.5 * rollout.reward
        assert first.plus.advantage == pytest.approx(0.5 * 0.25 * (rollout.reward - other.reward))
        assert holds(first)
        assert holds(second)


def test_an_estimator_of_tokens_trains_and_long_answers_cost(tmp_path: Path) -> None:
    record = trained(
        tmp_path,
        algorithm={"adv_estimator": "reinforce_plus_plus", "gamma": 0.9},
        reward={"overlong_buffer": {"enable": True, "len": 8, "max_resp_len": 8, "penalty_factor": 2.0}},
    )
    assert all(holds(call) for rollout in record.rollouts for call in rollout.calls.values())
    assert any(rollout.overlong_penalty < 0 for rollout in record.rollouts)
    [row] = read(tmp_path / "metrics.jsonl")
    penalties = [rollout.overlong_penalty for rollout in record.rollouts]
    assert row["rollouts/overlong_penalty"] == pytest.approx(sum(penalties) / len(penalties))
