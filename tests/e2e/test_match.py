"""The verdict on two results: reordering never changes it, a changed value always does, and it is what a search over
all orders of columns says.
"""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.sql_agent.match import Row, asks_for_order, prepared, same_result

FEW = st.sampled_from([None, 0, 1, 1.0, "1", "a", b"a"])  # so few that columns and rows often look alike


def results(values: st.SearchStrategy[object], width: int = 5, height: int = 6) -> st.SearchStrategy[list[Row]]:
    return st.integers(1, width).flatmap(
        lambda wide: st.lists(st.tuples(*[values] * wide), min_size=1, max_size=height)
    )


def reordered(rows: list[Row], rng: random.Random, *, ordered: bool) -> list[Row]:
    columns = rng.sample(range(len(rows[0])), len(rows[0]))
    moved = [tuple(row[column] for column in columns) for row in rows]
    return moved if ordered else rng.sample(moved, len(moved))


def by_trial(expected: list[Row], got: list[Row], *, ordered: bool) -> bool:
    """The definition, without any pruning."""
    if not expected or not got:
        return len(expected) == len(got)
    for columns in itertools.permutations(range(len(got[0]))):
        moved = [tuple(row[column] for column in columns) for row in got]
        if expected == moved if ordered else Counter(expected) == Counter(moved):
            return True
    return False


@given(results(FEW), st.booleans(), st.randoms(use_true_random=False))
def test_the_order_of_columns_never_counts_nor_that_of_rows_unless_it_is_asked_for(
    rows: list[Row], ordered: bool, rng: random.Random
) -> None:
    assert same_result(rows, reordered(rows, rng, ordered=ordered), ordered=ordered)


@given(results(FEW), st.booleans(), st.randoms(use_true_random=False), st.data())
def test_a_changed_value_always_counts(rows: list[Row], ordered: bool, rng: random.Random, data: st.DataObject) -> None:
    other = reordered(rows, rng, ordered=ordered)
    at = data.draw(st.integers(0, len(other) - 1)), data.draw(st.integers(0, len(other[0]) - 1))
    value = data.draw(FEW.filter(lambda value: value != other[at[0]][at[1]]))
    other[at[0]] = tuple(value if at[1] == column else cell for column, cell in enumerate(other[at[0]]))
    assert not same_result(rows, other, ordered=ordered)


@given(
    st.integers(1, 4).flatmap(
        lambda n: st.lists(st.lists(st.tuples(*[st.integers(0, 1)] * n), max_size=5), min_size=2, max_size=2)
    ),
    st.booleans(),
)
def test_the_verdict_is_that_of_trying_every_order_of_columns(both: list[list[Row]], ordered: bool) -> None:
    assert same_result(*both, ordered=ordered) == by_trial(*both, ordered=ordered)


@given(results(st.integers(0, 1), width=4), st.randoms(use_true_random=False), st.data())
def test_so_it_is_where_both_have_the_same_values_at_other_places(
    rows: list[Row], rng: random.Random, data: st.DataObject
) -> None:
    """Each row and each column keeps how many ones it has, where a rectangle of them is turned over."""
    other = [list(row) for row in rows]
    corners = [
        (i, j, k, m)
        for i, j in itertools.permutations(range(len(rows)), 2)
        for k, m in itertools.permutations(range(len(rows[0])), 2)
        if (rows[i][k], rows[i][m], rows[j][k], rows[j][m]) == (1, 0, 0, 1)
    ]
    if corners:
        i, j, k, m = data.draw(st.sampled_from(corners))
        other[i][k], other[i][m], other[j][k], other[j][m] = 0, 1, 1, 0
    got = reordered([tuple(row) for row in other], rng, ordered=False)
    assert same_result(rows, got, ordered=False) == by_trial(rows, got, ordered=False)


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        ([], [], True),
        ([], [(None,)], False),
        ([(1,)], [(1,), (1,)], False),
        ([(1,), (1,), (2,)], [(1,), (2,), (2,)], False),
        ([(1, 2)], [(1,)], False),
        ([(1, 2)], [(2.0, 1)], True),
        ([(1,)], [("1",)], False),
        ([(None,)], [("None",)], False),
        ([(0.1 + 0.2,)], [(0.3,)], False),
        ([(1, 1)], [(1, 2)], False),
        ([(1, 1, 2)], [(1, 2, 2)], False),
        ([("a", 1), ("b", 2)], [("b", 1), ("a", 2)], False),
        ([("a", 1), ("b", 1)], [(1, "b"), (1, "a")], True),
    ],
)
def test_results_are_compared_as_bags_of_values(expected: list[Row], got: list[Row], same: bool) -> None:
    assert same_result(expected, got, ordered=False) is same


def test_rows_keep_their_order_where_it_is_asked_for() -> None:
    assert same_result([(1, "a"), (2, "b")], [("a", 1), ("b", 2)], ordered=True)
    assert not same_result([(1, "a"), (2, "b")], [("b", 2), ("a", 1)], ordered=True)


def ring(*lengths: int) -> list[Row]:
    """A table whose ones are the sides of rings: all its rows look alike, and all its columns."""
    places = list(itertools.accumulate(lengths, initial=0))
    ones = {
        frozenset((first + i, first + (i + 1) % length))
        for first, length in zip(places, lengths, strict=False)
        for i in range(length)
    }
    width = sum(lengths)
    return [tuple(int(frozenset((i, j)) in ones) for j in range(width)) for i in range(width)]


def test_columns_that_look_alike_are_tried_until_one_fits() -> None:
    for seed in range(10):
        other = reordered(ring(3, 4, 5), random.Random(seed), ordered=False)
        assert same_result(ring(3, 4, 5), other, ordered=False)
        assert not same_result(ring(4, 4, 4), other, ordered=False)


def test_wide_results_are_compared_without_trying_every_order() -> None:
    """24 columns have 6e23 orders, so a search through them would run into the limit that every test has."""
    rng = random.Random(0)
    wide = [tuple(rng.randint(0, 1) for _ in range(80)) for _ in range(200)]
    assert same_result(ring(24), reordered(ring(24), rng, ordered=False), ordered=False)
    assert not same_result(ring(24), reordered(ring(12, 12), rng, ordered=False), ordered=False)
    assert same_result(wide, reordered(wide, rng, ordered=False), ordered=False)
    assert not same_result([(None,) * 200] * 50, [(None,) * 199 + (0,)] * 50, ordered=False)


@pytest.mark.parametrize(
    ("query", "run"),
    [
        (
            "SELECT a FROM t WHERE b > = 1 AND c ! = 2 AND d <  = 3",
            "SELECT a FROM t WHERE b >= 1 AND c != 2 AND d <= 3",
        ),
        ("SELECT a FROM t WHERE b = '> ='", "SELECT a FROM t WHERE b = '> ='"),
        ("SELECT DISTINCT a FROM t", "SELECT  a FROM t"),
        ("SELECT count(distinct a), 'it''s DISTINCT' FROM t", "SELECT count( a), 'it''s DISTINCT' FROM t"),
        ('SELECT "distinct", [distinct], `distinct` FROM t', 'SELECT "distinct", [distinct], `distinct` FROM t'),
        ("SELECT distinct_of FROM t", "SELECT distinct_of FROM t"),
        ("SELECT a IS NOT DISTINCT FROM b FROM t", "SELECT a IS NOT DISTINCT FROM b FROM t"),
        ("SELECT YEAR(CURDATE()) - a FROM t", "SELECT 2020 - a FROM t"),
        ("SELECT year ( curdate ( ) ) FROM t", "SELECT 2020 FROM t"),
        ("SELECT 'not ended", "SELECT 'not ended"),
    ],
)
def test_a_query_is_prepared_outside_of_its_texts_and_names(query: str, run: str) -> None:
    assert prepared(query) == run


@pytest.mark.parametrize(
    ("query", "ordered"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("select a from t order\n by a", True),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a LIMIT 3)", True),
        ("SELECT a FROM t", False),
        ("SELECT 'order by' FROM t -- order by", False),
        ("SELECT border, byte FROM t", False),
    ],
)
def test_order_is_asked_for_by_order_by(query: str, ordered: bool) -> None:
    assert asks_for_order(query) is ordered
