"""Arguments of tool calls that Python cannot read, or cannot write again: a policy samples anything.

They are thousands of tokens, so a scripted engine alone says them.
"""

import json
from typing import Any

import openai
import pytest

from lightning_rl_proxy.rendering.renderers import LibraryRenderer
from tests.proxy.conftest import Served
from tests.proxy.test_gateway import client, post, say, user


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "arguments", ['{"x": "\\ud83d"}', f'{{"x": {"[" * 3000 + "]" * 3000}}}', f'{{"x": {"9" * 5000}}}']
)
def test_arguments_that_python_cannot_read_or_write_are_answered_recorded_and_gone_on_from(
    arguments: str, streamed: bool, served: Served
) -> None:
    tools: Any = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]
    served.engine.script.append(f'<tool_call>\n{{"name": "run", "arguments": {arguments}}}\n</tool_call>')
    asked = {"model": "policy", "messages": [user("go")], "tools": tools, "stream": streamed, "max_tokens": 9000}
    path = f"{served.base_url().removeprefix(served.url)}/chat/completions"
    answer = post(served, path, json.dumps(asked).encode(), served.key())
    assert answer.status == 200, answer.data
    given: Any = {"id": "c", "type": "function", "function": {"name": "run", "arguments": arguments}}
    history: list[Any] = [user("go"), {"role": "assistant", "content": None, "tool_calls": [given]}]
    say(client(served), [*history, {"role": "tool", "tool_call_id": "c", "content": "1"}], tools=tools)
    served.seal()
    calls = served.ledger.calls()
    [tokens] = served.gateway.tokens_of(["r1"]).values()
    assert sum(len(call.response_ids) for call in calls) == tokens.received["policy"]
    assert [call.delivered for call in calls] == [True, True]


def test_tokens_are_recorded_whatever_a_renderer_raises(
    served: Served, renderer: LibraryRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise LookupError("of a renderer")

    monkeypatch.setattr(type(renderer), "parse", broken)
    served.engine.script.append("an answer")
    with pytest.raises(openai.InternalServerError):
        say(client(served), [user("go")])
    served.seal()
    [tokens] = served.gateway.tokens_of(["r1"]).values()
    assert sum(len(call.response_ids) for call in served.ledger.calls()) == tokens.received["policy"] > 0
