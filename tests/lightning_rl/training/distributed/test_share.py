"""Every row has one worker, every worker as many tokens as the others, and rows that begin alike stay together."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.training.batch import TrainingSequence
from lightning_rl.training.distributed.share import parts, silent


def row(token_ids: list[int], rollout: int = 0) -> TrainingSequence:
    some = np.ones(len(token_ids) - 1, np.float32)
    return TrainingSequence(rollout, np.array(token_ids), np.arange(1, len(token_ids)), some, some, some)


ROWS = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=30), max_size=30)


@given(ROWS, st.integers(1, 5), st.booleans())
def test_every_row_is_in_one_part(tokens: list[list[int]], workers: int, packed: bool) -> None:
    rows = [row(ids) for ids in tokens]
    found = parts(rows, workers, packed=packed)
    assert len(found) == workers
    assert sorted(id(one) for part in found for one in part) == sorted(map(id, rows))


@given(ROWS, st.integers(1, 5))
def test_no_part_has_more_than_its_share_and_one_row(tokens: list[list[int]], workers: int) -> None:
    rows = [row(ids) for ids in tokens]
    most = max((len(one) for one in rows), default=0)
    for part in parts(rows, workers, packed=False):
        assert sum(map(len, part)) <= sum(map(len, rows)) / workers + most + 1e-3


def test_rows_that_begin_alike_are_not_parted() -> None:
    groups = [[first, 5, 6, 7, 8, 9, last] for last in (1, 2, 3) for first in (1, 2)]
    one, other = parts([row(ids) for ids in groups], 2, packed=True)
    assert [{r.token_ids[0] for r in part} for part in (one, other)] == [{1}, {2}]


def test_what_is_shared_costs_nothing_where_it_is_computed_once() -> None:
    alike = [row([1] * 20 + [last]) for last in range(8)]
    alone = [row([2, *range(20), last]) for last in range(1)]
    packed = parts([*alike, *alone], 2, packed=True)
    assert [len(part) for part in packed] == [8, 1]
    whole = parts([*alike, *alone], 2, packed=False)
    assert [len(part) for part in whole] == [4, 5]


def test_a_silent_row_trains_nothing() -> None:
    quiet = silent(row([1, 2, 3], rollout=7))
    assert (quiet.rollout, len(quiet), len(quiet.trained)) == (7, 1, 0)
