"""Whether two queries give the same answer, by the rules of test-suite evaluation (Zhong, Yu and Klein, 2020).

Two results are the same when some order of the columns of one makes them equal: row by row where the right query asks
for an order, else as bags of rows. Values are compared as Python compares them, so 1 is 1.0 and not '1'; two results
without rows are the same. DISTINCT counts for nothing: it is taken out of both queries before they run, which is the
rules' default. The order of columns is searched for, and nothing is sampled on the way, so the verdict is exact.

Invariant: pure functions of texts and rows. Only whole tokens outside of quotes and comments are touched in a query.
"""

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

Row = tuple[Any, ...]

_QUOTED = r"""'(?:[^']|'')*' | "(?:[^"]|"")*" | `(?:[^`]|``)*` | \[[^\]]*\] | --[^\n]* | /\*.*?\*/"""
_FLAGS = re.VERBOSE | re.DOTALL | re.IGNORECASE
_SPLIT_COMPARISON = re.compile(rf"({_QUOTED}) | ([<>!])\s+(?==)", _FLAGS)
_YEAR_OF_TODAY = re.compile(rf"({_QUOTED}) | \bYEAR\s*\(\s*CURDATE\s*\(\s*\)\s*\)", _FLAGS)
_DISTINCT = re.compile(rf"({_QUOTED} | \bIS\s+(?:NOT\s+)?DISTINCT\s+FROM\b) | \bDISTINCT\b", _FLAGS)
_ORDER = re.compile(rf"{_QUOTED} | (\bORDER\s+BY\b)", _FLAGS)


def prepared(query: str) -> str:
    """The query as it is run to be judged.

    Comparisons that were torn apart (`> =`) are joined, MySQL's current year is 2020, since the data is of then, and
    DISTINCT is left out, but not in `IS DISTINCT FROM`.
    """
    query = _SPLIT_COMPARISON.sub(lambda found: found[1] or found[2], query)
    query = _YEAR_OF_TODAY.sub(lambda found: found[1] or "2020", query)
    return _DISTINCT.sub(lambda found: found[1] or "", query)


def asks_for_order(query: str) -> bool:
    """Whether ORDER BY stands anywhere in the query, also in a part of it."""
    return any(found[1] for found in _ORDER.finditer(query))


def same_result(expected: Sequence[Row], got: Sequence[Row], *, ordered: bool) -> bool:
    """Whether the results are equal up to the order of columns and, unless `ordered`, of rows.

    The rows of a result have one length. The time grows with the number of cells. Only where columns cannot be told
    apart by their values and those beside them, several are tried.
    """
    if len(expected) != len(got):
        return False
    if not expected:
        return True
    if len(expected[0]) != len(got[0]):
        return False
    columns, other = Counter(zip(*expected, strict=True)), Counter(zip(*got, strict=True))
    if ordered:
        return columns == other
    return Counter(expected) == Counter(got) or _Pairing(columns, other, len(expected)).exists()


class _Pairing:
    """The search for a column of the other result for each of the one, such that the bags of rows are equal.

    Rows and columns have numbers, which say what is known of them and do not change when anything is reordered: what
    has different numbers is never paired. A column's number comes from its values and the numbers of their rows, a
    row's from its values and the numbers of their columns. Where that does not tell the columns apart, one of them is
    paired by trial, and its values go into the numbers of the rows. Equal columns are one column here, with a count.
    """

    def __init__(self, columns: Counter[Row], other: Counter[Row], height: int) -> None:
        self._columns, self._other, self._height = columns, other, height
        self._numbers: dict[Hashable, int] = {}

    def exists(self) -> bool:
        """Whether there is such a pairing."""
        return self._search([0] * self._height, [0] * self._height)

    def _search(self, rows: list[int], other_rows: list[int]) -> bool:
        while True:
            kinds, other = self._kinds(self._columns, rows), self._kinds(self._other, other_rows)
            if (alike := Counter(kinds)) != Counter(other):
                return False
            if len(alike) == len(kinds):
                return self._fits(kinds, other)
            finer = self._by_columns(self._columns, kinds, rows)
            if len(set(finer)) == len(set(rows)):
                break
            rows, other_rows = finer, self._by_columns(self._other, other, other_rows)
        kind = min((kind for kind in alike if alike[kind] > 1), key=lambda kind: alike[kind])
        tried = self._by_values(rows, list(self._columns)[kinds.index(kind)])
        return any(
            self._search(tried, self._by_values(other_rows, column))
            for column, found in zip(self._other, other, strict=True)
            if found == kind
        )

    def _fits(self, kinds: list[int], other: list[int]) -> bool:
        """Whether the rows are equal bags when columns of the same kind, of which there is one each, are paired."""
        paired = dict(zip(other, self._other, strict=True))
        theirs = zip(*(paired[kind] for kind in kinds), strict=True)
        return Counter(zip(*self._columns, strict=True)) == Counter(theirs)

    def _kinds(self, columns: Counter[Row], rows: list[int]) -> list[int]:
        return [self._number((_bag(zip(rows, column, strict=True)), count)) for column, count in columns.items()]

    def _by_columns(self, columns: Counter[Row], kinds: list[int], rows: list[int]) -> list[int]:
        cells = zip(*columns, strict=True)
        return [
            self._number((number, _bag(zip(kinds, row, strict=True)))) for number, row in zip(rows, cells, strict=True)
        ]

    def _by_values(self, rows: list[int], column: Row) -> list[int]:
        return [self._number(pair) for pair in zip(rows, column, strict=True)]

    def _number(self, what: Hashable) -> int:
        """The same number for equal things, whichever result they are of."""
        return self._numbers.setdefault(what, len(self._numbers))


def _bag(values: Iterable[Hashable]) -> frozenset[tuple[Hashable, int]]:
    return frozenset(Counter(values).items())
