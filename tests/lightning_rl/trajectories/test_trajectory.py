"""Laws 2, 4 and 8 where finished rollouts become trajectories: what counts, what is excluded and why."""

from typing import Any

import msgspec
import pytest

from lightning_rl.store.contract import Attempt, AttemptTrace, Reward, Rollout, RolloutConfig, RolloutTrace
from lightning_rl.trajectories.token_account import ConservationError, TokenAccount
from lightning_rl.trajectories.trajectory import informative, trajectory_of
from lightning_rl_adapters.call import to_span
from tests.adapters.forests import make_call
from tests.adapters.test_conventions import answer, span


def trace(
    *attempts: list[Any], counting: int | None, status: Any = "succeeded", reward: float | None = 1.0
) -> RolloutTrace:
    made = [
        AttemptTrace(
            attempt=Attempt(
                attempt_id=f"a{i}", rollout_id="r", sequence=i + 1, status="succeeded", worker_id="w",
                lease_expires_at=0.0, started_at=0.0,
            ),
            spans=[to_span(call) for call in calls], rewards=[],
        )
        for i, calls in enumerate(attempts)
    ]  # fmt: skip
    rollout = Rollout(
        rollout_id="r", task=None, mode="train", status=status, group_id="g", agent=None, resources_id=None,
        config=RolloutConfig(), metadata={}, attempt_count=len(attempts), created_at=0.0,
        counting_attempt_id=None if counting is None else f"a{counting}", reward=reward,
        attempt_id=f"a{len(attempts) - 1}",
    )  # fmt: skip
    return RolloutTrace(rollout=rollout, attempts=made)


def read(trace: RolloutTrace, agent_failure: float | None = 0.0, max_tokens: int = 100) -> Any:
    return trajectory_of(trace, agent_failure=agent_failure, max_tokens=max_tokens)


def masked(trajectory: Any) -> int:
    return sum(sum(row.loss_mask) for row in trajectory.rows)


def test_only_the_counting_attempt_has_rows() -> None:
    found = read(trace([make_call(0, None, response=5)], [make_call(0, None, response=3)], counting=1))
    assert masked(found) == 3
    assert found.excluded == {"superseded": 5}


def test_a_rollout_that_infrastructure_failed_has_no_reward_and_no_rows() -> None:
    found = read(trace([make_call(0, None)], counting=None, status="failed", reward=None))
    assert (found.reward, found.rows, found.excluded["infrastructure"]) == (None, [], 2)
    assert not found.agent_failed
    assert not found.cancelled
    assert read(trace([make_call(0, None)], counting=None, status="cancelled", reward=None)).cancelled


@pytest.mark.parametrize(("rule", "reward"), [(0.0, 0.0), (-1.0, -1.0), (None, None)])
def test_a_failed_agent_gets_what_the_rule_says(rule: float | None, reward: float | None) -> None:
    found = read(trace([make_call(0, None)], counting=0, status="failed", reward=None), agent_failure=rule)
    assert (found.reward, found.agent_failed, masked(found)) == (reward, True, 2)


@pytest.mark.parametrize(("status", "failed"), [("succeeded", False), ("failed", True)])
def test_where_rewards_count_nothing_an_agent_that_gives_none_has_not_failed(status: str, failed: bool) -> None:
    """A teacher's signal is all that is trained."""
    recorded = trace([make_call(0, None)], counting=0, status=status, reward=None)
    found: Any = trajectory_of(recorded, agent_failure=-1.0, rewards_count=False)
    assert (found.agent_failed, found.reward, found.given_reward) == (
        (True, -1.0, -1.0) if failed else (False, 0.0, None)
    )
    rewarded = trajectory_of(
        trace([], counting=0, status="succeeded", reward=2.0), agent_failure=0.0, rewards_count=False
    )
    assert rewarded.given_reward == 2.0


def test_a_rollout_without_calls_counts_in_its_group_and_has_no_rows() -> None:
    found = read(trace([], counting=0, reward=0.0))
    assert (found.reward, found.rows, found.calls) == (0.0, [], 0)


def test_undelivered_tokens_are_excluded_and_every_token_is_accounted_for() -> None:
    calls = [make_call(0, None), make_call(1, 0, response=4, delivered=False), make_call(2, 0, response=30)]
    found = read(trace(calls, counting=0), max_tokens=20)
    overlong = sum(sum(row.loss_mask) for row in found.rows if row.excluded == "overlong")
    assert (found.left_out["undelivered"], overlong) == (4, 30)
    assert found.sampled_tokens == 36 == masked(found) + 4


def test_the_account_balances_or_stops_the_run() -> None:
    account = TokenAccount("m")
    account.train(10)
    account.exclude("validation", 5)
    account.received = 15
    assert account.check(pending=3)["tokens/excluded/validation"] == 5
    account.received = 16
    with pytest.raises(ConservationError, match="handed over 19 tokens, but 10 trained \\+ 5 excluded"):
        account.check(pending=3)


def test_helpers_have_no_place_in_the_policys_account() -> None:
    calls = [make_call(0, None, response=3), make_call(1, None, response=5, model="helper", trainable=False)]
    found = trajectory_of(trace(calls, counting=0), agent_failure=0.0, model="m")
    assert (found.calls, found.sampled_tokens, masked(found), [row.model for row in found.rows]) == (1, 3, 3, ["m"])
    superseded = trajectory_of(trace(calls, [], counting=1), agent_failure=0.0, model="m")
    assert superseded.excluded == {"superseded": 3}


def test_calls_of_unknown_tokens_leave_an_empty_row_and_no_tokens() -> None:
    calls = [make_call(0, None, 0, 0, exact=False), make_call(1, 0, 0, 0, exact=False, delivered=False)]
    found = read(trace(calls, counting=0))
    assert (found.calls, found.sampled_tokens, found.excluded) == (2, 0, {})
    assert [(row.token_ids, row.excluded, row.exact) for row in found.rows] == [([], "inexact", False)]


def test_overshoot_is_excluded_by_name_and_the_account_balances() -> None:
    call = msgspec.structs.replace(make_call(0, None, response=5), overshoot=2)
    found = read(trace([call], [call], counting=0))
    assert found.sampled_tokens == 7
    assert found.left_out == {"overshoot": 2}
    assert found.excluded == {"superseded": 7}
    assert masked(found) == 5


def test_a_call_that_was_not_sampled_with_its_logprobs_is_context() -> None:
    greedy = msgspec.structs.replace(make_call(0, None, response=5), logprob_kind="greedy")
    found = read(trace([greedy, make_call(1, 0, response=3)], counting=0))
    assert found.left_out == {"greedy_logprobs": 5}
    assert masked(found) == 3


def test_logprobs_from_before_the_temperature_are_as_none() -> None:
    raw = msgspec.structs.replace(make_call(0, None, response=2), logprob_kind="raw")
    found = read(trace([raw, make_call(1, 0, response=2)], counting=0))
    assert (found.left_out, masked(found)) == ({}, 4)
    assert found.rows[0].logprobs == [None] * 2 + [None, None] + [None] * 2 + [-0.5, -1.0]


def test_a_group_says_something_where_its_rollouts_differ_in_the_reward_that_is_named() -> None:
    def rollout(group: str, reward: float | None, correct: float) -> Any:
        recorded = trace([make_call(0, None)], counting=0, reward=reward)
        named = {"correct": correct} | ({} if reward is None else {"reward": reward})
        changed = msgspec.structs.replace(recorded.rollout, group_id=group, rewards=named)
        return read(msgspec.structs.replace(recorded, rollout=changed), agent_failure=None)

    found = [rollout("a", 1.0, 1.0), rollout("b", 0.5, 1.0), rollout("a", 1.0, 0.0), rollout("b", 0.25, 1.0)]
    lost = [rollout("c", 1.0, 1.0), rollout("c", None, 0.0)]  # takes no part, so it makes no difference
    assert [[t.group_id for t in group] for group in informative([*found, *lost], "reward")] == [["b", "b"]]
    assert [[t.group_id for t in group] for group in informative([*found, *lost], "correct")] == [["a", "a"]]
    accuracy = informative([*found, *lost], "acc")  # verl's name of what a reward function gives as a number
    assert [[t.group_id for t in group] for group in accuracy] == [["b", "b"]]
    named = msgspec.structs.replace(found[0].rewards, named={"acc": 1.0})
    found[0] = msgspec.structs.replace(found[0], rewards=named)
    assert [t.group_id for group in informative(found, "acc") for t in group] == ["a", "a"]


def test_tokens_of_agents_own_spans_are_received_of_every_attempt_and_trained_of_the_one_that_counts() -> None:
    def told(attempt: str) -> Any:
        kind = {"openinference__span__kind": "LLM", "llm__model_name": "m"}
        return msgspec.structs.replace(span(1, **kind, output__value=answer("c1")), attempt_id=attempt)

    both = trace([], [], counting=1)
    attempts = [
        msgspec.structs.replace(each, spans=[told(each.attempt.attempt_id)], rewards=[
            Reward(reward_id="1", value=0.5, name="good", call_id="c1")
        ])
        for each in both.attempts
    ]  # fmt: skip
    both = msgspec.structs.replace(both, attempts=attempts)
    found = trajectory_of(both, agent_failure=0.0, max_tokens=100, model="m", spans=True)
    assert (masked(found), found.excluded, found.span_tokens) == (3, {"superseded": 3}, 6)
    assert (list(found.rewards.of_calls.values()), found.lost_rewards) == ([{"good": 0.5}], 0)
    assert found.recorded_tokens == {"a0": 0, "a1": 0}
    untold = trajectory_of(both, agent_failure=0.0, max_tokens=100, model="m")
    assert (untold.calls, untold.span_tokens, untold.lost_rewards) == (0, 0, 1)


def test_what_no_gateway_counted_is_on_both_sides_of_the_account() -> None:
    account = TokenAccount("m")
    account.received = 7
    account.receive_spans(6)
    account.train(13)
    assert account.check(pending=3) == {
        "tokens/received": 16.0, "tokens/trained": 13.0, "tokens/pending": 3.0, "tokens/from_spans": 6.0,
    }  # fmt: skip
    again = TokenAccount("m")
    again.load_state_dict(account.state_dict())
    assert again.from_spans == 6
    again.train(1)
    with pytest.raises(
        ConservationError, match=r"handed over 16 tokens \(6 of them told of by agents' spans\), but 14"
    ):
        again.check(pending=3)
