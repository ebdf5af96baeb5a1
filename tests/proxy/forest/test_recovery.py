"""A forest that is rebuilt from spans is the live one: every request finds the place there that it finds here."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import Call, to_span
from lightning_rl_adapters.span import Span
from lightning_rl_proxy.address import Address
from lightning_rl_proxy.http.attempt import LiveAttempt
from lightning_rl_proxy.recording.ledger import AttemptInfo
from lightning_rl_proxy.rendering.renderers import LibraryRenderer
from tests.proxy.forest.test_live_forest_properties import TOOLS, Spelling, World, next_request, worlds
from tests.random_examples import examples


def recorded(world: World) -> list[Span]:
    """The spans of all calls of a world, in no order, as they come out of the store; answered as delivered."""
    delivered = {call_id: order for order, (_, call_id) in enumerate(world.delivered)}
    spans = []
    for asked in world.asked:
        for call, answer in zip(asked.calls, asked.answers, strict=True):
            order = delivered.get(call.call_id)
            # The world's answers are as a service's: reasoning tells none of them apart.
            kept = msgspec.structs.replace(call, delivered=order is not None, end_ns=order or 0, trainable=False)
            more: dict[str, Any] = {semconv.DIALECT: "chat_completions", semconv.OUTPUT_MESSAGES: [answer]}
            more |= {semconv.INPUT_MESSAGES: list(asked.place.new_messages)} | asked.place.attributes()
            spans.append(to_span(kept, **more))
    random.Random(0).shuffle(spans)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(spans), type=list[Span])


def elsewhere(world: World) -> LiveAttempt:
    """The attempt at another gateway, which knows what was recorded alone."""
    return of_spans(recorded(world))


@settings(max_examples=examples(100))
@given(worlds(), st.data())
def test_a_request_finds_the_same_place_and_tokens_at_another_gateway(world: World, data: st.DataObject) -> None:
    other = elsewhere(world)
    dice = data.draw(st.randoms(use_true_random=False))
    for _ in range(3):
        messages = data.draw(st.composite(lambda draw: next_request(draw, world, dice))())
        here = world.attempt.forest.find_place("m", messages, TOOLS, Spelling())
        there = other.forest.find_place("m", messages, TOOLS, Spelling())
        assert there.prompt_ids == here.prompt_ids
        assert there.added_ids == here.added_ids
        assert (there.parent and there.parent.call.call_id) == (here.parent and here.parent.call.call_id)


ASKED = [{"role": "user", "content": "how many?"}]
SAID = {"role": "assistant", "content": "3"}


def reasoned(number: int, thought: str, renderer: LibraryRenderer, parent_id: str | None = None) -> Span:
    """A call that asked the same, thought so, and said the same."""
    call = Call(
        call_id=f"c{number}", rollout_id="r", attempt_id="a", number=number, model="m", parent_id=parent_id,
        prompt_ids=renderer.render(ASKED, None), logprobs=None, versions=[], temperature=1.0, finish_reason="stop",
        response_ids=renderer.tokenizer.encode_own(f"<think>\n{thought}\n</think>\n\n3<|im_end|>"), end_ns=number,
    )  # fmt: skip
    more = {semconv.DIALECT: "chat_completions", semconv.INPUT_MESSAGES: ASKED, semconv.OUTPUT_MESSAGES: [SAID]}
    return to_span(call, **more)


def of_spans(spans: list[Span], renderer: LibraryRenderer | None = None) -> LiveAttempt:
    info = AttemptInfo(rollout_id="r", attempt_id="a", mode="train", open=True, sampling={}, seed_key="r", spans=spans)
    return LiveAttempt(Address("r", "a"), info, 0.0, renderer)


@pytest.mark.parametrize(
    ("reasoning", "goes_on"), [(None, True), ("I count.", True), ("\nI count. ", True), ("I guess.", False)]
)
@pytest.mark.parametrize("known", [True, False])
def test_altered_reasoning_is_heard_where_the_tokens_can_be_read_again(
    reasoning: str | None, goes_on: bool, known: bool, renderer: LibraryRenderer
) -> None:
    other = of_spans([reasoned(0, "I count.", renderer)], renderer if known else None)
    back = SAID if reasoning is None else {**SAID, "reasoning_content": reasoning}
    place = other.forest.find_place("m", [*ASKED, back, *ASKED], None, renderer)
    assert (place.parent is not None) == (goes_on or not known)


def test_of_answers_that_say_the_same_the_recorded_one_is_continued_whose_reasoning_a_request_tells(
    renderer: LibraryRenderer,
) -> None:
    spans = [reasoned(0, "I count.", renderer), reasoned(1, "I guess.", renderer), reasoned(2, "So.", renderer, "c0")]
    told = [*ASKED, {**SAID, "reasoning_content": "I count."}, *ASKED, SAID, *ASKED]
    place = of_spans(spans, renderer).forest.find_place("m", told, None, renderer)
    assert place.parent is not None
    assert place.parent.call.call_id == "c2"


@given(worlds())
def test_numbers_go_on_behind_all_that_arrived(world: World) -> None:
    used = [call.number for asked in world.asked for call in asked.calls]
    assert elsewhere(world).take_numbers(1) == max(used) + 1


@given(worlds())
def test_what_was_not_delivered_is_not_continued(world: World) -> None:
    delivered = {call_id for _, call_id in world.delivered}
    assert {live.call.call_id for live in elsewhere(world).forest._live} == delivered
