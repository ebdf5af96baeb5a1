"""What real agents say in words of their own, and get an answer to: old functions, text tools, packed bodies."""

import gzip
import json
import zlib
from typing import Any

import anthropic
import httpx
import openai
import pytest

from lightning_rl_adapters import semconv
from lightning_rl_proxy.http.limits import RequestLimits
from tests.proxy.conftest import MODEL, Served, calls_in

PARAMETERS = {"type": "object", "properties": {}}
QUESTION = {"role": "user", "content": "q"}


def called(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def sdk_of(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.base_url(), api_key=served.key(), max_retries=0)


def ids(served: Served) -> list[tuple[str | None, str]]:
    served.seal()
    return [(call.parent_id, call.call_id) for call in served.ledger.calls()]


@pytest.mark.parametrize("stream", [False, True])
def test_functions_are_tools_of_one_call(served: Served, *, stream: bool) -> None:
    sdk, functions = sdk_of(served), [{"name": "run", "parameters": PARAMETERS}]
    served.engine.script.extend([called("run", {"n": 1}), called("run", {"n": 2}), "done"])
    messages: Any = [QUESTION]
    more: Any = {"functions": functions}
    for number in (1, 2):
        if stream:
            chunks = [c.choices[0] for c in sdk.chat.completions.create(
                model=MODEL, messages=messages, stream=True, **more
            )]  # fmt: skip
            [call] = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
            reason = chunks[-1].finish_reason
        else:
            [choice] = sdk.chat.completions.create(model=MODEL, messages=messages, **more).choices
            assert choice.message.tool_calls is None
            call, reason = choice.message.function_call, choice.finish_reason  # type: ignore[assignment]
        assert call is not None
        assert (call.name, call.arguments, reason) == ("run", f'{{"n": {number}}}', "function_call")
        said = {"role": "assistant", "content": None, "function_call": call.model_dump()}
        messages += [said, {"role": "function", "name": "run", "content": str(number)}]
    sdk.chat.completions.create(model=MODEL, messages=messages, **more)
    (_, one), (two_of, two), (three_of, _) = ids(served)
    assert (two_of, three_of) == (one, two)


def test_a_function_can_be_named(served: Served) -> None:
    served.engine.script.append("{}}\n</tool_call>")
    functions: Any = [{"name": name, "parameters": PARAMETERS} for name in ("run", "look")]
    messages: Any = [QUESTION]
    [choice] = (
        sdk_of(served)
        .chat.completions.create(model=MODEL, messages=messages, functions=functions, function_call={"name": "look"})
        .choices
    )
    assert choice.message.function_call is not None
    assert choice.message.function_call.name == "look"


def test_top_logprobs_hold_the_sampled_token_and_the_record_says_so(served: Served) -> None:
    messages: Any = [QUESTION]
    answer = sdk_of(served).chat.completions.create(model=MODEL, messages=messages, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    for token in logprobs.content:
        assert [(top.token, top.logprob) for top in token.top_logprobs] == [(token.token, token.logprob)]
    served.seal()
    assert served.ledger.spans[0].attributes[semconv.IGNORED_FIELDS] == ["top_logprobs"]


def test_only_allowed_tools_are_shown(served: Served, tokenizer: Any) -> None:
    tools: Any = [{"type": "function", "function": {"name": n, "parameters": PARAMETERS}} for n in ("run", "look")]
    choice: Any = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "look"}}]},
    }
    messages: Any = [QUESTION]
    sdk_of(served).chat.completions.create(model=MODEL, messages=messages, tools=tools, tool_choice=choice)
    prompt = tokenizer.decode(served.engine.prompts[0])
    assert ('"look"' in prompt, '"run"' in prompt) == (True, False)


NAMESPACE = {
    "type": "namespace",
    "name": "agents",
    "tools": [{"type": "function", "name": "close", "parameters": PARAMETERS}, {"type": "custom", "name": "note"}],
}
PATCH = "*** Begin Patch\n*** Update File: a.py\n@@\n-a\n+b\n*** End Patch"


@pytest.mark.parametrize(
    ("tool", "said", "item", "holds"),
    [
        ({"type": "custom", "name": "code"}, called("code", {"input": "print(1)"}), "custom_tool_call",
         {"name": "code", "input": "print(1)"}),
        ({"type": "local_shell"}, called("local_shell", {"command": "ls -l"}), "local_shell_call",
         {"action": {"type": "exec", "command": ["bash", "-lc", "ls -l"], "env": {}}}),
        ({"type": "apply_patch"}, called("apply_patch", {"patch": PATCH}), "apply_patch_call",
         {"operation": {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b"}}),
        (NAMESPACE, called("agents__close", {"n": 1}), "function_call",
         {"namespace": "agents", "name": "close", "arguments": '{"n": 1}'}),
        (NAMESPACE, called("agents__note", {"input": "so"}), "custom_tool_call",
         {"namespace": "agents", "name": "note", "input": "so"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_of_another_kind_is_called_and_answered_in_its_own_items(
    served: Served, tool: Any, said: str, item: str, holds: dict[str, Any], *, stream: bool
) -> None:
    sdk = sdk_of(served)
    served.engine.script.append(said)
    if stream:
        events = list(sdk.responses.create(model=MODEL, input="q", tools=[tool], stream=True))
        answer: Any = events[-1].response  # type: ignore[union-attr]
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [one.model_dump() for one in done] == [one.model_dump() for one in answer.output]
    else:
        answer = sdk.responses.create(model=MODEL, input="q", tools=[tool])
    [call] = answer.output
    told = call.model_dump(exclude_none=True)
    assert (call.type, {name: told[name] for name in holds}) == (item, holds)
    results: list[Any] = [{"type": f"{item}_output", "call_id": call.call_id, "output": "ok"}]
    history: Any = [{"role": "user", "content": "q"}, told, *results]
    sdk.responses.create(model=MODEL, input=history, tools=[tool])
    (_, one), (parent, _) = ids(served)
    assert parent == one


@pytest.mark.parametrize(("behind", "kept"), [("", True), ("\n", True), ("\n" + called("look", {}), False)])
def test_with_one_call_at_a_time_the_end_of_the_turn_is_learnt(served: Served, behind: str, *, kept: bool) -> None:
    """Else a model that is trained so learns to call, and never to stop behind its call."""
    call, end = called("run", {}), served.engine._end
    tools: Any = [{"name": name, "input_schema": PARAMETERS} for name in ("run", "look")]
    served.engine.script.extend([call + behind, "done"])
    client = anthropic.Anthropic(base_url=served.base_url().removesuffix("/v1"), api_key=served.key())
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    asked: Any = {"model": MODEL, "max_tokens": 99, "tools": tools, "tool_choice": choice}
    messages: Any = [{"role": "user", "content": "q"}]
    said = client.messages.create(**asked, messages=messages)
    [block] = [block for block in said.content if block.type == "tool_use"]
    result: Any = [{"type": "tool_result", "tool_use_id": block.id, "content": "ok"}]
    history: Any = [*messages, {"role": "assistant", "content": said.content}, {"role": "user", "content": result}]
    client.messages.create(**asked, messages=history)
    served.seal()
    first, second = served.ledger.calls()
    assert second.parent_id == first.call_id
    assert (first.response_ids[-1] == end, first.overshoot == 0) == (kept, kept)


def test_servers_tools_are_left_out_and_told_of(served: Served) -> None:
    hosted = {"type": "namespace", "name": "n", "tools": [{"type": "image_generation"}]}
    tools: Any = [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": PARAMETERS}, hosted]
    sdk_of(served).responses.create(model=MODEL, input="q", tools=tools, truncation="auto")
    served.seal()
    [span] = calls_in(served.ledger.spans)
    assert span.attributes[semconv.IGNORED_FIELDS] == ["truncation", "tools[0]", "tools[2].tools[0]"]


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_a_packed_body_is_read(served: Served, encoding: str, pack: Any) -> None:
    body = pack(json.dumps({"model": MODEL, "messages": [QUESTION]}).encode())
    assert post(served, body, encoding).status_code == 200


@pytest.mark.parametrize(
    ("body", "encoding", "status"),
    [
        (b"no gzip", "gzip", 400),
        (gzip.compress(b'{"model": "m"}')[:-6], "gzip", 400),
        (b"{}", "br", 415),
        (gzip.compress(b" " * 3_000_000), "gzip", 413),
        (gzip.compress(b" " * 600_000) * 3, "gzip", 413),
    ],
    ids=["no gzip", "broken off", "unknown", "too much", "too much in parts"],
)
def test_a_body_that_is_not_what_it_says_or_unfolds_to_too_much_is_refused(
    served: Served, body: bytes, encoding: str, status: int
) -> None:
    served.gateway.limits = RequestLimits(body_bytes=1_000_000)
    assert post(served, body, encoding).status_code == status


def post(served: Served, body: bytes, encoding: str) -> httpx.Response:
    headers = {"x-api-key": served.key(), "content-encoding": encoding}
    return httpx.post(f"{served.base_url()}/chat/completions", content=body, headers=headers)
