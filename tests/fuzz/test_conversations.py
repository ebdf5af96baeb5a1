"""Conversations of every dialect, sound and spoiled, with an engine that samples markup, fails, and cuts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.bodies import BODIES, PATHS, TOKENIZER, broken, encode, gone_on, plans, spoiled, texts
from tests.fuzz.laws import Fuzzed, Plan, share

HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "x-stainless-retry-count": st.sampled_from(["0", "1", "", "x"]),
        "content-type": st.sampled_from(["application/json", "text/plain", "application/json; charset=utf-16", ""]),
        "accept": st.sampled_from(["text/event-stream", "*/*", "nothing"]),
        "anthropic-version": st.sampled_from(["2023-06-01", "1"]),
        "x-unknown": st.text("abcé", max_size=200).map(lambda text: text.encode("latin-1").decode("latin-1")),
    },
)


@pytest.mark.parametrize("name", BODIES)
@share(0.12)
@given(data=st.data())
def test_sound_conversations_keep_the_laws(fuzzed: Fuzzed, name: str, data: st.DataObject) -> None:
    """Turn by turn, each repeating what the model answered."""
    fields = data.draw(BODIES[name]())
    agent = data.draw(st.sampled_from([None, "judge"]))
    with fuzzed.attempt(*data.draw(plans)) as attempt:
        for _ in range(data.draw(st.integers(1, 3))):
            answer = attempt.post(PATHS[name], encode(fields), agent)
            following = gone_on(name, fields, answer, data.draw(texts))
            if following is None:
                break
            fields = following


@pytest.mark.parametrize("name", BODIES)
@share(0.06)
@given(data=st.data())
def test_junk_at_any_place_of_a_request_keeps_the_laws(fuzzed: Fuzzed, name: str, data: st.DataObject) -> None:
    fields = data.draw(BODIES[name]().flatmap(spoiled))
    with fuzzed.attempt(*data.draw(plans)) as attempt:
        path = PATHS[name]
        if name == "messages" and data.draw(st.booleans()):
            path += "/count_tokens"
        attempt.post(path, encode(fields), **data.draw(HEADERS))


@pytest.mark.parametrize("name", BODIES)
@share(0.02)
@given(data=st.data())
def test_broken_bytes_keep_the_laws(fuzzed: Fuzzed, name: str, data: st.DataObject) -> None:
    fields = data.draw(BODIES[name]())
    with fuzzed.attempt(*data.draw(plans)) as attempt:
        attempt.post(PATHS[name], data.draw(broken(encode(fields))), **data.draw(HEADERS))


@pytest.mark.parametrize("name", BODIES)
@share(0.02)
@given(data=st.data())
def test_clients_that_leave_lose_no_token(fuzzed: Fuzzed, name: str, data: st.DataObject) -> None:
    """Before the request is whole, before the answer comes, or while it comes; some come back to read it."""
    body = encode(data.draw(BODIES[name]()))
    with fuzzed.attempt(*data.draw(plans)) as attempt:
        missing = data.draw(st.sampled_from([0, 0, 0, 1, 1000]))
        attempt.leave(PATHS[name], body, len(body) + missing, read=data.draw(st.booleans()))
        if data.draw(st.booleans()):
            attempt.post(PATHS[name], body, **{"x-stainless-retry-count": data.draw(st.sampled_from(["0", "1"]))})


@share(0.02)
@given(data=st.data())
def test_an_attempt_that_ends_under_its_requests_loses_no_token(fuzzed: Fuzzed, data: st.DataObject) -> None:
    """Sealed while a request comes in, is worked on, or is answered."""
    name = data.draw(st.sampled_from(sorted(BODIES)))
    body = encode(data.draw(BODIES[name]()))
    half = data.draw(st.integers(0, len(body)))
    with fuzzed.attempt(*data.draw(plans)) as attempt:
        attempt.meet_the_end(PATHS[name], body[:half], body[half:])


def test_a_sampled_tool_call_whose_name_is_no_text_keeps_the_laws(fuzzed: Fuzzed) -> None:
    sampled = TOKENIZER.encode('<tool_call>\n{"name": 1, "arguments": []}\n</tool_call>')
    with fuzzed.attempt(Plan(sampled)) as attempt:
        attempt.post(PATHS["chat"], b'{"model": "policy", "messages": [{"role": "user", "content": "x"}]}')
