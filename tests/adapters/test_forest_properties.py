"""Laws 1 to 3 and 6 for any attempt: rows are what the engine saw and said, whoever came first and whatever is dropped.

`test_rows.py` has the tokens of a row one by one; here are the whole attempt, its orders of arrival, and what is left
out.
"""

import random
from collections import Counter
from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl_adapters import forest, rows
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.forest import Forest, Node
from lightning_rl_adapters.rows import Row
from lightning_rl_adapters.triplet import prompt_ids
from tests.adapters.forests import attempts


@st.composite
def flawed(draw: st.DrawFn) -> list[Call]:
    """Attempts in which the tokens of some calls are not known, and some are of a frozen model."""
    odds = st.integers(0, 9)
    return [
        msgspec.structs.replace(call, exact=draw(odds) > 0, trainable=draw(odds) > 0)
        for call in draw(attempts(max_calls=10))
    ]


def cut(calls: Sequence[Call], max_tokens: int | None = None) -> list[Row]:
    return rows.cut(forest.build(calls), {}, max_tokens=max_tokens)


def trained_calls(row: Row) -> set[str]:
    return {call_id for call_id in row.call_ids if call_id is not None}


def below(node: Node) -> list[Node]:
    """The leaves whose path goes through a node."""
    return [leaf for child in node.children for leaf in below(child)] or [node]


def in_another_order(calls: Sequence[Call], order: random.Random) -> list[Call]:
    """The same calls, numbered in another order of arrival in which each still comes after its parent."""
    waiting, arrived = list(calls), list[Call]()
    while waiting:
        known = {call.call_id for call in arrived} | {None}
        call = order.choice([call for call in waiting if call.parent_id in known])
        waiting.remove(call)
        arrived.append(msgspec.structs.replace(call, number=len(arrived)))
    return arrived


def by_leaf(calls: Sequence[Call]) -> tuple[Forest, dict[str, Row]]:
    built = forest.build(calls)
    leaves = [leaf.call.call_id for leaf in built.leaves()]
    return built, dict(zip(leaves, rows.cut(built, {}), strict=True))


@given(attempts())
def test_some_row_begins_with_all_that_the_engine_saw_and_said_in_a_call(calls: list[Call]) -> None:
    built = forest.build(calls)
    cut_rows = rows.cut(built, {})
    for node in built.nodes.values():
        whole = prompt_ids(node) + node.call.response_ids
        assert any(row.token_ids[: len(whole)] == whole for row in cut_rows), node.call.call_id


@given(flawed(), st.integers(1, 40))
def test_there_are_as_many_rows_as_leaves(calls: list[Call], max_tokens: int) -> None:
    parents = {call.parent_id for call in calls}
    assert len(cut(calls, max_tokens)) == sum(call.call_id not in parents for call in calls)


@given(attempts(), st.sets(st.integers(0, 11)))
def test_masks_hold_what_was_delivered_less_the_calls_left_out_by_name(calls: list[Call], numbers: set[int]) -> None:
    left_out = {call.call_id: "not_selected" for call in calls if call.number in numbers}
    cut_rows = rows.cut(forest.build(calls), {}, left_out=left_out)
    expected = {
        call.call_id: len(call.response_ids)
        for call in calls
        if call.delivered and call.call_id not in left_out and call.response_ids
    }
    assert Counter(call_id for row in cut_rows for call_id in row.call_ids if call_id is not None) == expected
    assert sum(sum(row.loss_mask) for row in cut_rows) == sum(expected.values())
    named: dict[str, str] = {}
    for row in cut_rows:
        named |= row.excluded_calls
    undelivered = {call.call_id: "undelivered" for call in calls if not call.delivered}
    assert named == left_out | undelivered


@given(attempts(), st.randoms(), st.integers(1, 40))
def test_records_in_any_order_give_the_same_rows(calls: list[Call], order: random.Random, max_tokens: int) -> None:
    shuffled = list(calls)
    order.shuffle(shuffled)
    assert cut(shuffled, max_tokens) == cut(calls, max_tokens)


@given(attempts(), st.randoms())
def test_another_order_of_arrival_changes_only_who_trains_a_trunk(calls: list[Call], order: random.Random) -> None:
    built, before = by_leaf(calls)
    _, after = by_leaf(in_another_order(calls, order))
    assert before.keys() == after.keys()
    for name, row in before.items():
        assert row.token_ids == after[name].token_ids
        trunks = {node.call.call_id for node in built.nodes[name].path() if len(below(node)) > 1}
        assert trained_calls(row) - trunks == trained_calls(after[name]) - trunks
    everything = [Counter(c for row in found.values() for c in row.call_ids if c) for found in (before, after)]
    assert everything[0] == everything[1]


@given(flawed(), st.integers(1, 40))
def test_no_trunk_is_lost_with_a_dropped_row_while_a_branch_of_it_trains(calls: list[Call], max_tokens: int) -> None:
    built = forest.build(calls)
    cut_rows = dict(zip(built.leaves(), rows.cut(built, {}, max_tokens=max_tokens), strict=True))
    dropped = ("overlong", "inexact", "frozen")
    for name, node in built.nodes.items():
        if not node.call.delivered or not node.call.response_ids:
            continue
        holding = [row for leaf, row in cut_rows.items() if name in row.call_ids]
        kept = [leaf for leaf in below(node) if cut_rows[leaf].excluded not in dropped]
        assert len(holding) == 1, name
        assert (holding[0].excluded not in dropped) == bool(kept), name
