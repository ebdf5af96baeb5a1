"""What the client says holds: the engine sees what the client sent, or the very tokens that say the same.

A model answers with text and tool calls; its client sends the answer back, written anew or edited, in any dialect.
"""

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import calls_of
from lightning_rl_proxy.gateway import Gateway
from lightning_rl_proxy.rendering.renderers import LibraryRenderer
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from lightning_rl_proxy.routing.router import Router
from tests.proxy.conftest import MODEL, SECRET, MemoryLedger, ScriptedEngine, Served, calls_in, listening
from tests.random_examples import examples

Message = dict[str, Any]
PARAMETERS = {"type": "object", "properties": {}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("run", "look")]
QUESTION = {"role": "user", "content": "how many cats?"}

texts = st.text(alphabet='ab01. {}"\\é\n', max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | texts | st.sampled_from(["true", "1", "null", "SELECT 1"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
calls = st.tuples(st.sampled_from(["run", "look"]), st.dictionaries(texts, values, max_size=3))
said = st.sampled_from(["", "Let me look.", "so"])


class _Agents:
    """Attempts, each of one agent, at a gateway that all examples share."""

    def __init__(self, served: Served, renderer: LibraryRenderer) -> None:
        self.served = served
        self.renderer = renderer
        self._attempts = 0

    def new(self) -> "_Agent":
        self._attempts += 1
        return _Agent(self, f"a{self._attempts}")


class _Agent:
    def __init__(self, agents: _Agents, attempt_id: str) -> None:
        self._agents = agents
        self._served = agents.served
        self._attempt_id = attempt_id
        key = self._served.key(attempt_id=attempt_id)
        self._client = httpx.Client(base_url=self._served.base_url(attempt_id=attempt_id), headers={"x-api-key": key})

    def ask(self, dialect: "_Dialect", messages: list[Message], answer: str = "ok") -> tuple[list[int], Message]:
        """The prompt that the engine saw, and the answer in Chat Completions' form."""
        self._served.engine.script.clear()  # of what an earlier example did not come to
        self._served.engine.script.append(answer)
        path, body, read = dialect(messages)
        got = self._client.post(path, json=body)
        assert got.status_code == 200, got.text
        return self._served.engine.prompts[-1], read(got.json())

    def spans(self) -> list[Any]:
        self._served.seal(attempt_id=self._attempt_id)
        mine = [span for span in calls_in(self._served.ledger.spans) if span.attempt_id == self._attempt_id]
        return sorted(mine, key=lambda span: span.number)

    def rendered(self, messages: list[Message]) -> list[int]:
        return self._agents.renderer.render(messages, TOOLS)


_Dialect = Callable[[list[Message]], tuple[str, dict[str, Any], Callable[[Any], Message]]]


def chat(messages: list[Message]) -> Any:
    body = {"model": MODEL, "messages": messages, "tools": TOOLS}
    return "chat/completions", body, lambda got: got["choices"][0]["message"]


def responses(messages: list[Message]) -> Any:
    tools = [{"type": "function"} | tool["function"] for tool in TOOLS]
    items: list[Any] = []
    for message in messages:
        if message["role"] == "tool":
            items.append(
                {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
            )
            continue
        if message.get("reasoning_content"):
            part = {"type": "reasoning_text", "text": message["reasoning_content"]}
            items.append({"type": "reasoning", "summary": [], "content": [part]})
        if message["content"] or not message.get("tool_calls"):
            items.append({"role": message["role"], "content": message["content"] or ""})
        items += [
            {"type": "function_call", "call_id": call["id"], **call["function"]}
            for call in message.get("tool_calls") or []
        ]
    return "responses", {"model": MODEL, "input": items, "tools": tools}, _of_items


def _of_items(got: Any) -> Message:
    message: Message = {"role": "assistant", "content": ""}
    for item in got["output"]:
        if item["type"] == "message":
            message["content"] = item["content"][0]["text"]
        elif item["type"] == "reasoning":
            message["reasoning_content"] = item["content"][0]["text"]
        else:
            function = {name: item[name] for name in ("name", "arguments")}
            message.setdefault("tool_calls", []).append(
                {"id": item["call_id"], "type": "function", "function": function}
            )
    return message


def anthropic(messages: list[Message]) -> Any:
    tools = [{"name": tool["function"]["name"], "input_schema": PARAMETERS} for tool in TOOLS]
    turns: list[Any] = []
    for message in messages:
        if message["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            turns.append({"role": "user", "content": [block]})
            continue
        thought = message.get("reasoning_content")
        blocks: list[Any] = [{"type": "thinking", "thinking": thought, "signature": "s"}] if thought else []
        blocks += [{"type": "text", "text": message["content"]}] if message["content"] else []
        blocks += [
            {
                "type": "tool_use",
                "id": call["id"],
                "name": call["function"]["name"],
                "input": json.loads(call["function"]["arguments"]),
            }
            for call in message.get("tool_calls") or []
        ]
        turns.append({"role": message["role"], "content": blocks})
    return "messages", {"model": MODEL, "max_tokens": 64, "messages": turns, "tools": tools}, _of_blocks


def _of_blocks(got: Any) -> Message:
    message: Message = {"role": "assistant", "content": ""}
    for block in got["content"]:
        if block["type"] == "text":
            message["content"] = block["text"]
        elif block["type"] == "thinking":
            message["reasoning_content"] = block["thinking"]
        else:
            function = {"name": block["name"], "arguments": json.dumps(block["input"])}
            message.setdefault("tool_calls", []).append({"id": block["id"], "type": "function", "function": function})
    return message


DIALECTS = pytest.mark.parametrize("dialect", [chat, responses, anthropic])


@pytest.fixture(scope="module")
def agents(
    tokenizer: FastTokenizer, renderer: LibraryRenderer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[_Agents]:
    ledger, engine, router = MemoryLedger(), ScriptedEngine(tokenizer), Router(MODEL)
    router.register(engine)
    journal: Path = tmp_path_factory.mktemp("edits") / "journal"
    gateway = Gateway(ledger=ledger, secret=SECRET, journal=journal, renderer=renderer, router=router)
    with listening(gateway) as (url, loop):
        yield _Agents(Served(url, gateway, ledger, engine, loop), renderer)


def sampled(content: str, made: list[tuple[str, Any]]) -> str:
    """What a model says, in a spelling that no renderer has."""
    called = [
        f'<tool_call>\n{{"name":"{name}",  "arguments":{json.dumps(arguments, separators=(" ,", ":"))}}}\n</tool_call>'
        for name, arguments in made
    ]
    return "\n".join([content, *called] if content else called)


def other_arguments(answer: Message, dice: random.Random) -> None:
    """One value becomes another, however deep it is; without any, there is one more."""
    function = dice.choice(answer["tool_calls"])["function"]
    arguments = json.loads(function["arguments"])
    holders = list(_holders(arguments))
    if not holders:
        arguments["more"] = 1
    else:
        holder, at = dice.choice(holders)
        was = holder[at]
        others = ["[elided]", None, {}, [], "", 0, 1, True, False, str(was), json.dumps(was), [was], {"a": was}]
        others += [was[: len(was) // 2], was + "!", was.upper(), " " + was] if isinstance(was, str) else []
        holder[at] = dice.choice([other for other in others if json.dumps(other) != json.dumps(was)])
    function["arguments"] = json.dumps(arguments)


def _holders(value: Any) -> Iterator[tuple[Any, Any]]:
    for at, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, at
        yield from _holders(inner)


def one_argument_less(answer: Message, dice: random.Random) -> None:
    function = dice.choice(answer["tool_calls"])["function"]
    arguments = json.loads(function["arguments"])
    if arguments:
        del arguments[dice.choice(list(arguments))]
    else:
        arguments[""] = ""
    function["arguments"] = json.dumps(arguments)


def another_tool(answer: Message, dice: random.Random) -> None:
    function = dice.choice(answer["tool_calls"])["function"]
    function["name"] = {"run": "look", "look": "run"}[function["name"]]


def another_text(answer: Message, dice: random.Random) -> None:
    answer["content"] = "" if answer["content"] else "[redacted]"


def one_call_less(answer: Message, dice: random.Random) -> None:
    answer["tool_calls"].pop(dice.randrange(len(answer["tool_calls"])))


def a_call_twice(answer: Message, dice: random.Random) -> None:
    again = copy.deepcopy(dice.choice(answer["tool_calls"]))
    answer["tool_calls"].append(again | {"id": again["id"] + "0"})


EDITS = [other_arguments, one_argument_less, another_tool, another_text, one_call_less, a_call_twice]


def written_anew(answer: Message, dice: random.Random) -> None:
    """Nothing is said otherwise: keys in another order, other white space, other escapes."""
    for call in answer["tool_calls"]:
        arguments = _shuffled(json.loads(call["function"]["arguments"]), dice)
        text = json.dumps(arguments, ensure_ascii=dice.random() < 0.5, indent=dice.choice([None, 1]))
        call["function"]["arguments"] = f"\n{text} "
    if answer["content"]:
        answer["content"] = f" {answer['content']}\n"


def _shuffled(value: Any, dice: random.Random) -> Any:
    if isinstance(value, dict):
        return {name: _shuffled(inner, dice) for name, inner in dice.sample(list(value.items()), len(value))}
    return [_shuffled(inner, dice) for inner in value] if isinstance(value, list) else value


def other_thought(answer: Message, dice: random.Random) -> None:
    was = answer.get("reasoning_content") or "hm"
    answer["reasoning_content"] = dice.choice(["[elided]", was + "!", was.upper() + "?", f"no: {was}"])


def same_thought(answer: Message, dice: random.Random) -> None:
    """It is left out, as most clients do, or there up to white space."""
    thought = answer.pop("reasoning_content", None)
    if thought and dice.random() < 0.7:
        answer["reasoning_content"] = dice.choice([thought, f"\n{thought} "])


def behind(history: list[Message]) -> list[Message]:
    """The results of the last message's calls, or a question where it has none."""
    called = history[-1].get("tool_calls") or []
    return [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in called] or [QUESTION]


@DIALECTS
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    said, st.lists(calls, min_size=1, max_size=3), st.sampled_from(EDITS), st.booleans(), st.booleans(), st.randoms()
)  # fmt: skip
def test_an_edit_of_an_answer_under_our_ids_is_heard(
    agents: _Agents, dialect: Any, content: str, made: Any, edit: Any, anew: bool, later: bool, dice: random.Random
) -> None:
    agent = agents.new()
    _, answer = agent.ask(dialect, [QUESTION], sampled(content, made))
    assert [call["function"]["name"] for call in answer["tool_calls"]] == [name for name, _ in made]
    history = [QUESTION, answer]
    if later:
        history += behind(history)
        _, done = agent.ask(dialect, history, "done")
        history += [done, {"role": "user", "content": "and?"}]
    edited = copy.deepcopy(answer)
    if anew:
        written_anew(edited, dice)
    edit(edited, dice)
    history = [QUESTION, edited, *(history[2:] or behind([edited]))]
    prompt, _ = agent.ask(dialect, history)
    assert prompt == agent.rendered(history)
    span = agent.spans()[-1]
    assert span.attributes[semconv.PARENT] is None
    assert semconv.FORK_CAUSE in span.attributes


@DIALECTS
@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said, st.lists(calls, min_size=1, max_size=3), st.randoms())
def test_an_answer_that_is_only_written_anew_keeps_its_tokens(
    agents: _Agents, dialect: Any, content: str, made: Any, dice: random.Random
) -> None:
    agent = agents.new()
    first, answer = agent.ask(dialect, [QUESTION], sampled(content, made))
    written_anew(answer, dice)
    prompt, _ = agent.ask(dialect, [QUESTION, answer, *behind([answer])])
    one, two = calls_of(agent.spans())
    context = first + one.response_ids
    assert prompt[: len(context)] == context
    assert two.parent_id == one.call_id


thoughts = st.sampled_from(["", "I count.", "one, two\n\nthree"])


def thinking(thought: str, content: str) -> str:
    return f"<think>\n{thought}\n</think>\n\n{content}" if thought else content


@DIALECTS
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(thoughts, st.just("3") | said, st.lists(calls, max_size=2), st.booleans(), st.booleans(), st.randoms())
def test_altered_reasoning_is_heard_and_reasoning_that_is_left_out_keeps_its_tokens(
    agents: _Agents, dialect: Any, thought: str, content: str, made: Any, later: bool, edits: bool, dice: random.Random
) -> None:
    agent = agents.new()
    first, answer = agent.ask(dialect, [QUESTION], thinking(thought, sampled(content or "3", made)))
    assert answer.get("reasoning_content", "") == thought
    history = [QUESTION, answer]
    if later:
        history += behind(history)
        _, done = agent.ask(dialect, history, thinking("So.", "done"))
        history += [done, {"role": "user", "content": "and?"}]
    edited = copy.deepcopy(answer)
    (other_thought if edits else same_thought)(edited, dice)
    history = [QUESTION, edited, *(history[2:] or behind([edited]))]
    prompt, again = agent.ask(dialect, history, thinking("Well.", "again"))
    ours, _ = agent.ask(dialect, [QUESTION, answer, *behind([answer])])
    theirs, _ = agent.ask(dialect, [*history, again, QUESTION])
    found = calls_of(agent.spans())
    context = first + found[0].response_ids
    assert ours[: len(context)] == context
    fork = found[-3]
    if not edits:
        assert prompt[: len(context)] == context
        assert fork.parent_id is not None
        return
    assert prompt == agent.rendered(history)
    said = agent.spans()[-3].attributes
    assert (fork.parent_id, said[semconv.FORK_CAUSE], said[semconv.FORK_AT]["message"]) == (None, "edited_text", 1)
    context = prompt + fork.response_ids
    assert theirs[: len(context)] == context, "each of the two histories goes on as it is"


def test_an_edit_of_a_completion_s_own_prompt_is_heard(served: Served, tokenizer: FastTokenizer) -> None:
    client = httpx.Client(base_url=served.base_url(), headers={"x-api-key": served.key()})
    served.engine.script.append("three cats")
    client.post("completions", json={"model": MODEL, "prompt": "how many"})
    edited = "how many[elided]<|im_end|>\nand"
    client.post("completions", json={"model": MODEL, "prompt": edited})
    assert served.engine.prompts[-1] == tokenizer.encode_whole(edited)
