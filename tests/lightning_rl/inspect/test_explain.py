"""A recorded rollout as a person reads it: which attempt counts, the calls as trees, forks by cause, rows."""

import sys
from typing import Any

import msgspec
import pytest

from lightning_rl.inspect import draw
from lightning_rl.inspect.explain import ExplainedFork, RowCall, explain, words_of
from lightning_rl.inspect.trained import TrainedBy
from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import Call, VersionRange
from lightning_rl_adapters.forest import ForestError
from tests.adapters.words import attempt_of, rollout_of, say


def lines_of(*calls: Call, **how: Any) -> list[str]:
    [attempt] = explain(rollout_of(attempt_of(calls)), TrainedBy(**how)).attempts
    return list(draw.attempt(attempt))


def test_a_conversation_goes_straight_down_and_steps_in_where_it_forks() -> None:
    calls = [
        say(1, "a", "b"), say(2, "c", "d", after=1), say(3, "e", "f", after=2), say(4, "g", "h", after=2),
        say(5, "i", "j", after=3), say(6, "k", "l", after=3), say(7, "m", "n", after=4),
    ]  # fmt: skip
    [attempt] = explain(rollout_of(attempt_of(calls))).attempts
    assert [line.partition(":")[0] for line in draw.trees(attempt.calls)] == [
        "tree 1, model policy",
        "  call 1",
        "  call 2",
        "  ├─ call 3",
        "  │  ├─ call 5",
        "  │  └─ call 6",
        "  └─ call 4",
        "     call 7",
    ]


def test_a_call_is_one_line_with_all_that_marks_it() -> None:
    plain = say(1, "how many", "three of them", agent="counter")
    versions = [VersionRange(4, 0, 1), VersionRange(5, 1, 3)]
    marked = msgspec.structs.replace(plain, versions=versions, exact=False, trainable=False, delivered=False)
    assert "  call 1 (counter): +2 prompt, 3 sampled, stop, version 0 | how many → [three of them]" in "\n".join(
        lines_of(plain)
    )
    assert (
        "call 1 (counter): +2 prompt, 3 sampled, stop, version 4 and 5, undelivered, inexact, frozen | how many → "
        "three of them" in "\n".join(lines_of(marked))
    )


def test_greedy_answers_are_not_to_be_trained() -> None:
    greedy = msgspec.structs.replace(say(1, "a", "b c"), logprob_kind="greedy")
    assert "row 1: 3 tokens, 0 to be trained, exact: true, left out: greedy_logprobs" in "\n".join(lines_of(greedy))


def test_long_messages_are_cut_and_stay_on_their_line() -> None:
    said = draw.first_words("one\ntwo " * 20, 10)
    assert said == "one\\ntwo o... (180 characters)"


def test_messages_without_text_show_their_tool_calls() -> None:
    called = {"content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
    assert words_of(called) == 'add({"a": 1})'
    assert words_of({"content": [{"type": "text", "text": "hi"}]}) == '[{"type": "text", "text": "hi"}]'


def test_forks_have_their_cause_and_place_and_branches_their_prompts() -> None:
    calls = [
        say(1, "a", "b"), say(2, "c", "d", after=1), say(3, "c", "e", after=1), say(4, "other", "f"),
        say(5, "g", "h", after=4), say(6, "i", "j", after=4),
    ]  # fmt: skip
    at = {"message": 2, "role": "assistant", "token": 7}
    recorded = attempt_of(calls, forks={4: {semconv.FORK_CAUSE: "edited_text", semconv.FORK_AT: at}})
    [attempt] = explain(rollout_of(recorded)).attempts
    assert attempt.forks == [
        ExplainedFork(calls=[2, 3], after=1, same_prompt=True),
        ExplainedFork(calls=[4], cause="edited_text", at=at),
        ExplainedFork(calls=[5, 6], after=4, same_prompt=False),
    ]
    assert list(draw.forks(attempt.forks)) == [
        "calls 2 and 3 continue call 1: 2 samples of one prompt",
        "call 4 begins anew: edited_text, at message 2, role assistant, token 7",
        "calls 5 and 6 continue call 4: 2 different ways on",
    ]


def test_an_agent_that_writes_its_history_anew_is_told_what_it_costs() -> None:
    calls = [say(1, "a", "b"), say(2, "a x", "c"), say(3, "a x y", "d")]
    edited = {number: {semconv.FORK_CAUSE: "edited_text"} for number in (2, 3)}
    [attempt] = explain(rollout_of(attempt_of(calls, forks=edited))).attempts
    assert "  every call begins anew: 3 rows with 2.2 times the tokens of the longest" in list(draw.attempt(attempt))
    [less] = explain(rollout_of(attempt_of(calls, forks={2: edited[2]}))).attempts
    assert not any("every call" in line for line in draw.attempt(less))


def test_calls_of_unknown_tokens_are_not_called_samples_of_one_prompt() -> None:
    calls = [say(1, "", "", exact=False), say(2, "", "", after=1, exact=False), say(3, "", "", after=1, exact=False)]
    [attempt] = explain(rollout_of(attempt_of(calls))).attempts
    assert [fork.same_prompt for fork in attempt.forks] == [False]


def test_a_row_says_which_calls_it_trains_which_it_only_holds_and_which_are_left_out() -> None:
    calls = [say(1, "a", "b"), say(2, "c", "d", after=1), say(3, "e", "f", after=1), say(4, "g", "h i", after=3)]
    calls[3] = msgspec.structs.replace(calls[3], delivered=False)
    [attempt] = explain(rollout_of(attempt_of(calls))).attempts
    first, second = attempt.rows
    assert [first.calls, second.calls] == [
        [RowCall(number=1, part="trained"), RowCall(number=2, part="trained")],
        [RowCall(number=number, part=part) for number, part in ((1, "context"), (3, "trained"), (4, "undelivered"))],
    ]
    assert (second.tokens, second.trained, second.excluded) == (7, 1, None)
    assert [draw.row_calls(row) for row in attempt.rows] == ["[1] [2]", "1 [3] 4 (undelivered)"]


def test_rows_are_cut_as_the_run_would() -> None:
    calls = [say(1, "a", "b c d"), say(2, "e", "f", agent="helper")]
    overlong = lines_of(*calls, max_tokens=3)
    at = overlong.index("    row 1: 4 tokens, 0 to be trained, exact: true, left out: overlong")
    assert overlong[at + 1] == "      calls 1", "the row says why, its calls need not"
    chosen = lines_of(*calls, select=lambda call: call.agent is None)
    assert "    row 2: 2 tokens, 0 to be trained, exact: true, left out: not_selected" in chosen
    assert "    row 1: 4 tokens, 3 to be trained, exact: true" in chosen


@pytest.mark.parametrize(
    ("ended", "counting", "status", "words"),
    [
        (["failed", "succeeded"], "a2", "succeeded", ["superseded by a later attempt", "counts"]),
        (["failed", "lost"], None, "failed", ["superseded by a later attempt", "the infrastructure failed"]),
        (["cancelled"], None, "cancelled", ["cancelled"]),
        (["lost", "running"], None, "running", ["superseded by a later attempt", "still open"]),
    ],
)
def test_each_attempt_says_whether_it_counts_and_why_not(
    ended: list[str], counting: str | None, status: str, words: list[str]
) -> None:
    attempts = [attempt_of([say(1, "a", "b")], f"a{i}", i, status=how) for i, how in enumerate(ended, start=1)]
    view = explain(rollout_of(*attempts, counting=counting, status=status))
    told = [next(iter(draw.attempt(attempt))) for attempt in view.attempts]
    for line, word in zip(told, words, strict=True):
        assert word in line
    trained = {attempt.attempt_id: any(call.trained for call in attempt.calls) for attempt in view.attempts}
    assert [name for name, holds in trained.items() if holds] == ([] if counting is None else [counting])


def test_the_drawing_begins_with_what_the_rollout_was() -> None:
    trace = rollout_of(attempt_of([say(1, "a", "b")]))
    assert draw.rollout(explain(trace))[:2] == [
        "rollout r: succeeded, train, reward 1",
        '  task  {"question": "?"}',
    ]


def test_damaged_records_are_named() -> None:
    with pytest.raises(ForestError, match="c2 continues c1, which did not arrive before it"):
        explain(rollout_of(attempt_of([say(2, "a", "b", after=1)])))


def test_a_fork_at_every_turn_of_a_long_conversation_is_drawn() -> None:
    """Deeper than Python's stack."""
    [first] = explain(rollout_of(attempt_of([say(1, "a", "b")]))).attempts[0].calls
    depth = sys.getrecursionlimit()
    calls = [first]
    for number in range(2, 2 * depth, 2):
        calls += [msgspec.structs.replace(first, number=n, continues=number - 1) for n in (number, number + 1)]
    assert sum("call " in line for line in draw.trees(calls)) == len(calls)
