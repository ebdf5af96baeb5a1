"""Whatever id an SDK's answer has, it leads to the call that gave it."""

from typing import Any

import anthropic
import openai
import pytest

from lightning_rl_adapters import semconv
from lightning_rl_adapters.call_names import names_of
from lightning_rl_adapters.span import Span
from tests.proxy.conftest import Served

TOOL_CALL = '<tool_call>\n{"name": "run", "arguments": {"sql": "SELECT 1"}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"sql": {"type": "string"}}}
FUNCTION = {"name": "run", "parameters": PARAMETERS}
ASK: list[Any] = [{"role": "user", "content": "How many?"}]


@pytest.fixture
def sdk(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.base_url(), api_key=served.key(), max_retries=0)


@pytest.fixture
def claude(served: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.base_url().removesuffix("/v1"), api_key=served.key(), max_retries=0)


def names(served: Served) -> tuple[dict[str, str], list[str]]:
    """Name -> call id, and the calls in order of arrival."""
    served.seal()
    calls = [call.call_id for call in served.ledger.calls()]
    return names_of(served.ledger.spans), calls


def test_chat_completions_whole_and_streamed(served: Served, sdk: openai.OpenAI) -> None:
    served.engine.script.extend([TOOL_CALL, TOOL_CALL + "\n" + TOOL_CALL])
    tools: Any = [{"type": "function", "function": FUNCTION}]
    whole = sdk.chat.completions.create(model="policy", messages=ASK, tools=tools)
    parts = list(sdk.chat.completions.create(model="policy", messages=ASK, tools=tools, stream=True))
    streamed = [t.id for p in parts for c in p.choices for t in c.delta.tool_calls or () if t.id]
    known, [first, second] = names(served)
    assert known[whole.id] == first
    assert [known[tool.id] for tool in whole.choices[0].message.tool_calls or ()] == [first]
    assert {known[part.id] for part in parts} == {second}
    assert [known[name] for name in streamed] == [second, second]


def test_of_several_choices_the_answer_is_the_first_and_tool_calls_tell_the_others(
    served: Served, sdk: openai.OpenAI
) -> None:
    served.engine.script.extend([TOOL_CALL] * 3)
    tools: Any = [{"type": "function", "function": FUNCTION}]
    answer = sdk.chat.completions.create(model="policy", messages=ASK, tools=tools, n=3)
    known, calls = names(served)
    assert known[answer.id] == calls[0]
    assert [known[tool.id] for choice in answer.choices for tool in choice.message.tool_calls or ()] == calls


def test_completions(served: Served, sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model="policy", prompt="How many?", n=2)
    known, calls = names(served)
    assert known[answer.id] == calls[0]
    assert all(known[call] == call for call in calls)


def test_responses_and_their_items(served: Served, sdk: openai.OpenAI) -> None:
    served.engine.script.extend(["<think>\nhm\n</think>\n\nLet me see.\n" + TOOL_CALL, TOOL_CALL])
    tools: Any = [{"type": "function", "strict": False} | FUNCTION]
    whole = sdk.responses.create(model="policy", input="How many?", tools=tools)
    *_, ended = sdk.responses.create(model="policy", input="How many?", tools=tools, stream=True)
    known, [first, second] = names(served)
    assert known[whole.id] == first
    assert {item.type for item in whole.output} == {"reasoning", "message", "function_call"}
    assert {known[str(item.id)] for item in whole.output} == {first}
    assert {known[item.call_id] for item in whole.output if item.type == "function_call"} == {first}
    assert known[ended.response.id] == second  # type: ignore[union-attr]


def test_messages_and_their_tool_use(served: Served, claude: anthropic.Anthropic) -> None:
    served.engine.script.extend([TOOL_CALL, TOOL_CALL])
    tools: Any = [{"name": "run", "input_schema": PARAMETERS}]
    whole = claude.messages.create(model="policy", messages=ASK, max_tokens=99, tools=tools)
    with claude.messages.stream(model="policy", messages=ASK, max_tokens=99, tools=tools) as stream:
        streamed = stream.get_final_message()
    known, calls = names(served)
    assert [known[whole.id], known[streamed.id]] == calls
    assert [known[block.id] for m in (whole, streamed) for block in m.content if block.type == "tool_use"] == calls


def call(call_id: str, *tool_calls: Any, name: str = semconv.CALL_SPAN) -> Span:
    attributes = {semconv.OUTPUT_MESSAGES: [{"role": "assistant", "tool_calls": list(tool_calls)}]}
    return Span(
        span_id=call_id, rollout_id="r", attempt_id="a", name=name, number=0, start_ns=0, end_ns=0,
        attributes=attributes,
    )  # fmt: skip


def test_a_tool_calls_id_of_several_calls_is_nobodys_and_none_hides_a_calls_own_name() -> None:
    spans = [
        call("c1", {"id": "0"}, {"id": "x"}, {"id": "msg_c2"}, {"id": None}, {}, None),
        call("c2", {"id": "0"}),
        call("c3", {"id": "y"}, name="foreign.lightning_rl.call"),
    ]
    known = names_of(spans)
    assert (known["x"], known["msg_c2"], known["c1"]) == ("c1", "c2", "c1")
    assert not {"0", "y", "c3", ""} & set(known)


def test_a_call_without_messages_is_known_by_its_own_names() -> None:
    bare = call("c1")
    bare.attributes = {}
    assert names_of([bare])["chatcmpl-c1"] == "c1"
