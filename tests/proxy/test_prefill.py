"""An answer that its client has begun goes on from there: what was begun is prompt, what follows is sampled."""

from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from lightning_rl_proxy.rendering.chat_templates import TemplateRenderer
from lightning_rl_proxy.rendering.load import load_renderer
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from tests.proxy.conftest import MODEL, TOKENIZER, Served
from tests.proxy.rendering.test_chat_templates import CHATML, OPENS

QUESTION = {"role": "user", "content": "How many?"}
THOUGHT = "<think>\n\n</think>\n\n"


def ask(served: Served, door: str, body: dict[str, Any], status: int = 200) -> Any:
    key = {"x-api-key": served.key()}
    got = httpx.post(f"{served.base_url()}/{door}", json={"model": MODEL} | body, headers=key)
    assert got.status_code == status, got.text
    return got.json()


def begun(text: Any, **more: Any) -> dict[str, Any]:
    messages = [QUESTION, {"role": "assistant", "content": text}]
    return {"messages": messages, "continue_final_message": True, "add_generation_prompt": False} | more


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_s_prefill_is_prompt_and_its_turn_goes_on(served: Served, *, stream: bool) -> None:
    url = served.base_url().removesuffix("/v1")
    sdk = anthropic.Anthropic(base_url=url, api_key=served.key(), max_retries=0)
    messages: Any = [QUESTION, {"role": "assistant", "content": "There are"}]
    served.engine.script.append(" three.")
    if stream:
        with sdk.messages.stream(model=MODEL, max_tokens=64, messages=messages) as events:
            said = "".join(events.text_stream)
    else:
        said = "".join(block.text for block in sdk.messages.create(  # type: ignore[union-attr]
            model=MODEL, max_tokens=64, messages=messages
        ).content)  # fmt: skip
    assert said == " three."
    decode = load_renderer(TOKENIZER, "qwen3", MODEL).tokenizer.decode
    assert decode(served.engine.prompts[0]).endswith(f"<|im_start|>assistant\n{THOUGHT}There are")
    whole = {"role": "assistant", "content": "There are three."}
    sdk.messages.create(model=MODEL, max_tokens=64, messages=[QUESTION, whole, {"role": "user", "content": "Sure?"}])  # type: ignore[list-item]
    served.seal()
    one, two = served.ledger.calls()
    assert (decode(one.response_ids), two.parent_id) == (" three.<|im_end|>", one.call_id)
    assert served.engine.prompts[1][: len(served.engine.prompts[0])] == served.engine.prompts[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_final_message_is_continued_once_for_each_choice(served: Served, *, stream: bool) -> None:
    sdk = openai.OpenAI(base_url=served.base_url(), api_key=served.key(), max_retries=0)
    served.engine.script.extend([' "a"]', ' "b"]'])
    more: Any = {"continue_final_message": True, "add_generation_prompt": False}
    messages: Any = [QUESTION, {"role": "assistant", "content": "["}]
    if stream:
        said = ["", ""]
        for chunk in sdk.chat.completions.create(model=MODEL, messages=messages, n=2, stream=True, extra_body=more):
            for choice in chunk.choices:
                said[choice.index] += choice.delta.content or ""
    else:
        answer = sdk.chat.completions.create(model=MODEL, messages=messages, n=2, extra_body=more)
        said = [choice.message.content or "" for choice in answer.choices]
    assert sorted(said) == [' "a"]', ' "b"]']


@pytest.mark.parametrize(
    ("template", "end"),
    [(CHATML, "<|im_start|>assistant\nThere are"), (OPENS, "<|im_start|>assistant\n<think>\n\n</think>\n\nThere are")],
)
def test_a_template_s_own_reasoning_is_closed_before_it(template: str, end: str, tmp_path: Path) -> None:
    renderer = TemplateRenderer(TOKENIZER, FastTokenizer(TOKENIZER, "text"), {"default": template}, model=MODEL)
    prompt = renderer.render([QUESTION], None)
    ids = renderer.begun(prompt, "There are")
    assert ids is not None
    assert renderer.tokenizer.decode(prompt + ids).endswith(end)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (begun("There are "), "ends with white space"),
        (begun(""), "holds no text"),
        (begun("a", messages=[QUESTION]), "needs a last message of the assistant"),
        (begun("a", add_generation_prompt=True), "exclude each other"),
        ({"messages": [QUESTION], "add_generation_prompt": False}, "add_generation_prompt"),
        (begun("<think>hm"), "from chat markup"),
        (begun("a", tool_choice="required", tools=[{"type": "function", "function": {"name": "f"}}]), "into a call"),
    ],
)
def test_what_cannot_be_continued_is_said(served: Served, body: dict[str, Any], says: str) -> None:
    assert says in ask(served, "chat/completions", body, 400)["error"]["message"]
    assert served.engine.prompts == []


def test_an_answer_with_calls_or_reasoning_is_no_beginning(served: Served) -> None:
    use = {"type": "tool_use", "id": "x", "name": "f", "input": {}}
    for block, says in ((use, "calls tools"), ({"type": "thinking", "thinking": "hm", "signature": ""}, "reasoning")):
        turns = [QUESTION, {"role": "assistant", "content": [{"type": "text", "text": "a"}, block]}]
        said = ask(served, "messages", {"max_tokens": 9, "messages": turns}, 400)
        assert says in said["error"]["message"]


TOOL = {"name": "count", "input_schema": {"type": "object", "properties": {"of": {"type": "string"}}}}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [QUESTION, {"role": "assistant", "content": "There are"}]},
        {"messages": [QUESTION], "enable_thinking": False},
        {"messages": [QUESTION], "tools": [TOOL], "tool_choice": {"type": "any"}},
    ],
)
def test_as_many_tokens_are_counted_as_the_prompt_of_the_call_has(served: Served, body: dict[str, Any]) -> None:
    counted = ask(served, "messages/count_tokens", body)["input_tokens"]
    assert counted == ask(served, "messages", body | {"max_tokens": 9})["usage"]["input_tokens"]


def test_a_turn_that_has_ended_may_be_counted_too(served: Served) -> None:
    ended = [QUESTION, {"role": "assistant", "content": "There are "}]
    assert ask(served, "messages/count_tokens", {"messages": ended})["input_tokens"] > 0


@pytest.mark.parametrize("door", ["chat/completions", "messages"])
def test_what_is_nested_too_deep_is_a_400(served: Served, door: str) -> None:
    schema: dict[str, Any] = {"a": "<|im_end|>"}
    for _ in range(600):
        schema = {"a": schema}
    called = {"type": "tool_use", "id": "1", "name": "f", "input": schema}
    function = {"type": "function", "function": {"name": "f", "parameters": schema}}
    messages = [QUESTION, {"role": "assistant", "content": [called]}, QUESTION]
    body = (
        {"messages": messages, "max_tokens": 9} if door == "messages" else {"messages": [QUESTION], "tools": [function]}
    )
    error = ask(served, door, body, 400)["error"]
    assert "nested too deep" in error["message"]
