"""The best checkpoint and early stopping, by the rewards on a tuning set."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.ppo.run_state import TuningRecord

rewards = st.lists(st.floats(-2, 2) | st.sampled_from([0.0, 1.0, math.nan]), max_size=12)
rules = st.tuples(st.none() | st.integers(1, 4), st.floats(0, 1) | st.just(0.0))


def after(values: list[float], patience: int | None = None, min_delta: float = 0.0) -> TuningRecord:
    tuning = TuningRecord(patience, min_delta)
    for step, reward in enumerate(values, 1):
        tuning.measured(step, reward)
    return tuning


@given(rewards)
def test_the_best_is_the_first_of_the_highest(values: list[float]) -> None:
    tuning = TuningRecord()
    best = [tuning.measured(step, reward) for step, reward in enumerate(values)]
    numbers = [(reward, -step) for step, reward in enumerate(values) if not math.isnan(reward)]
    assert tuning.best_step == (-max(numbers)[1] if numbers else None)
    assert [step for step, was in enumerate(best) if was][-1:] == (
        [] if tuning.best_step is None else [tuning.best_step]
    )
    assert tuning.stop is None


def test_nothing_measured_says_nothing() -> None:
    assert TuningRecord(patience=1).best_step is None
    assert TuningRecord(patience=1).stop is None
    unrewarded = after([-5.0, -6.0], patience=2)
    assert not unrewarded.measured(3, None)
    assert (unrewarded.best_step, unrewarded.stop) == (1, None)


@pytest.mark.parametrize(
    ("values", "patience", "min_delta", "ends_after"),
    [
        ([0.1, 0.2, 0.3, 0.3, 0.3], 2, 0.0, 5),  # as good as before is no rise
        ([0.5, 0.4, 0.3], 1, 0.0, 2),
        ([0.5, 0.4, 0.6, 0.5, 0.4], 2, 0.0, 5),  # a rise begins the count anew
        ([0.1, 0.15, 0.2, 0.25], 2, 0.1, 3),  # 0.2 is more by no more than 0.1
        ([0.1, 0.15, 0.25, 0.3], 2, 0.1, None),  # small rises add up
        ([0.1, 0.1, 0.1], None, 0.0, None),
        ([math.nan, math.nan], 2, 0.0, 2),
    ],
)
def test_a_run_ends_after_so_many_measurements_without_a_rise(
    values: list[float], patience: int | None, min_delta: float, ends_after: int | None
) -> None:
    ended = [after(values[:count], patience, min_delta).stop is not None for count in range(1, len(values) + 1)]
    assert (ended.index(True) + 1 if True in ended else None) == ends_after


def test_the_best_is_the_best_by_however_little() -> None:
    tuning = after([0.5, 0.5001, 0.5002], patience=2, min_delta=0.01)
    assert tuning.best_step == 3
    assert tuning.stop is not None


def test_why_a_run_ends_is_a_sentence() -> None:
    assert after([0.25, 0.5, 0.4, 0.3], patience=2).stop == (
        "the reward on the tuning tasks, now 0.3, has not risen in the last 2 measurements; the best is 0.5, of step 2"
    )
    assert after([0.5, 0.55], patience=1, min_delta=0.1).stop == (
        "the reward on the tuning tasks, now 0.55, has not risen by more than 0.1 in the last measurement; "
        "the best is 0.55, of step 2"
    )


@given(rewards, rewards, rules)
def test_a_resumed_run_goes_on_the_same_way(
    before: list[float], later: list[float], rule: tuple[int | None, float]
) -> None:
    whole, resumed = after(before, *rule), TuningRecord(*rule)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for step, reward in enumerate(later, len(before) + 1):
        assert whole.measured(step, reward) == resumed.measured(step, reward)
    assert (whole.best_step, whole.stop) == (resumed.best_step, resumed.stop)


def test_more_patience_goes_on_with_a_run_that_had_ended() -> None:
    ended = after([0.5, 0.4], patience=1)
    patient = TuningRecord(patience=2)
    patient.load_state_dict(ended.state_dict())
    assert ended.stop is not None
    assert patient.stop is None
