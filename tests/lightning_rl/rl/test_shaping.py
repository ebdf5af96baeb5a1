"""DAPO's penalty at the places where it bends, and what counts as the length of an agent's rollout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.rl.shaping import OverlongBuffer, overlong_penalty, sampled_on_a_branch
from lightning_rl_adapters import forest
from lightning_rl_adapters.call import Call
from tests.adapters.forests import attempts, make_call


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0), (60, 0), (61, -0.025), (80, -0.5), (99, -0.975), (100, -1), (101, -1), (10**6, -1)]
)
def test_the_penalty_is_linear_in_the_buffer(length: int, expected: float) -> None:
    assert overlong_penalty(length, 100, 40) == pytest.approx(expected)
    assert overlong_penalty(length, 100, 40, factor=3.0) == pytest.approx(3 * expected)


@given(st.integers(1, 50), st.integers(0, 100), st.integers(0, 300))
def test_longer_is_never_better_and_nothing_costs_more_than_the_factor(buffer: int, more: int, length: int) -> None:
    longest = buffer + more
    now, later = (overlong_penalty(n, longest, buffer, factor=2.0) for n in (length, length + 1))
    assert -2.0 <= later <= now <= 0.0


def test_the_length_of_a_rollout_is_that_of_its_longest_branch() -> None:
    calls = [
        make_call(0, None, prompt=50, response=3), make_call(1, 0, response=4), make_call(2, 0, response=9),
        make_call(3, None, response=11),
    ]  # fmt: skip
    assert sampled_on_a_branch(forest.build(calls)) == 12
    assert sampled_on_a_branch(forest.build([])) == 0
    assert OverlongBuffer(max_length=12, length=4, factor=0.5).penalty(forest.build(calls)) == -0.5


@given(attempts())
def test_it_is_at_most_what_was_sampled_and_at_least_any_answer(calls: list[Call]) -> None:
    found = sampled_on_a_branch(forest.build(calls))
    lengths = [len(call.response_ids) for call in calls]
    assert max(lengths, default=0) <= found <= sum(lengths)
