"""From finished rollouts to a batch: group statistics before anything is dropped, every token trained or excluded."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from lightning_rl.algorithms.conservation import ConservationError
from lightning_rl.algorithms.step_batch import Rules, StepBatch, build, records
from lightning_rl.algorithms.trajectories import Trajectory, trajectory_of
from lightning_rl.store.contract import Reward
from lightning_rl.training.batch import mini_batches
from lightning_rl_adapters import credit
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.credit import CreditError
from lightning_rl_adapters.span import unpack_logprobs
from tests.adapters.forests import attempts, make_call
from tests.lightning_rl.algorithms.test_trajectories import trace


def rollout(
    name: str, *calls: Call, reward: float | None = 1.0, group: str = "g", rewards: tuple[Reward, ...] = (), **how: Any
) -> Trajectory:
    recorded = trace(list(calls), counting=0, reward=reward)
    recorded.attempts[0] = replace(recorded.attempts[0], rewards=list(rewards))
    named = {} if reward is None else {"reward": reward}
    asked = replace(recorded.rollout, rollout_id=name, group_id=group, rewards=named)
    return trajectory_of(replace(recorded, rollout=asked), **({"agent_failure": 0.0} | how))


def advantages(batch: StepBatch) -> list[set[float]]:
    return [{float(a) for s in part.sequences for a in s.advantages} for part in batch.parts]


def excluded(batch: StepBatch) -> Counter[str]:
    return sum((part.excluded for part in batch.parts), Counter[str]())


PLAIN = Rules(norm_by_std=False)


def test_every_token_of_a_rollout_has_its_advantage() -> None:
    batch = build(
        [rollout("a", make_call(0, None), make_call(1, 0)), rollout("b", make_call(0, None), reward=0.0)], PLAIN
    )
    assert advantages(batch) == [{0.5}, {-0.5}]
    assert [part.trained for part in batch.parts] == [4, 2]
    assert not excluded(batch)


def test_a_row_that_is_too_long_still_counts_in_its_group() -> None:
    long = rollout("a", make_call(0, None, prompt=9), max_tokens=6)
    batch = build([long, rollout("b", make_call(0, None), reward=0.0)], PLAIN)
    assert advantages(batch) == [set(), {-0.5}]
    assert excluded(batch) == {"overlong": 2}


def test_a_rollout_goes_as_a_whole_where_the_rule_says_so() -> None:
    calls = [make_call(0, None), make_call(1, 0, prompt=9), make_call(2, 0)]
    assert excluded(build([rollout("a", *calls, max_tokens=10)], PLAIN)) == {"overlong": 2}
    whole = build([rollout("a", *calls, max_tokens=10, whole=True)], PLAIN)
    assert excluded(whole) == {"overlong": 6}
    assert whole.parts[0].trained == 0


def test_a_row_is_cut_at_its_end() -> None:
    # c0: 2 prompt + 2 sampled, c1 adds 2 + 4: ten tokens, of which eight are kept.
    long = rollout("a", make_call(0, None), make_call(1, 0, response=4))
    batch = build([long], Rules(overlong="truncate_response", max_tokens=8))
    [sequence] = batch.sequences
    assert sequence.token_ids.tolist() == [0, 1, 50, 51, 100, 101, 150, 151]
    assert sequence.trained.tolist() == [2, 3, 6, 7]
    assert not sequence.cut_context
    assert excluded(batch) == {"truncated": 2}


def test_a_row_is_cut_at_its_beginning_and_its_first_token_is_not_trained() -> None:
    long = rollout("a", make_call(0, None), make_call(1, 0, response=4))
    batch = build([long], Rules(overlong="truncate_left", max_tokens=8))
    [sequence] = batch.sequences
    assert sequence.token_ids.tolist() == [50, 51, 100, 101, 150, 151, 152, 153]
    assert sequence.trained.tolist() == [1, 4, 5, 6, 7]  # 51 has a distribution, given 50
    assert sequence.cut_context
    assert excluded(batch) == {"truncated": 1}
    kept = {call_id: places.tolist() for call_id, _, places in sequence.trained_by_call()}
    assert kept == {"c0": [1], "c1": [0, 1, 2, 3]}


@pytest.mark.parametrize(
    ("policy", "expected", "left_out"),
    [("zero", [{0.0}], {}), ("raw", [{3.0}], {}), ("drop", [set()], {"group_of_one": 2})],
)
def test_a_group_of_one(policy: str, expected: list[set[float]], left_out: dict[str, int]) -> None:
    batch = build([rollout("a", make_call(0, None), reward=3.0)], Rules(groups_of_one=policy))
    assert (advantages(batch), excluded(batch), batch.groups_of_one) == (expected, left_out, 1)


@pytest.mark.parametrize(("policy", "left_out"), [("keep", {}), ("drop", {"zero_variance": 4})])
def test_a_group_without_variance(policy: str, left_out: dict[str, int]) -> None:
    same = [rollout(name, make_call(0, None), reward=0.1) for name in "ab"]
    differ = [rollout(name, make_call(0, None), reward=float(name == "c"), group="h") for name in "cd"]
    batch = build([*same, *differ], Rules(groups_without_variance=policy))
    assert excluded(batch) == left_out
    assert (batch.groups_without_variance, batch.groups_of_one) == (1, 0)
    assert batch.metrics()["rollouts/groups_without_variance"] == 1.0


def test_infrastructure_takes_no_part_in_the_group() -> None:
    lost = rollout("c", make_call(0, None), reward=None, agent_failure=None)
    kept = [rollout("a", make_call(0, None)), rollout("b", make_call(0, None), reward=0.0)]
    batch = build([*kept, lost], PLAIN)
    assert advantages(batch) == [{0.5}, {-0.5}, set()]
    assert excluded(batch) == {"no_reward": 2}


def test_tokens_without_a_logprob_are_left_out_only_where_they_are_needed() -> None:
    call = replace(make_call(0, None), logprobs=None)
    assert excluded(build([rollout("a", call)], Rules())) == {}
    needed = build([rollout("a", call)], Rules(need_log_probs=True))
    assert excluded(needed) == {"no_logprob": 2}
    [record] = records(needed, [])
    assert record.calls["c0"].left_out == "no_logprob"


def test_late_rewards_reach_their_call_by_its_id() -> None:
    calls = [make_call(0, None), make_call(1, 0)]
    first = Reward(value=1.0, name="tool", call_id="c0", reward_id="w1")
    twice = [first, replace(first, reward_id="w2", value=0.5), replace(first, reward_id="w3", call_id="nobody")]
    found = rollout("a", *calls, reward=None, rewards=tuple(twice))
    assert found.rewards.of_calls == {"c0": {"tool": 1.5}}
    assert (found.reward, found.agent_failed, found.lost_rewards) == (1.5, False, 1)
    batch = build(
        [found, rollout("b", make_call(0, None), reward=0.0)], Rules(strategy=credit.per_step, norm_by_std=False)
    )
    assert batch.parts[0].credits == {"c0": credit.Credit(1.5)}
    assert advantages(batch) == [{0.0, 0.75}, {-0.75}]


def test_weights_make_the_final_reward() -> None:
    recorded = trace([make_call(0, None)], counting=0, reward=1.0)
    named = replace(recorded, rollout=replace(recorded.rollout, rewards={"reward": 1.0, "short": -2.0}))
    found = trajectory_of(named, agent_failure=0.0, weights={"reward": 1.0, "short": 0.25})
    assert (found.reward, found.agent_failed) == (0.5, False)
    none_of_them = trajectory_of(named, agent_failure=-1.0, weights={"other": 1.0})
    assert (none_of_them.reward, none_of_them.rewards.final, none_of_them.agent_failed) == (-1.0, -1.0, True)


def test_a_strategy_that_fails_names_the_rollout() -> None:
    with pytest.raises(CreditError, match=r"rollout a: credit was given to call 'x'"):
        build([rollout("a", make_call(0, None))], Rules(strategy=lambda *_: {"x": 1.0}))


def test_tokens_that_do_not_add_up_name_the_rollout() -> None:
    damaged = rollout("a", make_call(0, None))
    damaged.rows[0].loss_mask[-1] = 0
    with pytest.raises(ConservationError, match="rollout a: its calls hold 2 sampled tokens, but its rows train 1"):
        damaged.check()
    with pytest.raises(ConservationError, match="rollout a: of 2 sampled tokens 1 are in the batch"):
        build([rollout("b", make_call(0, None)), damaged], Rules())


def test_a_record_tells_of_each_call_what_the_step_made_of_it() -> None:
    calls = [make_call(0, None), make_call(1, 0, delivered=False), make_call(2, 0, response=3)]
    batch = build([rollout("a", *calls), rollout("b", make_call(0, None), reward=0.0)], PLAIN)
    for sequence in batch.sequences:
        sequence.old_log_probs = -np.arange(len(sequence.trained), dtype=np.float32)
    plan = mini_batches(batch.sequences, rollouts=2, rollouts_each=1, mode="token-mean", scale_factor=None)
    first, second = records(batch, plan)
    assert (first.rollout_id, first.group_id, first.reward) == ("a", "g", 1.0)
    found = first.calls["c2"]
    assert (found.credit, found.baseline, found.scale, found.advantage) == (1.0, 0.5, 1.0, 0.5)
    assert (found.mini_batch, found.weight, found.trained_tokens, found.kept) == (0, 1 / 5, 3, None)
    assert unpack_logprobs(found.old_log_probs) == [-2.0, -3.0, -4.0] or len(unpack_logprobs(found.old_log_probs)) == 3
    assert (first.calls["c1"].left_out, first.calls["c1"].trained_tokens) == ("undelivered", 0)
    assert (second.calls["c0"].mini_batch, second.calls["c0"].weight) == (1, 1 / 2)


@given(st.lists(st.tuples(attempts(6), st.floats(-2, 2), st.sampled_from("gh")), min_size=1, max_size=5), st.data())
def test_whatever_the_rules_every_token_is_trained_once_or_excluded_by_name(
    drawn: list[tuple[list[Call], float, str]], data: st.DataObject
) -> None:
    overlong = data.draw(st.sampled_from(["drop_row", "drop_rollout", "truncate_left", "truncate_response"]))
    cut = overlong.startswith("truncate")
    max_tokens = data.draw(st.integers(3, 20))
    strategy = credit.by_name(data.draw(st.sampled_from(["final", "last_call", "return_to_go"])), gamma=0.9)
    trajectories = [
        rollout(
            str(i), *calls, reward=reward, group=group,
            max_tokens=None if cut else max_tokens, whole=overlong == "drop_rollout",
        )
        for i, (calls, reward, group) in enumerate(drawn)
    ]  # fmt: skip
    rules = Rules(
        strategy=strategy,
        overlong=overlong,
        max_tokens=max_tokens,
        groups_of_one=data.draw(st.sampled_from(["zero", "raw", "drop"])),
        groups_without_variance=data.draw(st.sampled_from(["keep", "drop"])),
    )
    batch = build(trajectories, rules)
    sampled = sum(trajectory.sampled_tokens for trajectory in trajectories)
    assert sum(part.trained for part in batch.parts) + excluded(batch).total() == sampled
    assert all(len(sequence) <= max_tokens for sequence in batch.sequences)
    for part, record in zip(batch.parts, records(batch, []), strict=True):
        assert sum(call.trained_tokens for call in record.calls.values()) == part.trained
        for call_id, call in record.calls.items():
            assert (call.trained_tokens > 0) == (call.left_out is None), call_id
        for sequence in part.sequences:
            sampled_ids = set(sequence.token_ids[sequence.trained].tolist())
            assert all(token % 100 >= 50 for token in sampled_ids)  # ids of answers, by `make_call`
