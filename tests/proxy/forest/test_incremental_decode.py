"""A request that is read behind an earlier one is the request that is read whole, however its client writes it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl_proxy.dialects.base import decode
from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.forest import incremental_decode
from lightning_rl_proxy.forest.incremental_decode import DecodedBody, IncrementalDecode

pytestmark = pytest.mark.usefixtures("all_is_long")
CHAT = [{"role": ("user", "assistant")[i % 2], "content": f"turn {i} of all"} for i in range(20)]

texts = st.text(st.sampled_from('ab" \\]}[{,:é\n'), max_size=6)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": texts})
    | st.sampled_from([1, 12, None, [], "", {"messages": [1]}]),
    min_size=1,
    max_size=6,
)
fields = st.dictionaries(st.sampled_from(["model", "n", "tools", "metadata", "user"]), texts | st.integers() | messages)
separators = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " : ")])


def written(
    chat: list[Any], before: dict[str, Any] | None = None, after: dict[str, Any] | None = None, **dumps: Any
) -> bytes:
    """A body with these messages, between other fields."""
    return json.dumps({**(before or {}), "messages": chat, **(after or {})}, **dumps).encode()


def read(attempt: IncrementalDecode, body: bytes) -> DecodedBody:
    """A request, kept for the next one."""
    said = attempt.read(body)
    whole = decode(body)
    assert said.whole() == whole
    if isinstance(whole.get("messages"), list):
        found = [*said.read, *said.fields["messages"]]
        assert found == whole["messages"]
        assert said.fields | {"messages": found} == whole
        attempt.keep(said, found)
    return said


@given(messages, messages, st.data())
def test_every_request_is_what_it_is_alone(first: list[Any], more: list[Any], data: st.DataObject) -> None:
    """Whatever went before: the same messages and more, others, in another order of fields, with other white space."""
    attempt = IncrementalDecode()
    chats = [first, first + more, more, first[:-1], first + more + first, first + first]
    for _ in range(6):
        chat = data.draw(st.sampled_from(chats))
        before, after = data.draw(fields), data.draw(fields)
        read(attempt, written(chat, before, after, separators=data.draw(separators), ensure_ascii=False))


def test_a_turn_is_read_behind_the_turn_before_it() -> None:
    attempt = IncrementalDecode()
    for turn in range(1, 20, 2):
        said = read(attempt, written(CHAT[:turn], {"model": "policy"}, {"temperature": turn / 10}))
        assert len(said.read) == max(0, turn - 2)


def test_branches_are_read_behind_where_they_part() -> None:
    attempt = IncrementalDecode()
    read(attempt, written(CHAT[:5]))
    for branch in range(3 * incremental_decode._KEPT):
        said = read(attempt, written([*CHAT[:5], {"role": "user", "content": f"branch {branch}"}]))
        assert said.read == CHAT[:5]


@pytest.mark.parametrize(
    "body",
    {
        "an edit": written([*CHAT[:3], {"role": "assistant", "content": "edited"}, *CHAT[4:7]]),
        "another model": written(CHAT[:7], {"model": "other"}),
        "messages twice": b'{"messages": %b, "messages": [{"role": "user"}]}' % json.dumps(CHAT[:6]).encode(),
        "the new ones twice": b'{"messages": [%b,1], "messages": [1]}' % json.dumps(CHAT[:5]).encode()[1:-1],
        "messages and a number": b'{"messages": %b, "messages": 0}' % json.dumps(CHAT[:6]).encode(),
        "messages within a field": written([1], {"a": {"messages": CHAT[:7]}}),
        "none more": written(CHAT[:5]),
        "fewer": written(CHAT[:4]),
    }.values(),
)
def test_what_does_not_go_on_is_read_whole(body: bytes) -> None:
    attempt = IncrementalDecode()
    read(attempt, written(CHAT[:5]))
    assert not read(attempt, body).read


def test_a_number_that_goes_on_is_another_number() -> None:
    attempt = IncrementalDecode()
    read(attempt, written([*CHAT, 1]))
    assert read(attempt, written([*CHAT, 123])).read == ()


@pytest.mark.parametrize("end", [b", ]}", b",, 1]}", b", 1}", b", 1], }", b', "\xff"]}', b", 1]} 1", b", 1]", b","])
def test_a_broken_request_is_refused_as_it_is_alone(end: bytes) -> None:
    attempt, begun = IncrementalDecode(), written(CHAT[:5])
    read(attempt, begun)
    broken = begun[:-2] + end
    with pytest.raises(GatewayError) as alone:
        decode(broken)
    with pytest.raises(GatewayError) as behind:
        attempt.read(broken)
    assert behind.value.message == alone.value.message
    read(attempt, written(CHAT[:7]))


def test_short_requests_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incremental_decode, "_LONG", 10_000)
    attempt = IncrementalDecode()
    read(attempt, written(CHAT[:5]))
    assert not read(attempt, written(CHAT[:7])).read
