"""Every row has one worker, every worker as many tokens as the others, and rows that begin alike stay together."""

from itertools import combinations_with_replacement, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.training.batch import TrainingSequence
from lightning_rl.training.distributed.work_partition import parts, silent


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


@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), max_size=7), st.integers(1, 4), st.booleans())
def test_no_other_cut_has_a_smaller_largest_part(tokens: list[list[int]], workers: int, packed: bool) -> None:
    ordered = sorted(tokens)
    cuts = combinations_with_replacement(range(len(ordered) + 1), workers - 1)
    least = min(
        max(cost(ordered[start:end], packed) for start, end in pairwise([0, *ends, len(ordered)])) for ends in cuts
    )
    found = parts([row(ids) for ids in tokens], workers, packed=packed)
    assert max(cost([one.token_ids.tolist() for one in part], packed) for part in found) == least


def cost(rows: list[list[int]], packed: bool) -> int:
    """Tokens that are computed; packed, one for each node of the tree of their beginnings."""
    begins = [tuple(ids[: n + 1]) for ids in rows for n in range(len(ids))]
    return len(set(begins)) if packed else len(begins)


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
    assert [len(part) for part in whole] == [5, 4]


def test_a_silent_row_trains_nothing() -> None:
    quiet = silent(row([1, 2, 3], rollout=7))
    assert (quiet.rollout, len(quiet), len(quiet.trained)) == (7, 1, 0)
