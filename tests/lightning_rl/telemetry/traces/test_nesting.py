"""What an agent did stands below the call that asked for it; what it said of its own spans holds."""

from hypothesis import example, given
from hypothesis import strategies as st

from lightning_rl.telemetry.traces.nesting import parents
from lightning_rl_adapters import semconv
from lightning_rl_adapters.span import Span
from tests.lightning_rl.telemetry.traces.recorded import call, emitted, operation


def below(*spans: Span) -> dict[str, str | None]:
    """Who stands below whom, by short names."""
    short = {
        span.span_id: span.attributes.get(semconv.OPERATION_NAME, span.span_id.rpartition("-")[2]) for span in spans
    }
    return {short[span_id]: None if parent is None else short[parent] for span_id, parent in parents(spans).items()}


def test_a_tool_stands_below_the_call_that_was_answered_last() -> None:
    spans = call(0, 0, 1), call(1, 3, 4), operation("one", 1, 2, 1), operation("two", 4, 5, 2)
    assert below(*spans) == {"c0": None, "c1": None, "one": "c0", "two": "c1"}


def test_what_happens_before_any_answer_or_holds_calls_is_of_the_attempt() -> None:
    spans = operation("prepare", 0, 1, 1), call(0, 1, 2), operation("turn", 2, 9, 2), call(1, 3, 4)
    assert below(*spans) == {"prepare": None, "c0": None, "turn": None, "c1": "turn"}


def test_what_an_agent_said_holds_unless_that_span_never_came() -> None:
    outer = operation("outer", 2, 9, 1)
    inner = operation("inner", 3, 4, 2, parent=outer.span_id)
    lost = operation("lost", 3, 4, 3, parent="a2:" + "cd" * 16 + ":" + "9" * 16)
    assert below(call(0, 0, 1), outer, inner, lost) == {"c0": None, "outer": "c0", "inner": "outer", "lost": "c0"}


def test_a_call_is_in_the_innermost_span_unless_two_at_once_could_hold_it() -> None:
    outer = operation("outer", 0, 9, 1)
    inner = operation("inner", 1, 8, 2, parent=outer.span_id)
    beside = operation("beside", 1, 8, 3, parent=outer.span_id)
    assert below(outer, inner, call(0, 2, 3))["c0"] == "inner"
    assert below(outer, inner, beside, call(0, 2, 3))["c0"] is None


def test_rewards_and_what_was_printed_move_nowhere() -> None:
    printed, reward = emitted(semconv.LOG_SPAN, 0, 9, 1), emitted(semconv.REWARD_SPAN, 3, 3, 2)
    assert set(parents([call(0, 0, 1), printed, reward]).values()) == {None}


TIMES = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted)


# A clock that says a part began before what it is a part of, which holds a call.
@example(calls=[[0, 0]], steps=[([1, 1], -1), ([0, 0], 0)])
@given(calls=st.lists(TIMES, max_size=4), steps=st.lists(st.tuples(TIMES, st.integers(-1, 3)), max_size=4))
def test_every_span_leads_up_to_the_attempt(calls: list[list[int]], steps: list[tuple[list[int], int]]) -> None:
    spans = [call(number, *when) for number, when in enumerate(calls)]
    told: list[Span] = []
    for number, (when, above) in enumerate(steps):
        parent = told[above].span_id if 0 <= above < len(told) else None
        told.append(operation(str(number), when[0], when[1], number + 1, parent=parent))
    above_of = parents(spans + told)
    assert above_of.keys() == {span.span_id for span in spans + told}
    for span_id in above_of:
        seen, at = set(), above_of[span_id]
        while at is not None:
            assert at not in seen
            seen.add(at)
            at = above_of[at]
