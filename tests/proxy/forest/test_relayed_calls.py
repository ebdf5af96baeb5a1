"""What services answer differs: each of their forms is an answer for every dialect."""

from typing import Any

import pytest

from lightning_rl_proxy.engines.chat_backend import BackendAnswer
from lightning_rl_proxy.forest.relayed_calls import answer_of, prompt_tokens


def answer(message: dict[str, Any], usage: Any = None) -> BackendAnswer:
    return BackendAnswer(body={"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})


@pytest.mark.parametrize(
    ("message", "content", "reasoning"),
    [
        ({"content": "a"}, "a", None),
        ({"content": None}, "", None),
        ({"content": [{"type": "text", "text": "a"}, "b"]}, "ab", None),
        (
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "t"}]},
                    {"type": "text", "text": "a"},
                ]
            },
            "a",
            "t",
        ),
        ({"content": "a", "reasoning_content": [{"type": "text", "text": "t"}]}, "a", "t"),
        ({"content": "a", "reasoning": {"x": 1}}, "a", '{"x":1}'),
        ({"content": {"x": 1}}, '{"x":1}', None),
    ],
)
def test_content_and_reasoning_are_text(message: dict[str, Any], content: str, reasoning: str | None) -> None:
    found = answer_of(answer(message))
    assert (found.content, found.reasoning) == (content, reasoning)


def test_tool_calls_have_an_id_a_name_and_arguments_as_text() -> None:
    given = [
        {"function": {"name": "f", "arguments": {"a": 1}}},
        {"id": "mine", "type": "function", "function": {"name": "g", "arguments": None}},
        {"id": "x", "type": "custom", "custom": {"name": "f", "input": "x"}},
        "nonsense",
    ]
    first, second = answer_of(answer({"content": None, "tool_calls": given})).tool_calls
    assert first["id"]
    assert first["function"] == {"name": "f", "arguments": '{"a":1}'}
    assert second == {"id": "mine", "type": "function", "function": {"name": "g", "arguments": "{}"}}


def test_counts_are_numbers() -> None:
    told = answer({"content": "a"}, {"prompt_tokens": "7", "completion_tokens": None})
    assert (prompt_tokens(told), answer_of(told).output_tokens) == (0, 0)
    assert prompt_tokens(answer({"content": "a"}, {"prompt_tokens": 7})) == 7
