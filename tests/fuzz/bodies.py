"""What is sent and what is sampled: conversations in every dialect, junk at random places of them, broken bytes."""

import base64
import copy
import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from tests.fuzz.laws import SERVICE, Answer, Plan
from tests.proxy.conftest import TOKENIZER as TOKENIZER_FOLDER

Fields = dict[str, Any]

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
TOKENIZER = FastTokenizer(TOKENIZER_FOLDER)
_VOCABULARY = 1000  # of the ids that the tokenizer has
_IMAGE = "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()
_CHAT_IMAGE = {"type": "image_url", "image_url": {"url": _IMAGE}}
_CALL = '<tool_call>\n{"name": "look", "arguments": {"what": "cats"}}\n</tool_call>'
_SAMPLED = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", _CALL, '{"name": "look"', '{"name": 1, "arguments": []}',
    "<|im_end|>", "<|im_start|>", "<|endoftext|>", "<tool_response>", "SELECT", " 1", "\n", "\n\n", " ", "é",
    "🙂", "STOP", '"', "\\", "\x00", "{", "}", "[]", "null", "NaN", "1e999",
)  # fmt: skip
# JSON that Python's encoder does not write; each stands for a text that is replaced by it.
_RAW = {
    f"@raw{i}@": raw
    for i, raw in enumerate(
        [
            "1e999", "1" + "0" * 400, "-1e999", "1e-999", "123456789012345678901234567890",
            "9223372036854775808", "-0", "0.1e1", "NaN",
            "Infinity", '"\\ud800"', '"\\udfff x"', '"\\u0000"', "[" * 600 + "]" * 600, '{"a":' * 400 + "1" + "}" * 400,
            "[" * 5000 + "]" * 5000, '{"a": 1, "a": 2}', '"\\ud83d\\ude42"',
        ]
    )
}  # fmt: skip

texts = st.one_of(
    st.sampled_from(["", " ", "hi", "how many cats?", "<|im_end|>", "<think>x</think>", _CALL, "é🙂", "\x00"]),
    st.text(max_size=8),
)
junk = st.one_of(
    st.sampled_from(
        ["\ud800", None, True, False, 0, -1, 1, 2**31, 2**63, 0.5, -1e300, "", "x", [], {}, [[]], [None], {"": None}]
    ),
    st.sampled_from(sorted(_RAW)),
    st.recursive(
        texts, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2), max_leaves=4
    ),
)
ids = st.one_of(
    st.lists(st.sampled_from(_SAMPLED), max_size=10).map(lambda pieces: TOKENIZER.encode("".join(pieces))),
    st.lists(st.integers(0, _VOCABULARY - 1), max_size=8),
)
plans = st.lists(
    st.builds(
        Plan,
        ids,
        step=st.integers(1, 5),
        end=st.sampled_from(["stop"] * 6 + ["length", "length", "fail", "refuse", "break", "silent", "abort"]),
        logprobs=st.sampled_from([True, True, False]),
        slow=st.sampled_from([False, False, False, True]),
    ),
    min_size=1,
    max_size=4,
)

_model = st.sampled_from(["policy", "policy", "gpt-4o", "", SERVICE])
_temperature = st.sampled_from([None, 0, 1, 0.7, 100])
_max_tokens = st.sampled_from([None, 1, 16, 2**31 - 1])
_stop = st.sampled_from([None, "STOP", ["STOP", "\n"], ["1"], []])
_stream = st.sampled_from([None, False, True, True])
_seed = st.sampled_from([None, 0, -1, 42, 2**63])
_SCHEMA = {"type": "object", "properties": {"what": {"type": "string"}}}


def _rarely(value: Any) -> st.SearchStrategy[Any]:
    """A value that is refused, so that conversations with it end: one in eight times, else a text."""
    return st.sampled_from([value] + ["hi"] * 7)


@st.composite
def chat(draw: st.DrawFn) -> Fields:
    part = st.builds(lambda t: {"type": "text", "text": t}, texts)
    text = st.one_of(texts, st.none(), st.lists(part | texts, max_size=3), _rarely([_CHAT_IMAGE]))
    call = st.builds(
        lambda a: {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": a}},
        st.sampled_from(["{}", '{"what": "cats"}', "", "{", "[1]", "null", '{"what": NaN}']) | texts,
    )
    message = st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "developer"]), "content": text}),
        st.fixed_dictionaries(
            {"role": st.just("assistant"), "content": text},
            optional={"tool_calls": st.lists(call, max_size=2) | st.none(), "reasoning_content": texts | st.none()},
        ),
        st.fixed_dictionaries({"role": st.just("tool"), "tool_call_id": st.just("call_1"), "content": text}),
    )
    return draw(
        st.fixed_dictionaries(
            {"model": _model, "messages": st.lists(message, min_size=1, max_size=5)},
            optional={
                "tools": st.sampled_from(
                    [None, [], [{"type": "function", "function": {"name": "look", "parameters": _SCHEMA}}]]
                ),
                "tool_choice": st.sampled_from(
                    [None, "auto", "none", "required", {"type": "function", "function": {"name": "look"}}]
                ),
                "parallel_tool_calls": st.booleans(),
                "n": st.integers(1, 3),
                "temperature": _temperature,
                "max_tokens": _max_tokens,
                "max_completion_tokens": _max_tokens,
                "stop": _stop,
                "stream": _stream,
                "seed": _seed,
                "stream_options": st.sampled_from([None, {"include_usage": True}]),
                "logprobs": st.booleans(),
                "logit_bias": st.sampled_from([None, {}, {"1": 2}, {"x": 2}]),
                "response_format": st.sampled_from(
                    [None, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": _SCHEMA}}]
                ),
                "user": st.just("me"),
            },
        )
    )


@st.composite
def completions(draw: st.DrawFn) -> Fields:
    prompt = texts | st.lists(st.integers(0, 2**31), max_size=5) | texts.map(lambda text: [text])
    return draw(
        st.fixed_dictionaries(
            {"model": _model, "prompt": prompt},
            optional={
                "n": st.integers(1, 3),
                "best_of": st.integers(1, 3),
                "echo": st.booleans(),
                "logprobs": st.integers(0, 1),
                "temperature": _temperature,
                "max_tokens": _max_tokens,
                "stop": _stop,
                "stream": _stream,
                "seed": _seed,
                "stream_options": st.sampled_from([None, {"include_usage": True}]),
            },
        )
    )


@st.composite
def responses(draw: st.DrawFn) -> Fields:
    content = st.one_of(
        texts,
        st.lists(
            st.builds(lambda k, t: {"type": k, "text": t}, st.sampled_from(["input_text", "output_text"]), texts),
            max_size=2,
        ),
        _rarely([{"type": "input_image", "image_url": _IMAGE}]),
    )
    item = st.one_of(
        st.builds(lambda r, c: {"role": r, "content": c}, st.sampled_from(["user", "assistant", "developer"]), content),
        st.builds(lambda a: {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": a}, texts),
        st.builds(lambda c: {"type": "function_call_output", "call_id": "call_1", "output": c}, content),
        st.builds(
            lambda t: {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": t}]}, texts
        ),
        _rarely({"type": "item_reference", "id": "msg_0_0"}).map(
            lambda i: {"role": "user", "content": i} if i == "hi" else i
        ),
    )
    return draw(
        st.fixed_dictionaries(
            {"model": _model, "input": texts | st.lists(item, max_size=5)},
            optional={
                "instructions": texts | st.none(),
                "previous_response_id": st.sampled_from([None] * 7 + ["resp_x"]),
                "tools": st.sampled_from([None, [{"type": "function", "name": "look", "parameters": _SCHEMA}]]),
                "tool_choice": st.sampled_from(
                    [None, "auto", "none", "required", {"type": "function", "name": "look"}]
                ),
                "parallel_tool_calls": st.booleans(),
                "temperature": _temperature,
                "max_output_tokens": _max_tokens,
                "stop": _stop,
                "stream": _stream,
                "text": st.sampled_from([None, {"format": {"type": "json_schema", "schema": _SCHEMA}}]),
                "include": st.sampled_from([None, [], ["message.output_text.logprobs"]]),
                "metadata": st.just({"a": "b"}),
                "reasoning": st.just({"effort": "low"}),
            },
        )
    )


@st.composite
def messages(draw: st.DrawFn) -> Fields:
    block = texts.map(lambda text: {"type": "text", "text": text})
    image = {"type": "image", "source": {"type": "url", "url": _IMAGE}}
    result = st.builds(
        lambda c, e: {"type": "tool_result", "tool_use_id": "call_1", "content": c, "is_error": e},
        texts | st.none() | st.lists(block, max_size=2),
        st.booleans(),
    )
    used = st.builds(
        lambda given: {"type": "tool_use", "id": "call_1", "name": "look", "input": given},
        st.sampled_from([{}, {"what": "cats"}, {"INVALID_JSON": "{"}]),
    )
    thought = texts.map(lambda text: {"type": "thinking", "thinking": text, "signature": ""})
    said = st.builds(
        lambda c: {"role": "user", "content": c},
        texts | st.lists(block | result, min_size=1, max_size=3) | _rarely([image]),
    )
    answered = st.builds(
        lambda c: {"role": "assistant", "content": c},
        texts | st.lists(st.one_of(block, used, thought), max_size=3),
    )
    history = st.lists(st.tuples(said, answered), max_size=2).map(lambda turns: [m for turn in turns for m in turn])
    return draw(
        st.fixed_dictionaries(
            {
                "model": _model,
                "max_tokens": st.just(64),
                "messages": st.builds(lambda before, last: [*before, last], history, said),
            },
            optional={
                "system": texts | st.lists(block, max_size=2),
                "tools": st.sampled_from([None, [{"name": "look", "input_schema": _SCHEMA}]]),
                "tool_choice": st.sampled_from(
                    [None, {"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "look"}]
                ),
                "stop_sequences": st.sampled_from([None, ["STOP"], ["\n", "1"]]),
                "stream": _stream,
                "temperature": _temperature,
                "top_k": st.sampled_from([None, 0, 5]),
                "thinking": st.just({"type": "enabled", "budget_tokens": 1024}),
                "metadata": st.just({"user_id": "me"}),
                "output_config": st.sampled_from([None, {"format": {"type": "json_schema", "schema": _SCHEMA}}]),
            },
        )
    )


BODIES: dict[str, Callable[[], st.SearchStrategy[Fields]]] = {
    "chat": chat,
    "completions": completions,
    "responses": responses,
    "messages": messages,
}


@st.composite
def spoiled(draw: st.DrawFn, fields: Fields) -> Fields:
    """The fields with up to three junk values at random places, or without what stood there."""
    whole: Any = json.loads(json.dumps(fields))
    for _ in range(draw(st.integers(0, 3))):
        place: Any = whole
        while True:
            names = sorted(place) if isinstance(place, dict) else list(range(len(place)))
            if not names:
                break
            name = draw(st.sampled_from(names))
            if isinstance(place[name], dict | list) and place[name] and draw(st.booleans()):
                place = place[name]
                continue
            if draw(st.integers(0, 4)):
                place[name] = copy.deepcopy(draw(junk))  # the next round may spoil it further
            else:
                del place[name]
            break
    if not draw(st.integers(0, 5)):
        name = draw(st.sampled_from(["novelty", "audio", "background", "user", "metadata", "n", "temperature", "seed"]))
        whole[name] = draw(junk)
    return whole


def encode(fields: Fields) -> bytes:
    """Fields as a body; lone surrogates leave as escapes."""
    text = json.dumps(fields)
    for name, raw in _RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text.encode()


@st.composite
def broken(draw: st.DrawFn, body: bytes) -> bytes:
    """A body that is cut, or has some bytes too many."""
    at = draw(st.integers(0, len(body)))
    match draw(st.integers(0, 3)):
        case 0:
            return body[:at]
        case 1:
            return body[:at] + draw(st.binary(min_size=1, max_size=3)) + body[at:]
        case 2:
            return body[:at] + body[at + 1 :]
    return draw(st.sampled_from([b"", b"null", b"[]", b"\xef\xbb\xbf{}", b"{}", b'"x"', b"\xff", b"{" * 10_000]))


def gone_on(name: str, fields: Fields, answer: Answer, said: Any) -> Fields | None:
    """The request of the next turn, with what the model answered in it; None where it cannot be told."""
    if answer.status != 200 or (answer.streamed and name != "responses"):
        return None
    told = answer.told()
    if name == "chat":
        return fields | {
            "messages": [*fields["messages"], told["choices"][0]["message"], {"role": "user", "content": said}]
        }
    if name == "completions":
        if not isinstance(fields["prompt"], str):
            return None
        return fields | {"prompt": fields["prompt"] + told["choices"][0]["text"] + str(said)}
    if name == "messages":
        turn = [{"role": "assistant", "content": told["content"]}, {"role": "user", "content": said or "go on"}]
        return fields | {"messages": [*fields["messages"], *turn]}
    if told.get("type") == "error":
        return None
    told = told.get("response", told)
    asked = {"role": "user", "content": said}
    if said:
        return fields | {"previous_response_id": told["id"], "input": [asked]}
    before = fields["input"] if isinstance(fields["input"], list) else [{"role": "user", "content": fields["input"]}]
    return fields | {"input": [*before, *told["output"], asked]}
