"""What clients change in the history that they send back still finds its call; what they edit does not."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl_adapters.call import Call
from lightning_rl_proxy.address import Address
from lightning_rl_proxy.forest import message_fingerprint
from lightning_rl_proxy.forest.nodes import Answered
from lightning_rl_proxy.http.attempt import LiveAttempt
from lightning_rl_proxy.http.inflight_request import InflightRequest
from lightning_rl_proxy.recording.ledger import AttemptInfo

Message = dict[str, Any]
TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]

texts = st.text(max_size=12)
numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """A conversation that ends with an answer; the results of its tool calls stand in any order."""
    messages: list[Message] = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    messages.append({"role": "user", "content": draw(texts)})
    number = 0
    for _ in range(draw(st.integers(1, 3))):
        answer: Message = {"role": "assistant", "content": draw(texts)}
        calls = draw(
            st.lists(st.tuples(st.sampled_from("fgh"), st.dictionaries(texts, values, max_size=3)), max_size=3)
        )
        for name, arguments in calls:
            function = {"name": name, "arguments": json.dumps(arguments)}
            answer.setdefault("tool_calls", []).append({"id": f"c{number}", "type": "function", "function": function})
            number += 1
        messages.append(answer)
        results = [{"role": "tool", "tool_call_id": call["id"], "content": draw(texts)} for call in calls_of(answer)]
        messages += draw(st.permutations(results)) or [{"role": "user", "content": draw(texts)}]
    return [*messages, {"role": "assistant", "content": draw(texts)}]


def calls_of(message: Message) -> list[Any]:
    return message.get("tool_calls") or []


def reasoning(message: Message, dice: random.Random) -> None:
    if message["role"] == "assistant":
        message[dice.choice(["reasoning_content", "reasoning"])] = "let me see"


def rewritten_arguments(message: Message, dice: random.Random) -> None:
    for call in calls_of(message):
        value = rewritten(json.loads(call["function"]["arguments"]), dice)
        text = json.dumps(value, ensure_ascii=dice.random() < 0.5, indent=dice.choice([None, 2]))
        call["function"]["arguments"] = f" {text}\n"


def rewritten(value: Any, dice: random.Random) -> Any:
    if isinstance(value, dict):
        return {name: rewritten(inner, dice) for name, inner in dice.sample(list(value.items()), len(value))}
    if isinstance(value, list):
        return [rewritten(inner, dice) for inner in value]
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53 and value == int(value):
        return dice.choice([int(value), float(value)])
    return value


def keys_in_another_order(message: Message, dice: random.Random) -> None:
    items = dice.sample(list(message.items()), len(message))
    message.clear()
    message.update(items)


def white_space(message: Message, dice: random.Random) -> None:
    if isinstance(message.get("content"), str):
        message["content"] = message["content"].strip() + "\n "


def parts(message: Message, dice: random.Random) -> None:
    content = message.get("content")
    if isinstance(content, str):
        at = dice.randint(0, len(content))
        message["content"] = [{"type": "text", "text": part} for part in (content[:at], content[at:])]
        message["content"][0]["cache_control"] = {"type": "ephemeral"}


def nothing_in_other_words(message: Message, dice: random.Random) -> None:
    if not message.get("content"):
        message["content"] = dice.choice([None, "", []])
        if message["content"] is None and dice.random() < 0.5:
            del message["content"]
    if not calls_of(message):
        message["tool_calls"] = dice.choice([None, []])


def extras(message: Message, dice: random.Random) -> None:
    message |= {"refusal": None, "annotations": [], "audio": None, "function_call": None, "provider_extra": {"a": 1}}
    if message["role"] != "tool":
        message["name"] = "somebody"


def developer(message: Message, dice: random.Random) -> None:
    if message["role"] == "system":
        message["role"] = "developer"


ALTERATIONS: list[Callable[[Message, random.Random], None]] = [
    reasoning, rewritten_arguments, keys_in_another_order, white_space, parts, nothing_in_other_words, extras,
    developer,
]  # fmt: skip


def with_other_ids(messages: list[Message]) -> None:
    for message in messages:
        for call in calls_of(message):
            call["id"] = "toolu_" + call["id"]
        if "tool_call_id" in message:
            message["tool_call_id"] = "toolu_" + message["tool_call_id"]


def answered(messages: list[Message]) -> tuple[LiveAttempt, str]:
    """An attempt in which every assistant message was an answer, and the id of the last call."""
    attempt = an_attempt()
    last = ""
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            last = answer(attempt, messages[:index], message, call_id=f"call-{index}")
    return attempt, last


def an_attempt() -> LiveAttempt:
    info = AttemptInfo(rollout_id="r", attempt_id="a", mode="train", open=True, sampling={}, seed_key="r")
    return LiveAttempt(Address("r", "a", None), info, 0.0)


def answer(attempt: LiveAttempt, messages: list[Message], message: Message, call_id: str) -> str:
    place = attempt.forest.find_turn("m", messages, TOOLS)
    call = Call(
        call_id=call_id, rollout_id="r", attempt_id="a", number=attempt.take_numbers(1), model="m", prompt_ids=[],
        response_ids=[], logprobs=None, versions=[], temperature=1.0, finish_reason="stop",
    )  # fmt: skip
    inflight = InflightRequest(b"", lambda: None)
    inflight.commits.append(Answered(place, call, message, reasoned=False))
    attempt.commit(inflight)
    return call_id


def continued(attempt: LiveAttempt, messages: list[Message], tools: Any = TOOLS) -> str | None:
    place = attempt.forest.find_turn("m", [*messages, {"role": "user", "content": "and now?"}], tools)
    assert place.parent is None or place.fork is None
    return place.parent.call.call_id if place.parent else None


@given(conversations(), st.lists(st.sampled_from(ALTERATIONS)), st.booleans(), st.randoms(use_true_random=False))
def test_what_clients_change_in_their_echo_finds_the_call(
    messages: list[Message], alterations: list[Any], renamed: bool, dice: random.Random
) -> None:
    attempt, last = answered(messages)
    echoed = copy.deepcopy(messages)
    if renamed:
        with_other_ids(echoed)
    for alter in alterations:
        for message in echoed:
            if dice.random() < 0.7:
                alter(message, dice)
    assert continued(attempt, echoed) == last


def other_text(messages: list[Message], dice: random.Random) -> bool:
    message = dice.choice(messages)
    message["content"] += "!"
    return True


def an_image(messages: list[Message], dice: random.Random) -> bool:
    message = dice.choice(messages)
    image = {"type": "image_url", "image_url": {"url": "data:,x"}}
    message["content"] = [{"type": "text", "text": message["content"]}, image]
    return True


def other_arguments(messages: list[Message], dice: random.Random) -> bool:
    calls = [call for message in messages for call in calls_of(message)]
    if calls:
        function = dice.choice(calls)["function"]
        function["arguments"] = json.dumps(json.loads(function["arguments"]) | {"a key of the editor": 1})
    return bool(calls)


def another_name(messages: list[Message], dice: random.Random) -> bool:
    calls = [call for message in messages for call in calls_of(message)]
    if calls:
        dice.choice(calls)["function"]["name"] += "2"
    return bool(calls)


def one_call_less(messages: list[Message], dice: random.Random) -> bool:
    callers = [message for message in messages if calls_of(message)]
    if callers:
        dice.choice(callers)["tool_calls"].pop()
    return bool(callers)


def results_of_each_other(messages: list[Message], dice: random.Random) -> bool:
    results = [message for message in messages if message["role"] == "tool"]
    if len(results) > 1:
        one, two = dice.sample(results, 2)
        one["tool_call_id"], two["tool_call_id"] = two["tool_call_id"], one["tool_call_id"]
    return len(results) > 1


def a_message_less(messages: list[Message], dice: random.Random) -> bool:
    at = dice.randrange(len(messages))
    gone = messages.pop(at)
    return gone not in messages[at : at + 1] and bool(messages)


def another_role(messages: list[Message], dice: random.Random) -> bool:
    messages[0]["role"] = "user" if messages[0]["role"] == "system" else "system"
    return True


EDITS = [
    other_text, an_image, other_arguments, another_name, one_call_less, results_of_each_other, a_message_less,
    another_role,
]  # fmt: skip


@given(conversations(), st.sampled_from(EDITS), st.randoms(use_true_random=False))
def test_what_clients_edit_does_not(messages: list[Message], edit: Any, dice: random.Random) -> None:
    attempt, last = answered(messages)
    edited = copy.deepcopy(messages)
    if edit(edited, dice):
        assert continued(attempt, edited) != last


def test_tools_with_their_keys_in_another_order_are_the_same_and_others_are_not() -> None:
    attempt, last = answered([{"role": "user", "content": "x"}, {"role": "assistant", "content": "ok"}])
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "ok"}]
    function = dict(reversed(TOOLS[0]["function"].items()))  # type: ignore[attr-defined]
    assert continued(attempt, messages, [{"function": function, "type": "function"}]) == last
    assert continued(attempt, messages, []) is None


def called(arguments: Any, call_id: str = "x", *names: str) -> Message:
    function = {"name": "run", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "function": function}]}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ('{"n": 1, "s": "a"}', ' {"s":"a","n":1.0}', True),
        ('{"on": true}', '{"on": "true"}', False),
        ('{"on": "true"}', '{"on": "True"}', False),
        ('{"n": 1}', '{"n": "1"}', False),
        ('{"n": null}', "{}", False),
        ('{"on": true}', '{"on": 1}', False),
        ('{"n": 9007199254740993}', '{"n": 9007199254740992}', False),
        ("", "{}", True),
        (None, "{}", True),
        (" \n", "{}", True),
        ("not json", " not json\n", True),
        ("not json", "not JSON", False),
        ('{"s": "\\ud800"}', '{"s": "\\ud801"}', False),
        ("[" * 100_000, "[" * 100_000, True),
        ("[1, 2]", "[2, 1]", False),
        ('{"s": " a"}', '{"s": "a"}', False),
        ("{'a': True, 'b': None, 'c': [1.0, 'it\\'s']}", '{"a": true, "b": null, "c": [1, "it\'s"]}', True),
        ("{'a': True}", '{"a": false}', False),
        ("{'a': (1,)}", '{"a": [1]}', False),
        ("{'a': b'x'}", '{"a": "eA=="}', False),
        ("{1: 'a'}", '{"1": "a"}', False),
        ("{'a': 1e999}", '{"a": null}', False),
        ("{'a': open('x')}", "{'a': open('x')} ", True),
        ("{'a': " + "-" * 9000 + "1}", '{"a": 1}', False),
        ("{'a': '" + "x" * 10_000 + "'}", '{"a": "' + "x" * 10_000 + '"}', False),
    ],
)
def test_arguments_are_their_values(one: str | None, other: str, same: bool) -> None:
    assert (
        message_fingerprint.fingerprint_of(called(one)).same(message_fingerprint.fingerprint_of(called(other))) == same
    )


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (["a", "b"], "ab", True),
        ([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "ok"}], "ok", True),
        ([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u", "detail": "low"}}],
         [{"text": " a", "type": "text"}, {"image_url": {"detail": "low", "url": "u"}, "type": "image_url"}], True),
        ([{"type": "file", "file": {"file_id": "f"}}],
         [{"type": "file", "file": {"file_id": "f"}, "cache_control": {"type": "ephemeral"}}], True),
        ([{"type": "image_url", "image_url": {"url": "u"}}], [{"type": "image_url", "image_url": {"url": "v"}}], False),
        ([{"type": "image_url", "image_url": {"url": "u"}}], "", False),
        ("a  b", "a b", False),
    ],
)  # fmt: skip
def test_content_is_what_the_model_sees(one: Any, other: Any, same: bool) -> None:
    first, second = ({"role": "user", "content": content} for content in (one, other))
    assert message_fingerprint.fingerprint_of(first).same(message_fingerprint.fingerprint_of(second)) == same


def test_calls_whose_ids_the_client_drops_are_answered_in_their_order() -> None:
    calls = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in "fg"]
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in "fg"]
    turn = [{"role": "assistant", "tool_calls": calls}, *results]
    messages = [{"role": "user", "content": "x"}, *turn, *turn, {"role": "assistant", "content": "done"}]
    attempt, last = answered(messages)
    without = copy.deepcopy(messages)
    for message in without:
        message.pop("tool_call_id", None)
        for call in calls_of(message):
            call.pop("id", None)
    assert continued(attempt, without) == last


QUESTION = {"role": "user", "content": "x"}
RESULT = {"role": "tool", "tool_call_id": "call_k_0", "content": "1"}


def test_ids_of_ours_do_not_excuse_an_edit_of_their_answer() -> None:
    attempt = an_attempt()
    answer(attempt, [QUESTION], called('{"sql": "SELECT 1"}', "call_k_0"), "k")
    edited = [QUESTION, called('{"sql": "[elided]"}', "call_k_0"), RESULT]
    place = attempt.forest.find_turn("m", edited, TOOLS)
    assert place.fork is not None
    assert (place.parent, place.fork.cause) == (None, "tool_call_changed")
    done = {"role": "assistant", "content": "done"}
    answer(attempt, edited, done, "later")
    assert continued(attempt, [*edited, done]) == "later"
    assert continued(attempt, [QUESTION, called('{"sql": "SELECT 1"}', "call_k_0"), RESULT]) == "k"


def test_ids_of_ours_do_not_excuse_an_edit_before_them() -> None:
    attempt = an_attempt()
    answer(attempt, [QUESTION], called("{}", "call_k_0"), "k")
    assert continued(attempt, [{"role": "user", "content": "y"}, called("{}", "call_k_0"), RESULT]) is None


def test_ids_that_are_not_ours_excuse_nothing() -> None:
    attempt = an_attempt()
    answer(attempt, [QUESTION], called('{"a": 1}', "call_0"), "k")
    assert continued(attempt, [QUESTION, called('{"a": 2}', "call_0"), RESULT | {"tool_call_id": "call_0"}]) is None


def test_of_equal_answers_the_ids_say_which_is_continued_and_without_them_the_last_is() -> None:
    attempt = an_attempt()
    for name in ("k", "l"):
        answer(attempt, [QUESTION], called("{}", f"call_{name}_0"), name)

    def turn(name: str) -> list[Message]:
        return [QUESTION, called("{}", name), RESULT | {"tool_call_id": name}]

    assert continued(attempt, turn("call_k_0")) == "k"
    assert continued(attempt, turn("call_l_0")) == "l"
    assert continued(attempt, turn("renamed")) == "l"
    done = {"role": "assistant", "content": "done"}
    answer(attempt, turn("call_k_0"), done, "after k")
    answer(attempt, turn("call_l_0"), done, "after l")
    assert continued(attempt, [*turn("call_k_0"), done]) == "after k"
    assert continued(attempt, [*turn("call_l_0"), done]) == "after l"
    assert continued(attempt, [*turn("renamed"), done]) == "after l"


def test_numbers_that_are_equal_in_python_alone_are_other_arguments() -> None:
    attempt = an_attempt()
    done = {"role": "assistant", "content": "done"}

    def turn(on: Any) -> list[Message]:
        return [QUESTION, called({"on": on}, "x"), RESULT | {"tool_call_id": "x"}]

    answer(attempt, [QUESTION], called({"on": 1}, "x"), "k")
    answer(attempt, turn(1), done, "l")
    assert continued(attempt, [*turn(True), done]) is None
    assert continued(attempt, [*turn(1), done]) == "l"


def test_a_history_that_was_read_once_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt, history, read = an_attempt(), list[Message](), list[int]()
    fingerprint_of = message_fingerprint.fingerprint_of

    def counted(message: Message) -> message_fingerprint.MessageFingerprint:
        read[-1] += 1
        return fingerprint_of(message)

    monkeypatch.setattr(message_fingerprint, "fingerprint_of", counted)
    for turn in range(20):
        history.append({"role": "user", "content": f"turn {turn}"})
        read.append(0)
        said = {"role": "assistant", "content": "ok"}
        assert answer(attempt, history.copy(), said, f"k{turn}")
        history.append(said | {"refusal": None})  # as an SDK writes it
    assert len(set(read[2:])) == 1, read  # the first request and its answer are read with the second
