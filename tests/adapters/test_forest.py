"""The forest is the calls' own shape, whatever the order of their records; damage is named."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from lightning_rl_adapters import forest
from lightning_rl_adapters.call import Call
from tests.adapters.forests import attempts, make_call


def shape(built: forest.Forest) -> dict[str, tuple[str | None, list[str]]]:
    return {
        name: (node.parent.call.call_id if node.parent else None, [c.call.call_id for c in node.children])
        for name, node in built.nodes.items()
    }


@given(attempts(), st.randoms())
def test_records_in_any_order_give_the_same_forest(calls: list[Call], order: random.Random) -> None:
    shuffled = list(calls)
    order.shuffle(shuffled)
    assert shape(forest.build(shuffled)) == shape(forest.build(calls))


@given(attempts())
def test_every_call_is_one_node_below_its_parent(calls: list[Call]) -> None:
    built = forest.build(calls)
    assert list(built.nodes) == [call.call_id for call in calls]
    for call in calls:
        parent = built.nodes[call.call_id].parent
        assert (parent.call.call_id if parent else None) == call.parent_id


def test_equal_siblings_stay_two_samples() -> None:
    built = forest.build([make_call(0, None), make_call(1, 0), make_call(2, 0)])
    assert [node.call.call_id for node in built.nodes["c0"].children] == ["c1", "c2"]


def test_interleaved_conversations_do_not_mix() -> None:
    """A, B, A, B: a parent and its sub-agent take turns."""
    built = forest.build([make_call(0, None), make_call(1, None), make_call(2, 0), make_call(3, 1)])
    assert [[n.call.call_id for n in leaf.path()] for leaf in built.leaves()] == [["c0", "c2"], ["c1", "c3"]]


@pytest.mark.parametrize(
    ("calls", "complaint"),
    [
        ([make_call(1, 0)], "c1 continues c0, which did not arrive before it"),
        ([make_call(0, None), make_call(0, None)], "c0 is recorded twice"),
        ([make_call(0, None), make_call(1, 0, model="other")], "of model 'other' continues c0"),
        ([make_call(0, None), replace(make_call(1, None), rollout_id="s")], "c1 belongs to another attempt"),
        ([make_call(0, None), replace(make_call(1, None), attempt_id="b")], "c1 belongs to another attempt"),
    ],
)
def test_damaged_records_are_refused_by_name(calls: list[Call], complaint: str) -> None:
    with pytest.raises(forest.ForestError, match=complaint):
        forest.build(calls)
