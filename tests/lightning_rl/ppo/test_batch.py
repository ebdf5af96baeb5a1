"""From finished rollouts to a batch: group statistics before anything is dropped, every token trained or excluded."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from lightning_rl.ppo.batch import BatchRules, StepBatch, counted, estimate, read, records, whiten
from lightning_rl.ppo.estimators import tree_of
from lightning_rl.rl.advantages import ESTIMATORS
from lightning_rl.rl.baselines import Baselines, BaselineSettings, EstimatorError, Outcomes
from lightning_rl.rl.shaping import OverlongBuffer
from lightning_rl.store.contract import ErrorInfo, Reward
from lightning_rl.training.batch import mini_batches
from lightning_rl.trajectories.step_record import CallRecord, PlusRecord
from lightning_rl.trajectories.token_account import ConservationError
from lightning_rl.trajectories.trajectory import Trajectory, trajectory_of
from lightning_rl_adapters import credit, forest
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.credit import CreditError, Rewards
from lightning_rl_adapters.span import unpack_logprobs
from tests.adapters.forests import attempts, make_call
from tests.lightning_rl.rl.golden import grpo
from tests.lightning_rl.trajectories.test_trajectory import trace


def rollout(
    name: str, *calls: Call, reward: float | None = 1.0, group: str = "g", rewards: tuple[Reward, ...] = (), **how: Any
) -> Trajectory:
    recorded = trace(list(calls), counting=0, reward=reward)
    recorded.attempts[0] = replace(recorded.attempts[0], rewards=list(rewards))
    named = {} if reward is None else {"reward": reward}
    asked = replace(recorded.rollout, rollout_id=name, group_id=group, rewards=named)
    return trajectory_of(replace(recorded, rollout=asked), **({"agent_failure": 0.0} | how))


def build(trajectories: Sequence[Trajectory], rules: BatchRules) -> StepBatch:
    """The batch of a step, with what `rules` need: values and log probabilities that the tokens before each decide."""
    batch = read(trajectories, rules)
    for sequence in batch.sequences:
        before = np.cumsum(sequence.token_ids)[sequence.trained - 1]
        sequence.values = np.sin(before).astype(np.float32)
        if rules.kl_coef:
            sequence.old_log_probs = np.sin(2 * before).astype(np.float32) - 2
            sequence.reference_log_probs = np.sin(3 * before).astype(np.float32) - 2
    estimate(batch, rules)
    whiten(batch, rules)
    return batch


def advantages(batch: StepBatch) -> list[set[float]]:
    return [{float(a) for s in part.sequences for a in s.advantages} for part in batch.parts]


def excluded(batch: StepBatch) -> Counter[str]:
    return sum((part.excluded for part in batch.parts), Counter[str]())


PLAIN = BatchRules(norm_by_std=False)


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
    batch = build([long], BatchRules(overlong="truncate_response", max_tokens=8))
    [sequence] = batch.sequences
    assert sequence.token_ids.tolist() == [0, 1, 50, 51, 100, 101, 150, 151]
    assert sequence.trained.tolist() == [2, 3, 6, 7]
    assert not sequence.cut_context
    assert excluded(batch) == {"truncated": 2}


def test_a_row_is_cut_at_its_beginning_and_its_first_token_is_not_trained() -> None:
    long = rollout("a", make_call(0, None), make_call(1, 0, response=4))
    batch = build([long], BatchRules(overlong="truncate_left", max_tokens=8))
    [sequence] = batch.sequences
    assert sequence.token_ids.tolist() == [50, 51, 100, 101, 150, 151, 152, 153]
    assert sequence.trained.tolist() == [1, 4, 5, 6, 7]  # 51 has a distribution, given 50
    assert sequence.cut_context
    assert excluded(batch) == {"truncated": 1}
    kept = {call_id: places.tolist() for call_id, _, places in sequence.trained_by_call()}
    assert kept == {"c0": [1], "c1": [0, 1, 2, 3]}
    [record] = records(batch, [])
    assert all(of_call.cut_context for of_call in record.calls.values())


@pytest.mark.parametrize(
    ("policy", "expected", "left_out"),
    [("zero", [{0.0}], {}), ("raw", [{3.0}], {}), ("drop", [set()], {"group_of_one": 2})],
)
def test_a_group_of_one(policy: str, expected: list[set[float]], left_out: dict[str, int]) -> None:
    batch = build([rollout("a", make_call(0, None), reward=3.0)], BatchRules(groups_of_one=policy))
    assert (advantages(batch), excluded(batch), batch.groups_of_one) == (expected, left_out, 1)


@pytest.mark.parametrize(("least", "left_out"), [(1, {}), (2, {"few_successes": 6})])
def test_a_group_in_which_too_few_agents_ended_well_is_left_out(least: int, left_out: dict[str, int]) -> None:
    def group(name: str, *rewards: float | None) -> list[Trajectory]:
        return [rollout(f"{name}{i}", make_call(0, None), reward=r, group=name) for i, r in enumerate(rewards)]

    batch = build(
        group("few", 1.0, None, None) + group("enough", 1.0, 0.0, None), BatchRules(min_successful_rollouts=least)
    )
    assert (excluded(batch), batch.groups_of_few_successes) == (left_out, int(bool(left_out)))
    assert batch.metrics()["rollouts/groups_of_few_successes"] == float(bool(left_out))
    assert [part.trained > 0 for part in batch.parts] == [not left_out] * 3 + [True] * 3


@pytest.mark.parametrize(("policy", "left_out"), [("keep", {}), ("drop", {"zero_variance": 4})])
def test_a_group_without_variance(policy: str, left_out: dict[str, int]) -> None:
    same = [rollout(name, make_call(0, None), reward=0.1) for name in "ab"]
    differ = [rollout(name, make_call(0, None), reward=float(name == "c"), group="h") for name in "cd"]
    batch = build([*same, *differ], BatchRules(groups_without_variance=policy))
    assert excluded(batch) == left_out
    assert [part.alike for part in batch.parts] == [True, True, False, False]
    assert (batch.groups_without_variance, batch.groups_of_one) == (1, 0)
    assert batch.metrics()["rollouts/groups_without_variance"] == 1.0


def test_a_group_is_alike_where_whitening_moves_its_advantages_and_where_what_is_compared_is_not_given() -> None:
    same = [rollout(name, make_call(0, None), reward=0.0) for name in "ab"]
    differ = [rollout(name, make_call(0, None), reward=float(name == "c"), group="h") for name in "cd"]
    for name, alike in (("reinforce_plus_plus_baseline", [True, True, False, False]), ("gdpo", [True] * 4)):
        batch = build([*same, *differ], BatchRules(estimator=ESTIMATORS[name], reward_weights={"typo": 1.0}))
        assert [part.alike for part in batch.parts] == alike


def test_a_group_of_like_rewards_says_something_where_none_is_compared_with() -> None:
    fails = [rollout(name, make_call(0, None), reward=0.0) for name in "ab"]
    succeeds = [rollout(name, make_call(0, None), reward=1.0, group="h") for name in "cd"]
    rules = BatchRules(estimator=ESTIMATORS["reinforce_plus_plus"], groups_without_variance="drop")
    batch = build([*fails, *succeeds], rules)
    assert (excluded(batch), batch.groups_without_variance) == ({}, 0)
    assert [max(each) < 0 for each in advantages(batch)] == [True, True, False, False]


def test_infrastructure_takes_no_part_in_the_group() -> None:
    lost = rollout("c", make_call(0, None), reward=None, agent_failure=None)
    kept = [rollout("a", make_call(0, None)), rollout("b", make_call(0, None), reward=0.0)]
    batch = build([*kept, lost], PLAIN)
    assert advantages(batch) == [{0.5}, {-0.5}, set()]
    assert excluded(batch) == {"no_reward": 2}


def test_tokens_without_a_logprob_are_left_out_only_where_they_are_needed() -> None:
    call = replace(make_call(0, None), logprobs=None)
    assert excluded(build([rollout("a", call)], BatchRules())) == {}
    needed = build([rollout("a", call)], BatchRules(need_log_probs=True))
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
        [found, rollout("b", make_call(0, None), reward=0.0)], BatchRules(strategy=credit.per_step, norm_by_std=False)
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
        build([rollout("a", make_call(0, None))], BatchRules(strategy=lambda *_: {"x": 1.0}))


def test_a_strategy_that_raises_is_raised_with_the_rollout_it_was_asked_about() -> None:
    def broken(*_: Any) -> dict[str, float]:
        raise KeyError("a bug of the user's")

    with pytest.raises(KeyError) as raised:
        build([rollout("a", make_call(0, None))], BatchRules(strategy=broken))
    assert raised.value.__notes__ == ["while the credit strategy was asked about rollout a"]


def test_tokens_that_do_not_add_up_name_the_rollout() -> None:
    damaged = rollout("a", make_call(0, None))
    damaged.rows[0].loss_mask[-1] = 0
    with pytest.raises(ConservationError, match="rollout a: its calls hold 2 sampled tokens, but its rows train 1"):
        damaged.check()
    with pytest.raises(ConservationError, match="rollout a: of 2 sampled tokens 1 are in the batch"):
        build([rollout("b", make_call(0, None)), damaged], BatchRules())


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
    assert unpack_logprobs(found.old_log_probs) == [0.0, -1.0, -2.0]
    assert (first.calls["c1"].left_out, first.calls["c1"].trained_tokens) == ("undelivered", 0)
    assert (second.calls["c0"].mini_batch, second.calls["c0"].weight) == (1, 1 / 2)


def with_estimator(name: str, **more: Any) -> BatchRules:
    return BatchRules(estimator=ESTIMATORS[name], groups_of_one="raw", **more)


def five(name: str = "") -> list[Trajectory]:
    """verl's five rows, each cut into two calls where it has the tokens."""
    made = []
    for number, (group, tokens, score) in enumerate(
        zip("aabbc", [3, 3, 2, 4, 2], [1.0, 0.0, 2.0, 0.5, 1.0], strict=True)
    ):
        calls = [make_call(0, None, response=1), make_call(1, 0, response=tokens - 1)]
        made.append(rollout(f"{number}{name}", *calls, reward=score, group=group))
    return made


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [0.707106, -0.707106, 0.707106, -0.707106, 1.0]),
        ("rloo", [1.0, -1.0, 1.5, -1.5, 1.0]),
        ("opo", [0.5, -0.5, 1.0, -0.5, 1.0]),
        ("gpg", [0.625, -0.625, 0.9375, -0.9375, 1.25]),
        ("grpo_passk", [1.414212, 0.0, 1.414212, 0.0, 1.0]),
        ("reinforce_plus_plus_baseline", [0.639272, -0.737621, 0.983495, -1.081844, 1.327718]),
        ("gdpo", [0.849351, -0.956192, 0.849352, -0.956192, 1.223292]),
    ],
)
def test_a_batch_has_the_advantages_of_its_estimator(name: str, expected: list[float]) -> None:
    batch = build(five(), with_estimator(name))
    assert [found for [found] in advantages(batch)] == pytest.approx(expected, abs=2e-6)
    for part, record in zip(batch.parts, records(batch, []), strict=True):
        for call_id, call in record.calls.items():
            assert call.credit is not None
            assert call.advantage == pytest.approx((call.credit - call.baseline) / call.scale), name
            assert part.estimates[call_id].advantage == call.advantage


def test_tokens_have_advantages_of_their_own_under_an_estimator_of_tokens() -> None:
    batch = build(five(), with_estimator("reinforce_plus_plus", gamma=0.5))
    found = [sequence.advantages.tolist() for sequence in batch.sequences]
    assert found[0] == pytest.approx([-0.463146, -0.02355, 0.855642], abs=1e-6)
    assert found[2] == pytest.approx([0.855642, 2.614025], abs=1e-6)
    [record, *_] = records(batch, [])
    last = record.calls["c1"]
    assert (last.credit, last.compared_with) == (0.75, None)  # the mean of the returns .5 and 1
    assert last.advantage == pytest.approx((last.credit - last.baseline) / last.scale)
    assert last.advantage == pytest.approx((-0.02355 + 0.855642) / 2, abs=1e-6)


def test_whitening_counts_trained_tokens_alone_and_each_once() -> None:
    """A row that is too long takes part in its group, but not in the whitening: its tokens are not trained."""
    fork = [make_call(0, None), make_call(1, 0, response=3), make_call(2, 0, response=1)]
    step = [
        rollout("a", *fork),
        rollout("b", make_call(0, None, response=5), reward=0.0),
        rollout("c", make_call(0, None, prompt=30), reward=9.0, max_tokens=20),
    ]
    batch = build(step, with_estimator("reinforce_plus_plus_baseline"))
    whitened = np.concatenate([sequence.advantages for sequence in batch.sequences])
    assert len(whitened) == 2 + 3 + 1 + 5
    assert whitened.mean() == pytest.approx(0, abs=1e-6)
    assert whitened.std(ddof=1) == pytest.approx(1, abs=1e-6)
    [*_, too_long] = records(batch, [])
    assert (too_long.calls["c0"].left_out, too_long.calls["c0"].scale) == ("overlong", 1.0)


def test_calls_without_credit_stay_at_zero_when_the_others_are_whitened() -> None:
    step = [
        rollout("a", make_call(0, None), make_call(1, 0)),
        rollout("b", make_call(0, None), make_call(1, 0), reward=0.0),
        rollout("alone", make_call(0, None), reward=7.0, group="h"),
    ]
    rules = BatchRules(strategy=credit.last_call, estimator=ESTIMATORS["reinforce_plus_plus_baseline"])
    batch = build(step, rules)
    first, second, alone = (np.concatenate([s.advantages for s in part.sequences]) for part in batch.parts)
    assert first[:2].tolist() == second[:2].tolist() == alone.tolist() == [0.0, 0.0]
    assert first[2:].tolist() == (-second[2:]).tolist()
    assert first[2] == pytest.approx(np.sqrt(3 / 4), abs=1e-6)  # four tokens count: +-.5, unbiased std .5 sqrt(4/3)


def test_every_branch_ends_with_the_final_reward_and_the_trunk_has_it_once() -> None:
    step = [
        rollout("a", make_call(0, None), make_call(1, 0), make_call(2, 0), make_call(3, 0, response=0)),
        rollout("b", make_call(0, None), reward=0.0),
    ]
    batch = build(step, BatchRules(estimator=ESTIMATORS["tir_optimal_token_baseline"]))
    assert {call_id: given.reward for call_id, given in batch.parts[0].credits.items()} == {
        "c0": pytest.approx(1.0), "c1": 1.0, "c2": 1.0,
    }  # fmt: skip


def test_a_reward_of_a_call_stands_on_its_last_token_and_passes_over_calls_without_any() -> None:
    given_step = Reward(value=0.5, name="tool", call_id="c1", reward_id="w1")
    calls = [make_call(0, None), make_call(1, 0, response=0), make_call(2, 1)]
    batch = build([rollout("a", *calls, rewards=(given_step,))], with_estimator("optimal_token_baseline"))
    assert {call_id: tokens.tolist() for call_id, tokens in batch.parts[0].tokens.items()} == {
        "c0": [1.5, 1.5], "c2": [1.0, 1.0],
    }  # fmt: skip


def test_probabilities_that_were_not_those_of_sampling_weigh_no_baseline() -> None:
    """The logprobs of a greedy call are not those that its tokens were drawn with: they count as unknown."""
    calls = [replace(make_call(0, None), logprob_kind="greedy"), replace(make_call(0, None), logprobs=None)]
    rules = BatchRules(estimator=ESTIMATORS["optimal_token_baseline"])

    def found(call: Call) -> Any:
        part = build([rollout("a", call), rollout("b", make_call(0, None), reward=0.0)], rules).parts[0]
        return part.estimates["c0"]

    assert found(calls[0]) == found(calls[1]) != found(make_call(0, None))


def test_a_reward_that_belongs_to_no_call_moves_no_advantage() -> None:
    """verl adds up rewards whether or not their token is the policy's: 5.0 on a tool's token turns group a around."""
    leak = Reward(value=5.0, name="tool", call_id="nobody", reward_id="w1")
    rules = BatchRules(strategy=credit.per_step)
    other = rollout("a", make_call(0, None))
    plain, leaked = (rollout("b", make_call(0, None), reward=0.0, rewards=given) for given in ((), (leak,)))
    assert advantages(build([other, leaked], rules)) == advantages(build([other, plain], rules))
    assert leaked.lost_rewards == 1


def test_a_last_call_without_tokens_takes_nothing_from_the_rollout() -> None:
    """verl reads a rollout's advantage off its last row: where that has no trained token the whole rollout has 0."""
    step = [rollout("a", make_call(0, None), make_call(1, 0, response=0)), rollout("b", make_call(0, None), reward=0.0)]
    [first], [second] = advantages(build(step, BatchRules()))
    assert [first, second] == pytest.approx([0.707106, -0.707106], abs=1e-6)


def test_steps_from_the_same_prompt_are_compared_across_rollouts_and_within_one() -> None:
    """The second call of a and that of b have the prompt [0, 1, 50, 51, 100, 101]; that of c has another."""

    def two(name: str, reward: float, *last: Call) -> Trajectory:
        return rollout(name, make_call(0, None), *(last or (make_call(1, 0),)), reward=reward)

    step = [two("a", 1.0), two("b", 0.0), two("c", 0.5, replace(make_call(1, 0), prompt_ids=[7]))]
    rules = BatchRules(strategy=credit.step_groups(0.5, 2.0), norm_by_std=False)
    first, second, third = records(build(step, rules), [])
    # All three answered [0, 1]: returns .5, 0, .25 there, mean .25. At the second prompt 1 and 0 meet.
    assert [record.calls["c0"].advantage for record in (first, second, third)] == [0.5 + 0.5, -0.5 - 0.5, 0.0]
    assert [record.calls["c1"].advantage for record in (first, second, third)] == [0.5 + 1.0, -0.5 - 1.0, 0.0]
    plus = first.calls["c1"].plus
    assert plus is not None
    assert (plus.credit, plus.baseline, plus.scale, plus.advantage) == (1.0, 0.5, 0.5, 1.0)
    alone = third.calls["c1"].plus
    assert alone is not None
    assert (alone.baseline, alone.advantage) == (0.5, 0.0)
    samples = [make_call(0, None), make_call(1, None), make_call(2, None)]
    same = [replace(call, prompt_ids=[7]) for call in samples[1:]]
    one = Reward(value=4.0, name="tool", call_id="c1", reward_id="w")
    within = build(
        [rollout("a", samples[0], *same, rewards=(one,))],
        BatchRules(strategy=credit.step_groups(0.0), norm_by_std=False),
    )
    assert [within.parts[0].estimates[c].advantage for c in ("c0", "c1", "c2")] == [0.0, 1.5, -1.5]


def test_a_call_does_not_pay_for_what_came_before_it() -> None:
    """Two plans, 7 and 8, of which one is worth 0.8 more; behind each the second call has the better word, or not."""

    def played(name: str, plan: int, word: int, reward: float) -> Trajectory:
        first, second = make_call(0, None, response=1), make_call(1, 0, response=1)
        return rollout(name, replace(first, response_ids=[plan]), replace(second, response_ids=[word]), reward=reward)

    step = [played("a", 7, 1, 1.0), played("b", 7, 2, 0.8), played("c", 8, 1, 0.2), played("d", 8, 2, 0.0)]
    rules = BatchRules(strategy=credit.counterfactual, norm_by_std=False, estimator=ESTIMATORS["rloo"])
    found = records(build(step, rules), [])
    plans = [record.calls["c0"].advantage for record in found]
    assert plans == pytest.approx([1 - 1 / 3, 0.8 - 0.4, 0.2 - 0.6, -2 / 3])
    assert [record.calls["c1"].advantage for record in found] == pytest.approx([0.2, -0.2, 0.2, -0.2])
    lone = records(build([*step[:1], *step[2:]], rules), [])[0]  # nobody else has its plan: compared with the group
    assert lone.calls["c1"].compared_with == "group"
    assert lone.calls["c1"].advantage == lone.calls["c0"].advantage == pytest.approx(0.9)


def test_long_answers_cost_and_the_record_says_how_much() -> None:
    buffer = OverlongBuffer(max_length=10, length=4, factor=0.5)
    step = [rollout("a", make_call(0, None, response=8)), rollout("b", make_call(0, None, response=2))]
    batch = build(step, BatchRules(overlong_buffer=buffer, norm_by_std=False))
    assert advantages(batch) == [{-0.125}, {0.125}]
    assert batch.metrics()["rollouts/overlong_penalty"] == -0.125
    first, second = records(batch, [])
    assert (first.reward, first.overlong_penalty, first.calls["c0"].credit) == (0.75, -0.25, 0.75)
    assert (second.reward, second.overlong_penalty) == (1.0, 0.0)
    assert step[0].reward == 1.0  # what the metrics of rewards tell is what was given
    assert [counted(one, BatchRules(overlong_buffer=buffer)) for one in step] == [0.75, 1.0]
    assert "rollouts/overlong_penalty" not in build(step, BatchRules()).metrics()


@pytest.mark.parametrize("strategy", ["final", "last_call", "per_agent", "counterfactual", "step_groups"])
def test_a_penalty_of_nothing_changes_nothing_also_where_calls_alone_are_rewarded(strategy: str) -> None:
    def credits(rules: BatchRules) -> list[dict[str, float]]:
        given = [Reward(value=value, name="tool", call_id="c0", reward_id=str(value)) for value in (4.0, 1.0)]
        calls = [make_call(0, None), make_call(1, 0)]
        step = [rollout(str(each.value), *calls, reward=None, rewards=(each,)) for each in given]
        return [{call: each.reward for call, each in part.credits.items()} for part in build(step, rules).parts]

    by_name = credit.by_name(strategy)
    plain = credits(BatchRules(strategy=by_name))
    assert [found["c1"] for found in plain] == [4.0, 1.0]  # what the rollouts count with
    long = OverlongBuffer(max_length=100, length=4)
    assert credits(BatchRules(strategy=by_name, overlong_buffer=long)) == plain
    assert credits(BatchRules(strategy=by_name, kl_coef=1e-30)) == plain
    short = OverlongBuffer(max_length=4, length=4)
    assert [found["c1"] for found in credits(BatchRules(strategy=by_name, overlong_buffer=short))] == [3.0, 0.0]


def test_a_penalty_on_rewards_of_calls_moves_no_branch_of_a_fork_against_another() -> None:
    fork = forest.build([make_call(0, None), make_call(1, 0), make_call(2, 0)])
    plain = Rewards(of_calls={"c1": {"tests": 1.0}})
    lowered = credit.with_penalty(plain, "overlong_penalty", -0.5)
    assert credit.counting(lowered) == 0.5
    assert credit.leave_one_out(fork, lowered) == credit.leave_one_out(fork, plain)
    for name in ("per_step", "return_to_go"):
        steps = credit.assign(credit.by_name(name), fork, lowered)
        assert steps.keys() == credit.assign(credit.by_name(name), fork, plain).keys()  # nobody is compared newly
        assert steps["c1"].reward == 0.5
    ends = tree_of(fork, lowered, [np.arange(2)] * 3, of_tokens={}).rewards
    assert [each[-1] for each in ends] == [0.0, 0.5, -0.5]


def test_a_failed_agent_counts_as_the_rule_says_in_whatever_is_compared() -> None:
    early = Reward(value=11.0, name="tool", call_id="c0", reward_id="w")
    recorded = trace([make_call(0, None), make_call(1, 0)], counting=0, status="failed", reward=None)
    recorded.attempts[0] = replace(recorded.attempts[0], rewards=[early])
    error = ErrorInfo(type="ValueError", message="no")
    ended = replace(recorded.rollout, error=error, rewards={"correct": 9.0})
    failed = trajectory_of(replace(recorded, rollout=ended), agent_failure=-5.0)
    batch = build([failed, rollout("b", make_call(0, None))], BatchRules(strategy=credit.per_step))
    assert batch.parts[0].credits == {"c1": credit.Credit(-5.0)}  # and not what its calls were given before it failed
    others = [rollout("b", make_call(0, None), reward=0.0), rollout("c", make_call(0, None), reward=1.0)]
    silent = trajectory_of(trace([make_call(0, None)], counting=0, reward=None), agent_failure=-5.0)
    rules = BatchRules(estimator=ESTIMATORS["gdpo"], reward_weights={"reward": 1.0})
    found = [max(each) for each in advantages(build([silent, *others], rules))]
    assert found[0] < min(found[1:])
    for names in ("reward", "correct"):
        rules = BatchRules(estimator=ESTIMATORS["gdpo"], reward_weights={names: 1.0})
        found = [max(each) for each in advantages(build([failed, *others], rules))]
        assert found[0] < min(found[1:])


def test_what_a_failure_counts_as_is_no_penalty() -> None:
    step = [rollout("a", make_call(0, None, response=8)), rollout("b", make_call(0, None), reward=0.0)]
    recorded = trace([make_call(0, None)], counting=0, status="failed", reward=None)
    error = ErrorInfo(type="ValueError", message="no")
    step.append(trajectory_of(replace(recorded, rollout=replace(recorded.rollout, error=error)), agent_failure=-5.0))
    names = {"reward": 1.0, "overlong_penalty": 1.0}
    buffer = OverlongBuffer(max_length=10, length=4)
    compared: list[Outcomes] = []

    def estimator(outcomes: Outcomes, settings: BaselineSettings) -> Baselines:
        compared.append(outcomes)
        return ESTIMATORS["grpo"].function(outcomes, settings)

    build(step, BatchRules(estimator=estimator, reward_weights=names, overlong_buffer=buffer))
    assert compared[0].named["reward"].tolist() == [1.0, 0.0, -5.0]
    assert compared[0].named["overlong_penalty"].tolist() == [-0.5, 0.0, 0.0]


def test_the_penalty_can_be_compared_as_a_reward_of_its_own() -> None:
    buffer = OverlongBuffer(max_length=10, length=4)
    step = [rollout("a", make_call(0, None, response=8)), rollout("b", make_call(0, None, response=2))]
    rules = BatchRules(estimator=ESTIMATORS["gdpo"], overlong_buffer=buffer, reward_weights={"overlong_penalty": 1.0})
    [first], [second] = advantages(build(step, rules))
    assert first < 0 < second


def test_rewards_that_no_advantage_can_hold_name_the_rollout() -> None:
    step = [rollout("a", make_call(0, None), reward=1e300), rollout("b", make_call(0, None))]
    assert advantages(build(step, BatchRules()))
    with pytest.raises(CreditError, match=r"rollout a: with a reward of 1e\+300 its advantages are too large"):
        build(step, PLAIN)


def test_a_function_of_the_users_is_an_estimator() -> None:
    def best(outcomes: Outcomes, settings: BaselineSettings) -> Baselines:
        return Baselines(np.full(len(outcomes.scores), outcomes.scores.max()), np.ones(len(outcomes.scores)))

    batch = build(
        [rollout("a", make_call(0, None)), rollout("b", make_call(0, None), reward=-1.0)], BatchRules(estimator=best)
    )
    assert advantages(batch) == [{0.0}, {-2.0}]


def test_records_of_earlier_releases_are_read() -> None:
    decode = msgspec.msgpack.Decoder(CallRecord).decode
    old = msgspec.msgpack.encode(
        {"credit": 1.0, "compared_with": "group", "baseline": 0.5, "scale": 0.5, "advantage": 1.0}
    )
    assert decode(old).plus is None
    full = replace(decode(old), plus=PlusRecord(credit=2.0, baseline=1.0, advantage=1.0))
    assert decode(msgspec.msgpack.encode(full)) == full


# A critic's values


VALUES = [[0.1, 0.2, 0.3], [0, 0.1, 0.2], [0.5, 0.4], [0.1, 0.1, 0.1, 0.1], [0.3, 0.6]]
GAE = with_estimator("gae", lam=0.95)


def valued(trajectories: list[Trajectory], values: list[list[float]], rules: BatchRules = GAE) -> StepBatch:
    """The batch of rollouts of one row each, with a critic's values of its trained tokens."""
    batch = read(trajectories, rules)
    for sequence, own in zip(batch.sequences, values, strict=True):
        sequence.values = np.array(own, np.float32)
    estimate(batch, rules)
    whiten(batch, rules)
    return batch


def close(found: Sequence[Any], expected: list[list[float]]) -> None:
    for own, theirs in zip(found, expected, strict=True):
        assert own.tolist() == pytest.approx(theirs, abs=2e-6)


def test_with_a_critic_advantages_and_returns_are_verls() -> None:
    batch = valued(five(), VALUES)
    advantages_of_verl = [
        [0.552477, 0.432301, 0.3058],
        [-1.028303, -1.231678, -1.445758],
        [1.707046, 2.057357],
        [-0.389082, -0.353953, -0.316976, -0.278053],
        [0.266876, -0.278053],
    ]
    close([sequence.advantages for sequence in batch.sequences], advantages_of_verl)
    returns = [[0.92675, 0.965, 1], [0.0145, 0.01, 0], [1.92, 2], [0.44295, 0.461, 0.48, 0.5], [0.98, 1]]
    close([sequence.returns for sequence in batch.sequences], returns)
    assert all(s.returns is not None and s.returns.dtype == np.float32 for s in batch.sequences)
    [record, *_] = records(batch, [])
    last = record.calls["c1"]
    assert last.credit == pytest.approx((0.965 + 1) / 2)
    assert last.advantage == pytest.approx((last.credit - last.baseline) / last.scale)
    metrics = batch.metrics()
    flat, known = np.concatenate([*map(np.array, returns)]), np.concatenate([*map(np.array, VALUES)])
    assert metrics["critic/returns/mean"] == pytest.approx(flat.mean())
    assert metrics["critic/values/max"] == pytest.approx(0.6)
    assert metrics["critic/vf_explained_var"] == pytest.approx(1 - (flat - known).var() / flat.var(), abs=1e-4)
    assert "critic/values/mean" not in batch_without_values().metrics()


def batch_without_values() -> StepBatch:
    batch = read(five(), BatchRules())
    estimate(batch, BatchRules())
    return batch


def test_no_critic_no_returns() -> None:
    assert all(sequence.returns is None for sequence in batch_without_values().sequences)


def test_tokens_that_are_not_trained_are_no_steps_of_time_to_the_critic() -> None:
    """The row's last four tokens are cut off: the reward moves to the last that is left, as if they had never been."""
    rules = with_estimator("gae", gamma=0.5, lam=0.5, overlong="truncate_response", max_tokens=8)
    whole = valued([rollout("a", make_call(0, None), make_call(1, 0))], [[0.1, 0.2, 0.3, 0.4]], rules)
    cut = valued([rollout("a", make_call(0, None), make_call(1, 0, response=6))], [[0.1, 0.2, 0.3, 0.4]], rules)
    assert cut.sequences[0].returns is not None
    assert cut.sequences[0].returns[-1] == 1.0
    close([cut.sequences[0].returns], [whole.sequences[0].returns.tolist()])  # type: ignore[union-attr]
    close([cut.sequences[0].advantages], [whole.sequences[0].advantages.tolist()])


def test_a_call_that_is_left_out_is_context_to_the_critic_and_its_reward_stands_before_it() -> None:
    given_step = Reward(value=4.0, name="tool", call_id="c1", reward_id="w1")
    calls = [make_call(0, None), make_call(1, 0, delivered=False), make_call(2, 0)]
    found = rollout("a", *calls, rewards=(given_step,))
    batch = read([found], GAE)
    for sequence in batch.sequences:
        sequence.values = np.zeros(len(sequence.trained), np.float32)
    estimate(batch, with_estimator("gae"))
    # c0 has two branches: c1, left out, ends with 4 + 1 and c2 with 1. Half of the first stands on c0's last token.
    returns = {
        call_id: sequence.returns[where].tolist()
        for sequence in batch.sequences
        for call_id, where, _ in sequence.trained_by_call()
        if sequence.returns is not None
    }
    assert returns == {"c0": [3.0, 3.0], "c2": [1.0, 1.0]}
    assert set(batch.parts[0].credits) == {"c0", "c2"}


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_whitening_counts_the_tokens_that_are_trained_alone(estimator: str) -> None:
    """Those that a correction rejected are out of it, as in verl, whose correction comes before the advantages."""
    rules = with_estimator(estimator)
    batch = read(five(), rules)
    for sequence in batch.sequences:
        sequence.values = np.sin(sequence.trained).astype(np.float32)
    estimate(batch, rules)
    rejected = batch.parts[2]
    rejected.keep([np.arange(len(sequence.trained)) > 0 for sequence in rejected.sequences], "rejected")
    whiten(batch, rules)
    assert excluded(batch)["rejected"] == len(rejected.sequences) == 1
    found = np.concatenate([sequence.advantages for sequence in batch.sequences])
    assert found.mean() == pytest.approx(0, abs=1e-6)
    assert found.std(ddof=1) == pytest.approx(1, abs=1e-6)


def test_without_values_the_estimator_says_what_it_lacks() -> None:
    batch = read(five(), GAE)
    with pytest.raises(EstimatorError, match="rollout 0: the estimator needs a critic's value of every trained token"):
        estimate(batch, GAE)


# The distance from the reference in rewards


def judged(trajectories: list[Trajectory], rules: BatchRules, seed: int = 0) -> tuple[StepBatch, list[Any]]:
    """The batch, with log probabilities of some policies; and of each row [K] distance, score and values as verl's."""
    random_numbers = np.random.default_rng(seed)
    batch = read(trajectories, rules)
    scores = [part.reward for part in batch.parts]
    for sequence in batch.sequences:
        size = len(sequence.trained)
        sequence.old_log_probs = -random_numbers.exponential(size=size).astype(np.float32)
        sequence.reference_log_probs = -random_numbers.exponential(size=size).astype(np.float32)
        sequence.values = random_numbers.normal(size=size).astype(np.float32)
    estimate(batch, rules)
    whiten(batch, rules)
    rows = []
    for sequence in batch.sequences:
        assert sequence.old_log_probs is not None
        assert sequence.reference_log_probs is not None
        gap = sequence.old_log_probs.astype(np.float64) - sequence.reference_log_probs
        distance = {"kl": gap, "k2": gap**2 / 2, "low_var_kl": np.minimum(np.exp(-gap) + gap - 1, 10)}[rules.kl_penalty]
        rewards = -rules.kl_coef * distance  # verl: token_level_scores - beta * kld
        rewards[-1] += scores[sequence.rollout]
        rows.append((distance, rewards, sequence.values))
    return batch, rows


@pytest.mark.parametrize("kind", ["kl", "k2", "low_var_kl"])
@pytest.mark.parametrize("seed", range(3))
def test_rewards_of_rollouts_are_lowered_as_in_verl(kind: str, seed: int) -> None:
    batch, rows = judged(five(), with_estimator("grpo", kl_coef=0.3, kl_penalty=kind), seed)
    totals = [float(rewards.sum()) for _, rewards, _ in rows]
    expected = grpo(totals[:4], list("aabb")).tolist() + totals[4:]
    assert [found for [found] in advantages(batch)] == pytest.approx(expected, abs=1e-5)
    assert [part.reward for part in batch.parts] == pytest.approx(totals)
    metrics = batch.metrics()
    assert batch.kl == metrics["actor/reward_kl_penalty"] == pytest.approx(np.mean([d.mean() for d, _, _ in rows]))
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.3
    assert metrics["critic/rewards/max"] == pytest.approx(max(totals))
    for record, (distance, _, _), total in zip(records(batch, []), rows, totals, strict=True):
        assert record.kl_penalty == pytest.approx(-0.3 * distance.sum())
        assert record.reward == pytest.approx(total)
        assert {call.credit for call in record.calls.values()} == {record.reward}


def test_rewards_of_tokens_are_lowered_one_by_one() -> None:
    batch, rows = judged(five(), with_estimator("reinforce_plus_plus", gamma=0.5, kl_coef=0.3))
    returns = []
    for _, rewards, _ in rows:
        for t in reversed(range(len(rewards) - 1)):
            rewards[t] += 0.5 * rewards[t + 1]
        returns.append(rewards)
    flat = np.concatenate(returns)
    whitened = (flat - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8)
    assert np.concatenate([s.advantages for s in batch.sequences]) == pytest.approx(whitened, abs=1e-5)


def test_the_critic_learns_rewards_that_are_lowered_token_by_token() -> None:
    batch, rows = judged(five(), with_estimator("gae", gamma=0.9, lam=0.8, kl_coef=0.3))
    for sequence, (_, rewards, values) in zip(batch.sequences, rows, strict=True):
        advantage, after = 0.0, 0.0
        for t in reversed(range(len(rewards))):
            advantage = rewards[t] + 0.9 * after - values[t] + 0.9 * 0.8 * advantage
            after = float(values[t])
            assert sequence.returns is not None
            assert sequence.returns[t] == pytest.approx(advantage + after, abs=1e-5)
    assert [part.reward for part in batch.parts] == pytest.approx([float(rewards.sum()) for _, rewards, _ in rows])


def test_tokens_that_no_row_trains_are_not_far_from_the_reference_and_groups_are_of_lowered_rewards() -> None:
    long = rollout("a", make_call(0, None, prompt=9), max_tokens=6)
    rules = BatchRules(norm_by_std=False, kl_coef=0.5)
    batch, [(distance, rewards, _)] = judged([long, rollout("b", make_call(0, None), reward=0.0)], rules)
    assert batch.parts[0].reward == 1.0
    assert batch.parts[1].reward == pytest.approx(rewards.sum())
    assert advantages(batch)[1] == {np.float32((batch.parts[1].reward - 1) / 2)}  # type: ignore[operator]
    assert batch.kl == pytest.approx(distance.mean())
    nothing = judged([long], rules)[0]
    assert nothing.kl is None
    assert "actor/reward_kl_penalty" not in nothing.metrics()


def test_a_trunk_is_far_from_the_reference_once() -> None:
    calls = [make_call(0, None), make_call(1, 0), make_call(2, 0)]
    batch = read([rollout("a", *calls, reward=0.0)], BatchRules(kl_coef=1.0))
    for sequence in batch.sequences:
        sequence.old_log_probs = np.zeros(len(sequence.trained), np.float32)
        sequence.reference_log_probs = sequence.old_log_probs - 1
    estimate(batch, BatchRules(kl_coef=1.0))
    assert (batch.parts[0].kl_penalty, batch.kl) == (-6.0, 1.0)


def test_the_distance_can_be_compared_as_a_reward_of_its_own() -> None:
    rules = BatchRules(estimator=ESTIMATORS["gdpo"], kl_coef=0.3, reward_weights={"kl_penalty": 1.0})
    step = [rollout(name, make_call(0, None)) for name in "ab"]
    batch, rows = judged(step, rules)
    [first], [second] = advantages(batch)
    assert (first > second) == (rows[0][0].sum() < rows[1][0].sum())
    assert first == -second != 0


@pytest.mark.parametrize("name", ["old_log_probs", "reference_log_probs"])
def test_a_distance_needs_both_policies(name: str) -> None:
    rules = BatchRules(kl_coef=0.3)
    batch = read(five(), rules)
    for sequence in batch.sequences:
        sequence.old_log_probs = sequence.reference_log_probs = sequence.rollout_log_probs
    setattr(batch.sequences[1], name, None)
    with pytest.raises(ValueError, match="rollout 1: a kl_coef needs old_log_probs and reference_log_probs"):
        estimate(batch, rules)
    setattr(batch.sequences[1], name, np.full(3, np.nan, np.float32))
    with pytest.raises(ValueError, match=r"rollout 1: old or reference log probabilities .* are no numbers"):
        estimate(read_again(batch), rules)


def read_again(batch: StepBatch) -> StepBatch:
    """The same rows, not estimated yet."""
    again = read([part.trajectory for part in batch.parts], BatchRules())
    for part, before in zip(again.parts, batch.parts, strict=True):
        part.sequences = before.sequences
    return again


def test_rows_are_there_before_their_advantages_and_dropped_groups_go_with_them() -> None:
    same = [rollout(name, make_call(0, None), reward=0.1) for name in "ab"]
    rules = BatchRules(groups_without_variance="drop")
    batch = read(same, rules)
    assert [part.trained for part in batch.parts] == [2, 2]
    assert not excluded(batch)
    assert advantages(batch) == [{0.0}, {0.0}]
    estimate(batch, rules)
    assert [part.trained for part in batch.parts] == [0, 0]
    assert excluded(batch) == {"zero_variance": 4}


@pytest.mark.parametrize(("greedy", "found"), [({"g": 0.25}, [{0.75}, {0.0}]), ({}, [{0.0}, {0.0}])])
def test_a_step_in_which_no_greedy_rollout_has_a_reward_says_nothing(
    greedy: dict[str, float], found: list[set[float]]
) -> None:
    """They may all have been lost; a run that resumes would read the same ones again."""
    rules = BatchRules(estimator=ESTIMATORS["remax"])
    batch = read([rollout("a", make_call(0, None)), rollout("b", make_call(0, None), reward=0.0, group="h")], rules)
    estimate(batch, rules, greedy)
    assert advantages(batch) == found


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "remax"])
def test_no_rollouts_are_an_empty_batch(name: str) -> None:
    lost = rollout("a", make_call(0, None), reward=None, agent_failure=None)
    for step in ([], [lost]):
        assert build(step, with_estimator(name)).sequences == []


@given(
    st.lists(st.tuples(attempts(5), st.floats(-2, 2), st.sampled_from("gh")), max_size=5),
    st.sampled_from([name for name in ESTIMATORS if name != "remax"]),
    st.sampled_from([0.0, 0.2]),
    st.randoms(),
)
def test_the_order_of_rollouts_and_of_their_rows_changes_no_advantage(
    drawn: list[tuple[list[Call], float, str]], name: str, kl_coef: float, order: random.Random
) -> None:
    trajectories = [rollout(str(i), *calls, reward=r, group=group) for i, (calls, r, group) in enumerate(drawn)]

    def found(step: list[Trajectory]) -> dict[tuple[str, str], list[float]]:
        batch = build(step, BatchRules(estimator=ESTIMATORS[name], gamma=0.9, kl_coef=kl_coef))
        return {
            (part.trajectory.rollout_id, call_id): sequence.advantages[where].tolist()
            for part in batch.parts
            for sequence in part.sequences
            for call_id, where, _ in sequence.trained_by_call()
        }

    before = found(trajectories)
    shuffled = list(trajectories)
    order.shuffle(shuffled)
    for trajectory in shuffled:
        order.shuffle(trajectory.rows)
    after = found(shuffled)
    assert after.keys() == before.keys()
    for place, values in before.items():
        assert after[place] == pytest.approx(values, rel=1e-5, abs=1e-5)


@given(st.lists(st.tuples(attempts(6), st.floats(-2, 2), st.sampled_from("gh")), min_size=1, max_size=5), st.data())
def test_whatever_the_rules_every_token_is_trained_once_or_excluded_by_name(
    drawn: list[tuple[list[Call], float, str]], data: st.DataObject
) -> None:
    overlong = data.draw(st.sampled_from(["drop_row", "drop_rollout", "truncate_left", "truncate_response"]))
    cut = overlong.startswith("truncate")
    max_tokens = data.draw(st.integers(3, 20))
    named = data.draw(st.sampled_from(["final", "last_call", "return_to_go", "counterfactual", "step_groups"]))
    strategy = credit.by_name(named, gamma=0.9)
    estimator = ESTIMATORS[data.draw(st.sampled_from(["grpo", "opo", "gdpo", "reinforce_plus_plus", "gae"]))]
    trajectories = [
        rollout(
            str(i), *calls, reward=reward, group=group,
            max_tokens=None if cut else max_tokens, whole=overlong == "drop_rollout",
        )
        for i, (calls, reward, group) in enumerate(drawn)
    ]  # fmt: skip
    rules = BatchRules(
        strategy=strategy,
        estimator=estimator,
        overlong=overlong,
        max_tokens=max_tokens,
        groups_of_one=data.draw(st.sampled_from(["zero", "raw", "drop"])),
        groups_without_variance=data.draw(st.sampled_from(["keep", "drop"])),
        kl_coef=data.draw(st.sampled_from([0.0, 0.1])),
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
