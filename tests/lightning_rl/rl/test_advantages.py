"""Advantages of calls against hand-computed groups, whatever the estimator."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.rl import baselines
from lightning_rl.rl.advantages import ESTIMATORS, Estimate, OfOutcomes, of_calls
from lightning_rl.rl.baselines import Baselines, BaselineSettings, EstimatorError, OutcomeEstimator, Outcomes
from lightning_rl_adapters.credit import GROUP, Credit
from tests.lightning_rl.rl.golden import grpo


def of_group(
    *rollouts: dict[str, Credit], rewards: list[float] | None = None, **options: bool
) -> list[dict[str, float]]:
    settings = BaselineSettings(norm_by_std=False, **options)
    estimates = of_calls(list(rollouts), rewards or [0.0] * len(rollouts), ["g"] * len(rollouts), settings=settings)
    return [{call_id: found.advantage for call_id, found in of_rollout.items()} for of_rollout in estimates]


def test_a_rollout_of_many_calls_has_one_voice_in_the_baseline() -> None:
    # Means of the rollouts: 1, 0, so the baseline is 0.5, although three of the four calls have 1.
    many = {f"a{i}": Credit(1.0) for i in range(3)}
    assert of_group(many, {"b": Credit(0.0)}) == [dict.fromkeys(many, 0.5), {"b": -0.5}]


def test_steps_of_their_own_are_compared_with_one_number_for_the_whole_group() -> None:
    first = {"a0": Credit(1.0), "a1": Credit(3.0)}  # mean 2
    second = {"b0": Credit(0.0)}
    assert of_group(first, second) == [{"a0": 0.0, "a1": 2.0}, {"b0": -1.0}]


def test_a_rollout_without_calls_counts_with_its_reward() -> None:
    assert of_group({"a": Credit(1.0)}, {}, rewards=[1.0, 0.0]) == [{"a": 0.5}, {}]


def test_an_agent_is_compared_with_itself() -> None:
    write, check = "agent:write", "agent:check"
    found = of_group(
        {"a0": Credit(1.0, write), "a1": Credit(5.0, check), "a2": Credit(1.0)},
        {"b0": Credit(0.0, write), "b1": Credit(7.0, check), "b2": Credit(2.0)},
    )
    assert found == [{"a0": 0.5, "a1": -1.0, "a2": -0.5}, {"b0": -0.5, "b1": 1.0, "b2": 0.5}]


def test_a_relative_credit_is_the_advantage_and_moves_no_baseline() -> None:
    found = of_group({"a0": Credit(9.0, None), "a1": Credit(1.0)}, {"b0": Credit(0.0)}, rewards=[1.0, 0.0])
    assert found == [{"a0": 9.0, "a1": 0.5}, {"b0": -0.5}]


def test_a_group_of_one_has_nothing_to_compare_with() -> None:
    assert of_group({"a": Credit(3.0)}) == [{"a": 0.0}]
    assert of_group({"a": Credit(3.0)}, lone_raw=True) == [{"a": 3.0}]


def test_an_estimate_tells_how_it_came_about() -> None:
    [first, _] = of_calls([{"a": Credit(1.0)}, {"b": Credit(0.0)}], [1.0, 0.0], ["g", "g"])
    found = first["a"]
    assert (found.baseline, found.scale) == (0.5, pytest.approx(0.5**0.5 + 1e-6))
    assert found.advantage == pytest.approx((1.0 - found.baseline) / found.scale)
    assert isinstance(found, Estimate)


ROLLOUTS = st.lists(st.tuples(st.floats(-5, 5), st.sampled_from("abc"), st.integers(0, 4)), min_size=1, max_size=12)


@given(ROLLOUTS, st.booleans())
def test_one_reward_for_all_calls_is_plain_grpo_however_many_calls_there_are(
    rollouts: list[tuple[float, str, int]], norm_by_std: bool
) -> None:
    rewards, groups = [r for r, _, _ in rollouts], [g for _, g, _ in rollouts]
    credits = [{f"c{i}": Credit(reward, GROUP) for i in range(n)} for reward, _, n in rollouts]
    plain = grpo(rewards, groups, norm_by_std=norm_by_std)
    found_by_rollout = of_calls(credits, rewards, groups, settings=BaselineSettings(norm_by_std=norm_by_std))
    for estimates, expected in zip(found_by_rollout, plain, strict=True):
        assert all(found.advantage == expected for found in estimates.values())


OUTCOME = [found.function for name, found in ESTIMATORS.items() if isinstance(found, OfOutcomes) and name != "remax"]


@given(ROLLOUTS, st.randoms(), st.sampled_from(OUTCOME))
def test_the_order_of_rollouts_changes_nothing(
    rollouts: list[tuple[float, str, int]], order: random.Random, estimator: OutcomeEstimator
) -> None:
    numbered = [
        (reward, group, {f"{i}-{k}": Credit(reward + k) for k in range(n)})
        for i, (reward, group, n) in enumerate(rollouts)
    ]
    shuffled = list(numbered)
    order.shuffle(shuffled)

    def all_of(some: list[tuple[float, str, dict[str, Credit]]]) -> dict[str, float]:
        found = of_calls([c for _, _, c in some], [r for r, _, _ in some], [g for _, g, _ in some], estimator=estimator)
        return {call_id: estimate.advantage for of_rollout in found for call_id, estimate in of_rollout.items()}

    assert all_of(shuffled) == pytest.approx(all_of(numbered), rel=1e-6, abs=1e-6)


@given(ROLLOUTS, st.sampled_from(OUTCOME), st.booleans())
def test_cutting_a_rollout_into_calls_changes_nothing(
    rollouts: list[tuple[float, str, int]], estimator: OutcomeEstimator, lone_raw: bool
) -> None:
    rewards, groups = [r for r, _, _ in rollouts], [g for _, g, _ in rollouts]
    whole = of_calls(
        [{"c": Credit(r)} for r in rewards],
        rewards,
        groups,
        estimator=estimator,
        settings=BaselineSettings(lone_raw=lone_raw),
        tokens=[{"c": 6}] * len(rewards),
    )
    in_calls = of_calls(
        [{f"c{i}": Credit(reward) for i in range(n + 1)} for reward, _, n in rollouts],
        rewards,
        groups,
        estimator=estimator,
        settings=BaselineSettings(lone_raw=lone_raw),
        tokens=[{f"c{i}": 6 if i == 0 else 0 for i in range(n + 1)} for _, _, n in rollouts],
    )
    for one, many in zip(whole, in_calls, strict=True):
        assert {found.advantage for found in many.values()} == {one["c"].advantage}


def test_a_group_that_scores_alike_divides_by_no_noise() -> None:
    """Its spread is 0 or a rounding error, and its calls' credits differ: 1e-6 would make advantages of a million."""
    first, second = {"a0": Credit(0.1), "a1": Credit(0.3)}, {"b0": Credit(0.3), "b1": Credit(0.1)}
    found = of_calls([first, second], [0.4, 0.4], ["g", "g"])
    assert found[0]["a1"].advantage == pytest.approx(0.1)


def test_of_several_best_none_is_the_best_whose_calls_stand_out() -> None:
    """Which of two it were would be a matter of their order."""
    rollouts = [{"a0": Credit(0.0), "a1": Credit(1.0)}, {"b0": Credit(0.0), "b1": Credit(1.0)}]
    found = of_calls(rollouts, [0.5, 0.5], ["g", "g"], estimator=baselines.grpo_passk)
    assert {estimate.advantage for of_rollout in found for estimate in of_rollout.values()} == {0.0}


def test_at_a_state_each_call_speaks_for_itself() -> None:
    at = "state:x"
    found = of_calls(
        [{"a0": Credit(1.0, at), "a1": Credit(0.0, at)}, {"b0": Credit(5.0, at), "b1": Credit(9.0, "state:y")}],
        [0.0, 0.0],
        ["g", "g"],
        settings=BaselineSettings(norm_by_std=False, lone_raw=True),
    )
    assert [found[0]["a0"].advantage, found[0]["a1"].advantage, found[1]["b0"].advantage] == [-1.0, -2.0, 3.0]
    assert found[1]["b1"].advantage == 0.0  # nobody else was there, so it says nothing, also where lone rollouts do


def test_states_of_other_groups_are_other_states() -> None:
    at = "state:x"
    found = of_calls([{"a": Credit(1.0, at)}, {"b": Credit(3.0, at)}], [0.0, 0.0], ["g", "h"])
    assert [found[0]["a"].advantage, found[1]["b"].advantage] == [0.0, 0.0]


def test_a_second_credit_is_added_with_its_weight() -> None:
    def both(outcome: float, step: float) -> dict[str, Credit]:
        return {"c": Credit(outcome, plus=Credit(step, "state:x", weight=0.5))}

    [first, second] = of_group(both(1.0, 4.0), both(0.0, 0.0))
    assert (first["c"], second["c"]) == (0.5 + 0.5 * 2.0, -0.5 - 0.5 * 2.0)
    [first, _] = of_group({"c": Credit(1.0, plus=Credit(4.0, "state:x", weight=0.0))}, both(0.0, 0.0))
    assert first["c"] == 0.5


@given(st.floats(-3, 3), st.floats(0.1, 3), st.floats(-2, 2), st.floats(-2, 2), st.booleans())
def test_a_whitened_estimate_still_tells_how_it_came_about(
    centre: float, divisor: float, credit: float, step: float, alone: bool
) -> None:
    plus = Estimate(step / 2.0, 0.0, 2.0)
    own = 0.0 if alone else (credit - 0.5) / 4.0
    estimate = Estimate(own + plus.advantage, 0.5, math.inf if alone else 4.0, plus)
    found = estimate.whitened(centre, divisor)
    assert found.advantage == pytest.approx((estimate.advantage - centre) / divisor)
    assert found.plus is not None
    second = (step - found.plus.baseline) / found.plus.scale
    assert found.advantage == pytest.approx((credit - found.baseline) / found.scale + second)


def test_nobody_to_compare_with_stays_silent_when_others_are_whitened() -> None:
    alone = Estimate(0.0, 0.0, math.inf)
    assert alone.silent
    assert alone._replace(plus=alone).silent
    assert not alone._replace(advantage=0.5, plus=Estimate(0.5, 0.0, 1.0)).silent
    assert alone.whitened(3.0, 2.0) == alone


@pytest.mark.parametrize(
    ("baseline", "scale", "message"),
    [
        ([0.0], [1.0, 1.0], r"mine gave a baseline of \[0\.\]; it must be 2 numbers"),
        ([0.0, math.nan], [1.0, 1.0], "mine gave a baseline"),
        ([0.0, 0.0], [1.0, 0.0], "a scale of 0"),
        ([0.0, math.inf], [1.0, 1.0], "an infinite baseline"),
    ],
)
def test_an_estimator_of_ones_own_that_gives_nonsense_is_named(
    baseline: list[float], scale: list[float], message: str
) -> None:
    def mine(outcomes: Outcomes, settings: BaselineSettings) -> Baselines:
        return Baselines(np.array(baseline), np.array(scale))

    with pytest.raises(EstimatorError, match=message):
        of_calls([{"a": Credit(1.0)}, {"b": Credit(0.0)}], [1.0, 0.0], ["g", "g"], estimator=mine)


def test_lengths_and_named_rewards_reach_the_estimator() -> None:
    seen: list[Outcomes] = []

    def looks(outcomes: Outcomes, settings: BaselineSettings) -> Baselines:
        seen.append(outcomes)
        return baselines.grpo(outcomes, settings)

    of_calls(
        [{"a0": Credit(1.0), "a1": Credit(2.0, "agent:x")}, {}],
        [1.0, 0.0],
        ["g", "g"],
        estimator=looks,
        tokens=[{"a0": 3, "a1": 4}, {"b0": 5}],
        named=[{"style": 0.5}, {}],
    )
    group, agent = sorted(seen, key=lambda outcomes: -len(outcomes.scores))
    assert (group.lengths.tolist(), agent.lengths.tolist()) == ([7, 5], [4])
    assert group.named["style"].tolist() == [0.5, 0.0]
    assert agent.scores.tolist() == [2.0]


def test_no_rollouts_at_all() -> None:
    for estimator in OUTCOME:
        assert of_calls([], [], [], estimator=estimator) == []
