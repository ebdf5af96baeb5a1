"""Parallel calls that come back one by one are one answer again, and nothing else is joined."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl_proxy.forest.joined_answers import joined
from tests.proxy.conftest import MODEL, Served
from tests.proxy.test_token_ids import sdk_of

A, B = "a" * 32, "b" * 32
USER = {"role": "user", "content": "q"}
CALL = '<tool_call>\n{"name": "run", "arguments": {"n": 1}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}]


def call(answer: str, index: int) -> dict[str, Any]:
    function = {"name": "run", "arguments": str(index)}
    return {"id": f"call_{answer}_{index}", "type": "function", "function": function}


def said(*calls: dict[str, Any], content: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def result(answer: str, index: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{answer}_{index}", "content": str(index)}


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_answers_cut_anywhere_are_whole_again(sizes: list[int], data: st.DataObject) -> None:
    whole, cut = [USER], [USER]
    for number, size in enumerate(sizes):
        answer = f"{number:032x}"
        calls, results = [call(answer, i) for i in range(size)], [result(answer, i) for i in range(size)]
        whole += [said(*calls, content="words"), *results]
        at = sorted({0, size, *data.draw(st.lists(st.integers(0, size)))})
        for first, end in itertools.pairwise(at):
            cut += [said(*calls[first:end], content="" if first else "words"), *results[first:end]]
    assert (joined(cut) or cut) == whole


@pytest.mark.parametrize(
    "messages",
    [
        [USER, said(call(A, 0)), result(A, 0), said(call(B, 0)), result(B, 0)],
        [USER, said(call(A, 0)), result(A, 0), USER, said(call(A, 1)), result(A, 1)],
        [USER, said(call(A, 0)), result(A, 0), said(call(A, 1), content="more words"), result(A, 1)],
        [USER, said({"id": "call_of_another"}), result(A, 0), said({"id": "call_of_another"})],
    ],
)
def test_nothing_else_is_joined(messages: list[dict[str, Any]]) -> None:
    assert joined(messages) is None


def test_what_was_read_before_stays_as_it_is() -> None:
    messages = [USER, said(call(A, 0)), result(A, 0), said(call(A, 1)), result(A, 1)]
    assert joined(messages, known=3) is None
    assert joined(messages, known=1) == [USER, said(call(A, 0), call(A, 1)), result(A, 0), result(A, 1)]


def test_calls_sent_back_one_by_one_stay_one_row(served: Served) -> None:
    served.engine.script.extend([f"words\n{CALL}\n{CALL}", "done"])
    sdk, messages = sdk_of(served), [USER]
    answer: Any = sdk.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0].message  # type: ignore[arg-type]
    for index, one in enumerate(answer.tool_calls):
        messages.append(said(one.model_dump(), content="" if index else answer.content))
        messages.append({"role": "tool", "tool_call_id": one.id, "content": "1"})
    sdk.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)  # type: ignore[arg-type]
    served.seal()
    first, second = served.ledger.calls()
    assert second.parent_id == first.call_id
