"""Means with their confidence intervals: hand-computed cases, and how often they hold the truth."""

import math
import random

import pytest

from lightning_rl.algorithms.evaluation import evaluate, of_tasks, students_t, wilson


def test_wilson_against_published_values() -> None:
    """Newcombe 1998 (Statistics in Medicine 17), table I, method 3."""
    for successes, n, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611)):
        assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_the_interval_of_a_mean_by_hand() -> None:
    low, high = of_tasks([0.0, 0.5, 1.0])
    assert (low + high) / 2 == pytest.approx(0.5)
    assert high - low == pytest.approx(2 * 4.302653 * math.sqrt(0.25 / 3), rel=1e-5)


def test_students_t_against_published_values() -> None:
    published = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 15: 2.131, 30: 2.042, 100: 1.984}
    for freedom, quantile in published.items():
        assert students_t(freedom) == pytest.approx(quantile, rel=2e-3)


def test_one_rollout_per_task_of_zeros_and_ones_is_an_accuracy() -> None:
    found = evaluate("val", {"a": [1.0], "b": [0.0], "c": [1.0], "d": [1.0]}, failed=1)
    assert found.accuracy
    assert (found.mean, found.tasks, found.rollouts) == (0.75, 4, 4)
    assert (found.low, found.high) == wilson(3, 4)
    assert str(found).startswith("val: accuracy 0.750, 95 % confidence 0.301 to 0.954 (4 tasks, 4 rollouts, 1 failed)")


def test_rollouts_of_one_task_are_no_independent_evidence() -> None:
    once = evaluate("val", {"a": [0.2], "b": [0.4]})
    often = evaluate("val", {"a": [0.2] * 50, "b": [0.4] * 50})
    assert (once.low, once.high) == (often.low, often.high)
    assert not once.accuracy


def test_each_task_counts_once_however_often_it_was_tried() -> None:
    assert evaluate("val", {"a": [1.0], "b": [0.0, 0.0, 0.0]}).mean == 0.5


def test_tasks_that_all_went_alike_are_no_certainty() -> None:
    for reward in (0.0, 1.0):
        found = evaluate("val", {str(task): [reward] * 4 for task in range(8)})
        assert (found.low, found.high) == wilson(8 * reward, 8)
    halves = evaluate("val", {str(task): [0.0, 1.0] for task in range(4)})
    assert halves.low < 0.2 < 0.8 < halves.high


def test_an_accuracy_never_leaves_0_to_1() -> None:
    few = evaluate("val", {str(task): [0.0, 0.0] for task in range(9)} | {"x": [0.0, 1.0]})
    assert (few.low, few.accuracy) == (0.0, True)
    many = evaluate("val", {str(task): [1.0, 1.0] for task in range(9)} | {"x": [0.0, 1.0]})
    assert (many.low, many.high) == (pytest.approx(1 - few.high), 1.0)
    for n in range(1, 300):
        assert 0 <= wilson(0, n)[0] < wilson(n, n)[1] <= 1
    assert evaluate("val", {"a": [-1.0, 0.5], "b": [0.5, 0.5]}).low < 0


def test_rewards_that_are_all_the_same_have_the_interval_of_their_scale() -> None:
    alike = evaluate("val", {"a": [7.0], "b": [7.0, 7.0]})
    assert (alike.low, alike.high, alike.accuracy) == (7.0, 7.0, False)


def test_what_infrastructure_lost_is_counted_apart() -> None:
    found = evaluate("val", {"a": [1.0]}, left_out=3)
    assert (found.rollouts, found.tasks, found.left_out) == (4, 1, 3)


def test_nothing_is_nothing() -> None:
    nothing = evaluate("val", {}, left_out=2)
    assert math.isnan(nothing.mean)
    assert str(nothing) == "val: nothing was measured (2 left out)"
    alone = evaluate("val", {"a": [0.5, 2.0]})
    assert str(alone).startswith(
        "val: mean reward 1.250, 95 % confidence unknown of fewer than two tasks (1 task, 2 rollouts)"
    )


def test_the_interval_holds_the_truth_about_95_times_in_100() -> None:
    chance = random.Random(0)
    held = {"wilson": 0, "of many tasks": 0, "of few tasks": 0}
    for _ in range(2000):
        low, high = wilson(sum(chance.random() < 0.3 for _ in range(100)), 100)
        held["wilson"] += low <= 0.3 <= high
        for what, tasks in (("of many tasks", 100), ("of few tasks", 6)):
            low, high = of_tasks([sum(chance.random() < 0.3 for _ in range(8)) / 8 for _ in range(tasks)])
            held[what] += low <= 0.3 <= high
    assert all(0.93 < count / 2000 < 0.97 for count in held.values())
