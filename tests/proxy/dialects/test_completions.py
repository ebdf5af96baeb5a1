"""Completions as OpenAI's own SDK reads it: prompts of text and of ids, echo, logprobs, streams."""

from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl_proxy.dialects import completions
from lightning_rl_proxy.dialects.base import Opening
from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.rendering.base import Delta, ParsedAnswer, SampledToken

OPENING = Opening(call_id="c1", model="policy", created=1_700_000_000, prompt_tokens=7)


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "policy", "prompt": "Once", **fields}


def answer(content: str, **more: Any) -> ParsedAnswer:
    given = {
        "reasoning": None,
        "tool_calls": [],
        "finish_reason": "stop",
        "token_ids": [1, 2],
        "logprobs": [-1.0, -2.0],
    }
    return ParsedAnswer(content=content, decode=lambda ids: f"<{ids[0]}>", output_tokens=2, **(given | more))


def client(body: bytes, kind: str = "application/json") -> openai.OpenAI:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=body, headers={"content-type": kind}))
    return openai.OpenAI(api_key="k", base_url="http://x/v1", http_client=httpx.Client(transport=transport))


@pytest.mark.parametrize(
    ("prompt", "read"),
    [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])],
)
def test_a_prompt_is_one_text_or_one_list_of_ids(prompt: Any, read: Any) -> None:
    assert completions.parse(asked(prompt=prompt)).prompt == read


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"echo": True, "logprobs": 0}, "echo"),
        ({"echo": True, "prompt": [1, 2]}, "echo"),
    ],
)
def test_what_cannot_be_honoured_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(GatewayError) as error:
        completions.parse(asked(**fields))
    assert (error.value.status, error.value.param) == (400, param)


def test_what_asks_for_nothing_more_is_taken() -> None:
    request = completions.parse(asked(n=2, best_of=2, logprobs=1, ignore_eos=False))
    assert (request.n, request.ignored_fields) == (2, [])
    assert request.sampling == completions.parse(asked()).sampling
    assert completions.parse(asked(ignore_eos=True)).sampling.ignore_eos


def test_every_honoured_field_is_read() -> None:
    assert completions.TABLES.honoured == set(completions.CompletionsWire.__struct_fields__)


def test_an_absent_limit_means_what_it_means_at_openai() -> None:
    assert completions.parse(asked()).sampling.max_tokens == 16
    assert completions.parse(asked(max_tokens=99)).sampling.max_tokens == 99


def test_an_answer_is_what_the_sdk_expects() -> None:
    request = completions.parse(asked(echo=True))
    read = client(completions.serialize(request, OPENING, [answer(" upon")])).completions.create(**asked())
    assert (read.choices[0].text, read.choices[0].finish_reason) == ("Once upon", "stop")
    request = completions.parse(asked(logprobs=1))
    read = client(completions.serialize(request, OPENING, [answer(" upon")])).completions.create(**asked())
    told = read.choices[0].logprobs
    assert (told.tokens, told.token_logprobs, told.text_offset) == (["<1>", "<2>"], [-1.0, -2.0], [0, 3])


@given(st.lists(st.text(min_size=1, max_size=5), max_size=6), st.booleans())
def test_a_stream_adds_up_to_the_whole_answer(pieces: list[str], echo: bool) -> None:
    request = completions.parse(asked(echo=echo, n=2, stream_options={"include_usage": True}))
    events = completions.events(request, OPENING)
    out, answers = [events.start()], [answer("".join(pieces)), answer("", finish_reason="length")]
    out += [events.delta(0, Delta(kind="content", text=piece)) for piece in pieces]
    out += [events.stop(i, said) for i, said in enumerate(answers)]
    chunks = list(
        client(b"".join([*out, events.end(answers)]), "text/event-stream").completions.create(**asked(stream=True))
    )
    whole = client(completions.serialize(request, OPENING, answers)).completions.create(**asked())
    for choice in whole.choices:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.text for c in mine) == choice.text
        assert mine[-1].finish_reason == choice.finish_reason
    assert chunks[-1].usage == whole.usage


def test_offsets_run_on_through_a_stream() -> None:
    events = completions.events(completions.parse(asked(logprobs=0, n=2)), OPENING)
    first = events.delta(0, Delta(kind="content", text="ab", tokens=[SampledToken(1, "ab", -1.0)]))
    second = events.delta(0, Delta(kind="content", text="c", tokens=[SampledToken(2, "c", -1.0)]))
    assert b'"text_offset":[0]' in first
    assert b'"text_offset":[2]' in second
    others = [events.delta(1, Delta(kind="content", text="d", tokens=[SampledToken(3, "d", -1.0)])) for _ in range(2)]
    assert b'"text_offset":[0]' in others[0]
    assert b'"text_offset":[1]' in others[1]


def test_logprobs_name_tokens_by_id_where_asked_and_are_none_where_unknown() -> None:
    request = completions.parse(asked(logprobs=0, return_tokens_as_token_ids=True))
    whole = client(completions.serialize(request, OPENING, [answer("a"), answer("b", logprobs=None)]))
    known, unknown = whole.completions.create(**asked()).choices
    assert known.logprobs.tokens == ["token_id:1", "token_id:2"]
    assert unknown.logprobs is None


def test_logprobs_of_more_tokens_than_the_sampled_one_are_those_of_that_one() -> None:
    request = completions.parse(asked(logprobs=5))
    assert (request.logprobs, request.ignored_fields) == (True, ["logprobs"])
