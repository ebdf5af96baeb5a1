"""A packed layout shows every token what it would see in a row of its own, and holds what rows share once."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.training.batch import TrainingSequence
from lightning_rl.training.packing import Layout, alone, cost, cut, lay_out, shared_lines, sizes, stacked


def sequence(token_ids: Sequence[int], trained: Sequence[int] | None = None) -> TrainingSequence:
    at = np.arange(1, len(token_ids)) if trained is None else np.asarray(trained, dtype=np.int64)
    each = np.ones(len(at), np.float32)
    return TrainingSequence(0, np.asarray(token_ids, dtype=np.int64), at, -each, each, each)


@st.composite
def rows_that_share(draw: st.DrawFn, tokens: int = 3, longest: int = 12) -> list[TrainingSequence]:
    """Rows that begin as others do: groups, forks, equal rows, prefixes of others; and rows of their own."""
    ids = st.lists(st.integers(1, tokens), min_size=1, max_size=longest)
    rows: list[list[int]] = []
    for _ in range(draw(st.integers(1, 7))):
        begin = draw(st.sampled_from([[], *rows]))
        kept = begin[: draw(st.integers(0, len(begin)))]
        rows.append([*kept, *(draw(ids) if not kept or draw(st.booleans()) else [])])
    return [sequence(row) for row in rows]


def seen(layout: Layout, place: int) -> tuple[list[int], list[int]]:
    """Tokens and positions that the token at `place` attends to."""
    row, i = divmod(place, layout.token_ids.shape[1])
    visible = [j for j in range(i + 1) if i < layout.end[row, j]]
    return layout.token_ids[row, visible].tolist(), layout.position_ids[row, visible].tolist()


@given(rows_that_share(), st.floats(0, 0.1))
def test_every_trained_token_is_read_from_a_place_that_sees_exactly_the_tokens_before_it(
    rows: list[TrainingSequence], attention: float
) -> None:
    layout = lay_out(rows, shared_lines(rows, attention), pad_id=0, masked=True)
    places = iter(layout.at[layout.which].tolist())
    for row in rows:
        for k in row.trained.tolist():
            assert seen(layout, next(places)) == (row.token_ids[:k].tolist(), list(range(k)))
    assert layout.targets.tolist() == [t for row in rows for t in row.token_ids[row.trained].tolist()]


@given(rows_that_share(), st.floats(0, 0.1))
def test_segments_say_what_every_token_sees_and_are_known_before_the_layout(
    rows: list[TrainingSequence], attention: float
) -> None:
    lines = shared_lines(rows, attention)
    layout = lay_out(rows, lines, pad_id=0, masked=True, segments=True)
    length = layout.token_ids.shape[1]
    for segment in layout.segments:
        for n in range(segment.tokens):
            row, i = divmod(segment.start + n, length)
            own = [*segment.before, *range(segment.start, segment.start + n + 1)]
            assert own == [row * length + j for j in range(i + 1) if i < layout.end[row, j]]
    assert sum(segment.tokens for segment in layout.segments) == layout.distinct
    known = [size for line in lines for size in sizes(rows, line)]
    assert sorted(known) == sorted(segment.size for segment in layout.segments)


def test_a_group_is_its_prompt_and_its_answers() -> None:
    rows = [sequence([1, 2, 3, *answer]) for answer in ([4, 5], [4, 6], [7], [4, 5, 8])]
    (line,) = shared_lines(rows, attention=0)
    assert sorted(sizes(rows, line)) == [(0, 3), (3, 1), (3, 1), (4, 1), (4, 2)]


@given(rows_that_share())
def test_where_attention_is_free_every_shared_beginning_stands_once(rows: list[TrainingSequence]) -> None:
    beginnings = {tuple(row.token_ids[: k + 1].tolist()) for row in rows for k in range(len(row))}
    layout = lay_out(rows, shared_lines(rows, attention=0), pad_id=0, masked=True)
    assert layout.distinct == len(beginnings) == np.count_nonzero(layout.token_ids)


@given(rows_that_share())
def test_padding_sees_itself_alone(rows: list[TrainingSequence]) -> None:
    layout = lay_out(rows, shared_lines(rows, attention=0.05), pad_id=0, masked=True)
    for place in np.flatnonzero(layout.token_ids == 0).tolist():
        assert seen(layout, place) == ([0], [0])


@given(rows_that_share(), st.integers(1, 4), st.integers(1, 30))
def test_lines_keep_their_bounds_and_hold_every_row_once(
    rows: list[TrainingSequence], max_rows: int, max_tokens: int
) -> None:
    lines = shared_lines(rows, 0, max_rows=max_rows, max_tokens=max_tokens)
    assert sorted(n for line in lines for n in line.rows) == list(range(len(rows)))
    assert all(len(line.rows) <= max_rows for line in lines)
    assert all(line.tokens <= max_tokens or len(line.rows) == 1 for line in lines)


@given(rows_that_share(), st.floats(0, 0.5))
def test_joined_lines_cost_no_more_than_rows_alone(rows: list[TrainingSequence], attention: float) -> None:
    def total(lines: list[int]) -> float:
        return sum(cost(1, tokens, attention) for tokens in lines)

    joined = total([line.tokens for line in shared_lines(rows, attention)])
    assert joined <= total([len(row) for row in rows]) + 1e-9


def test_groups_that_share_a_short_beginning_alone_stay_apart() -> None:
    def group(of: int) -> list[TrainingSequence]:
        return [sequence([7] * 10 + [of] * 60 + [10 + k] * 30) for k in range(8)]

    lines = shared_lines([*group(1), *group(2)], attention=1 / 500)
    assert [sorted(line.rows) for line in lines] == [list(range(8)), list(range(8, 16))]


def test_short_lines_fill_the_room_behind_long_ones() -> None:
    rows = [sequence([n + 1] * length) for n, length in enumerate([4, 9, 3, 5, 9])]
    assert stacked(alone(rows)) == [[1], [4], [3, 0], [2]]


def test_rows_alone_are_the_plain_batch() -> None:
    rows = [sequence([1, 2, 3]), sequence([1, 2])]
    layout = lay_out(rows, alone(rows), pad_id=0, masked=False)
    assert layout.token_ids.tolist() == [[1, 2, 3], [1, 2, 0]]
    assert layout.at.tolist() == [0, 1, 3]


@given(rows_that_share(longest=20), st.integers(1, 4) | st.none(), st.integers(5, 60) | st.none())
def test_lines_are_cut_into_parts_within_the_bounds(
    rows: list[TrainingSequence], most: int | None, tokens: int | None
) -> None:
    lines = shared_lines(rows, 0.01, max_rows=most, max_tokens=tokens)
    parts = list(cut(lines, rows=most, tokens=tokens, fits=lambda part: True))
    assert sorted(n for part in parts for n in part) == list(range(len(rows)))
    assert all(most is None or len(part) <= most for part in parts)
    for part in parts:
        taken = [line for line in lines if line.rows[0] in part]
        padded = len(stacked(taken)) * max(line.tokens for line in taken)
        assert tokens is None or len(taken) == 1 or padded <= tokens


@pytest.mark.parametrize("too_many", [2, 3])
def test_a_part_that_does_not_fit_is_made_smaller_by_whole_lines(too_many: int) -> None:
    lines = alone([sequence([n + 1, 2]) for n in range(4)])
    parts = list(cut(lines, rows=None, tokens=None, fits=lambda part: len(part) < too_many))
    assert max(map(len, parts)) == too_many - 1
    assert sorted(n for part in parts for n in part) == [0, 1, 2, 3]
