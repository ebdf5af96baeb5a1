"""Advantages of calls against hand-computed groups, and generalized advantages over branches."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.rl.advantages import Estimate, gae, grpo, grpo_of_calls
from lightning_rl_adapters.credit import GROUP, Credit


def of_group(
    *rollouts: dict[str, Credit], rewards: list[float] | None = None, **options: bool
) -> list[dict[str, float]]:
    estimates = grpo_of_calls(
        list(rollouts), rewards or [0.0] * len(rollouts), ["g"] * len(rollouts), norm_by_std=False, **options
    )
    return [{call_id: found.advantage for call_id, found in of_calls.items()} for of_calls in estimates]


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
    [first, _] = grpo_of_calls([{"a": Credit(1.0)}, {"b": Credit(0.0)}], [1.0, 0.0], ["g", "g"])
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
    for estimates, expected in zip(
        grpo_of_calls(credits, rewards, groups, norm_by_std=norm_by_std), plain, strict=True
    ):
        assert all(found.advantage == expected for found in estimates.values())


@given(ROLLOUTS, st.randoms())
def test_the_order_of_rollouts_changes_nothing(rollouts: list[tuple[float, str, int]], order: random.Random) -> None:
    numbered = [
        (reward, group, {f"{i}-{k}": Credit(reward + k) for k in range(n)})
        for i, (reward, group, n) in enumerate(rollouts)
    ]
    shuffled = list(numbered)
    order.shuffle(shuffled)

    def all_of(some: list[tuple[float, str, dict[str, Credit]]]) -> dict[str, float]:
        found = grpo_of_calls([c for _, _, c in some], [r for r, _, _ in some], [g for _, g, _ in some])
        return {call_id: estimate.advantage for of_calls in found for call_id, estimate in of_calls.items()}

    assert all_of(shuffled) == pytest.approx(all_of(numbered), abs=1e-6)


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def test_gae_along_a_branch_by_hand() -> None:
    # One token each, gamma 0.5, lambda 0.5: A3 = 2 - 1, A2 = 0 + .5*1 - .5 + .25*A3, A1 = 1 + .5*.5 - 0 + .25*A2.
    advantages, returns = gae(
        [None, 0, 1], [floats(1), floats(0), floats(2)], [floats(0), floats(0.5), floats(1)], gamma=0.5, lam=0.5
    )
    assert [a.tolist() for a in advantages] == [[1.3125], [0.25], [1.0]]
    assert [r.tolist() for r in returns] == [[1.3125], [0.75], [2.0]]


def test_gae_at_a_fork_goes_on_from_the_mean_of_its_branches() -> None:
    # The branches begin with values 1 and 3 and have rewards 5 and 1: advantages 4 and -2.
    advantages, _ = gae(
        [None, 0, 0], [floats(0, 1), floats(5), floats(1)], [floats(0.5, 1), floats(1), floats(3)], gamma=1.0, lam=0.5
    )
    # Last token of the trunk: 1 + mean(1, 3) - 1 + .5 * mean(4, -2) = 2.5; first: 0 + 1 - .5 + .5 * 2.5.
    assert [a.tolist() for a in advantages] == [[1.75, 2.5], [4.0], [-2.0]]


def test_gae_of_verl() -> None:
    """Its example with gamma 1, lambda 0.95, row by row: observation tokens are not there at all here."""
    values = [
        floats(0.1, 0.2, 0.3),
        floats(0, 0.1, 0.2),
        floats(0.5, 0.4),
        floats(0.1, 0.1, 0.1, 0.1),
        floats(0.3, 0.6),
    ]
    rewards = [floats(0, 0, 1), floats(0, 0, 0), floats(0, 2), floats(0, 0, 0, 0.5), floats(0, 1)]
    _, returns = gae([None] * 5, rewards, values, gamma=1.0, lam=0.95)
    expected = [[0.92675, 0.965, 1], [0.0145, 0.01, 0], [1.92, 2], [0.44295, 0.461, 0.48, 0.5], [0.98, 1]]
    for found, row in zip(returns, expected, strict=True):
        assert found.tolist() == pytest.approx(row, abs=1e-6)


@given(st.data(), st.randoms())
def test_gae_does_not_depend_on_the_order_of_siblings(data: st.DataObject, order: random.Random) -> None:
    branches = data.draw(
        st.lists(
            st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=3), min_size=1, max_size=4
        )
    )

    def trunk(shape: list[list[tuple[float, float]]]) -> list[float]:
        calls = [[(0.0, 0.25), (1.0, 0.5)], *shape]
        advantages, _ = gae(
            [None, *[0] * len(shape)],
            [floats(*(reward for reward, _ in call)) for call in calls],
            [floats(*(value for _, value in call)) for call in calls],
            gamma=0.9,
            lam=0.8,
        )
        return advantages[0].tolist()

    shuffled = list(branches)
    order.shuffle(shuffled)
    assert trunk(shuffled) == pytest.approx(trunk(branches))
    assert trunk([branches[0]] * 3) == pytest.approx(trunk([branches[0]]))  # three like ones are as one


def test_a_call_without_tokens_hands_on_what_comes_after_it() -> None:
    with_empty, _ = gae([None, 0, 1], [floats(0), floats(), floats(1)], [floats(0.5), floats(), floats(0.25)])
    without, _ = gae([None, 0], [floats(0), floats(1)], [floats(0.5), floats(0.25)])
    assert with_empty[0].tolist() == without[0].tolist()
