"""The batch: mini-batches of whole rollouts, as many in every step, and weights that are one mini-batch's own."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.rl.aggregation import MODES
from lightning_rl.training.batch import MiniBatch, TrainingSequence, by_sequence, micro_batches, mini_batches


def sequence(rollout: int, tokens: int = 3, trained: int = 2) -> TrainingSequence:
    zeros = np.zeros(trained, np.float32)
    return TrainingSequence(
        rollout=rollout,
        token_ids=np.arange(tokens),
        trained=np.arange(tokens - trained, tokens),
        rollout_log_probs=zeros,
        advantages=zeros,
        temperature=zeros + 1,
    )


def cut(sequences: list[TrainingSequence], rollouts: int, each: int, mode: str = "token-mean") -> list[MiniBatch]:
    return mini_batches(sequences, rollouts=rollouts, rollouts_each=each, mode=mode, scale_factor=8.0)


def members(plan: list[MiniBatch]) -> list[list[int]]:
    return [sorted({s.rollout for s in mini.sequences}) for mini in plan]


def test_mini_batches_are_cut_by_whole_rollouts_in_their_order() -> None:
    rows = [sequence(rollout) for rollout in range(6) for _ in range(3)]
    assert members(cut(rows, 6, 2)) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("rows_each", [1, 2, 50])
def test_the_number_of_optimizer_steps_does_not_depend_on_the_number_of_rows(rows_each: int) -> None:
    rows = [sequence(rollout) for rollout in range(8) for _ in range(rows_each)]
    assert len(cut(rows, 8, 2)) == 4


def test_rollouts_without_tokens_leave_no_mini_batch_empty() -> None:
    rows = [sequence(rollout) for rollout in (0, 1, 6, 7, 8)]
    assert members(cut(rows, 9, 3)) == [[0], [1, 6], [7, 8]]
    assert members(cut(rows[:2], 9, 3)) == [[0], [1]]
    assert cut([], 9, 3) == []


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=12),
    st.integers(1, 5),
    st.sampled_from(MODES),
    st.randoms(),
)
def test_every_rollout_is_in_one_mini_batch_whatever_the_order_of_rows(
    rows_of: list[int], each: int, mode: str, order: object
) -> None:
    rows = [sequence(rollout, trained=1 + rollout % 2) for rollout, n in enumerate(rows_of) for _ in range(n)]
    plan = cut(rows, len(rows_of), each, mode)
    live = [rollout for rollout, n in enumerate(rows_of) if n]
    assert [rollout for found in members(plan) for rollout in found] == live
    assert len(plan) == min(math.ceil(len(rows_of) / each), len(live))
    sizes = [len(found) for found in members(plan)]
    assert not sizes or max(sizes) - min(sizes) <= 1
    shuffled = list(rows)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    again = cut(shuffled, len(rows_of), each, mode)
    assert [mini.weights for mini in again] == [mini.weights for mini in plan]


def test_the_weights_of_token_mean_sum_to_one() -> None:
    rows = [sequence(0, 5, 4), sequence(0, 3, 1), sequence(1, 9, 2)]
    [mini] = cut(rows, 2, 2)
    assert sum(mini.weights[s.rollout] * len(s.trained) for s in mini.sequences) == pytest.approx(1.0)


def test_what_is_kept_keeps_its_place_in_its_call() -> None:
    row = sequence(0, tokens=8, trained=6)
    row.calls = {"a": 2, "b": 5}
    row.keep(np.array([True, False, True, True, True, False]))
    assert [(name, where.tolist(), places.tolist()) for name, where, places in row.trained_by_call()] == [
        ("a", [0, 1], [0, 2]),
        ("b", [2, 3], [0, 1]),
    ]


@pytest.mark.parametrize("name", ["old_log_probs", "reference_log_probs", "weights", "values", "returns"])
def test_what_is_known_of_tokens_goes_with_them(name: str) -> None:
    row = sequence(0, tokens=8, trained=4)
    setattr(row, name, np.arange(4, dtype=np.float32))
    row.keep(np.array([True, False, False, True]))
    assert getattr(row, name).tolist() == [0, 3]
    row.truncate_response(7)
    assert getattr(row, name).tolist() == [0]


def test_numbers_of_calls_are_spread_over_the_tokens_that_are_trained() -> None:
    row = sequence(0, tokens=8, trained=6)
    row.calls = {"a": 2, "b": 5, "c": 7}
    row.keep(np.array([False, True, True, True, True, True]))
    assert row.spread({"a": np.array([9.0, 1.0, 2.0]), "b": 4.0}).tolist() == [1, 2, 4, 4, 0]


def test_what_is_computed_in_parts_comes_back_by_sequence() -> None:
    rows = [sequence(rollout, tokens=tokens, trained=rollout + 1) for rollout, tokens in enumerate((9, 3, 6))]

    def compute(micro: list[TrainingSequence]) -> torch.Tensor:
        return torch.cat([torch.full((len(row.trained),), float(row.rollout)) for row in micro])

    found = by_sequence(micro_batches(rows, rows=2, tokens=None), compute)
    assert [found[id(row)].tolist() for row in rows] == [[0], [1, 1], [2, 2, 2]]


@pytest.mark.parametrize("max_tokens", [8, 9])
def test_a_row_that_fits_is_not_cut(max_tokens: int) -> None:
    row = sequence(0, tokens=8, trained=6)
    assert (row.truncate_left(max_tokens), row.truncate_response(max_tokens)) == (0, 0)
    assert (len(row), len(row.trained), row.cut_context) == (8, 6, False)
