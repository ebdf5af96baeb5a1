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
    info = AttemptInfo(
        rollout_id="r", attempt_id="a", mode="train", open=True, sampling={}, seed_key="r", spans=recorded(world)
    )
    return LiveAttempt(Address("r", "a"), info, 0.0)


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


@pytest.mark.parametrize(
    ("reasoning", "goes_on"), [(None, True), ("I count.", True), ("\nI count. ", True), ("I guess.", False)]
)
@pytest.mark.parametrize("known", [True, False])
def test_altered_reasoning_is_heard_where_the_tokens_can_be_read_again(
    reasoning: str | None, goes_on: bool, known: bool, renderer: LibraryRenderer
) -> None:
    asked = [{"role": "user", "content": "how many?"}]
    ids = renderer.tokenizer.encode_own("<think>\nI count.\n</think>\n\n3<|im_end|>")
    call = Call(
        call_id="c0", rollout_id="r", attempt_id="a", number=0, model="m", prompt_ids=renderer.render(asked, None),
        response_ids=ids, logprobs=None, versions=[], temperature=1.0, finish_reason="stop",
    )  # fmt: skip
    said = {"role": "assistant", "content": "3"}
    more = {semconv.DIALECT: "chat_completions", semconv.INPUT_MESSAGES: asked, semconv.OUTPUT_MESSAGES: [said]}
    info = AttemptInfo(
        rollout_id="r",
        attempt_id="a",
        mode="train",
        open=True,
        sampling={},
        seed_key="r",
        spans=[to_span(call, **more)],
    )
    other = LiveAttempt(Address("r", "a"), info, 0.0, renderer if known else None)
    back = said if reasoning is None else {**said, "reasoning_content": reasoning}
    place = other.forest.find_place("m", [*asked, back, *asked], None, renderer)
    assert (place.parent is not None) == (goes_on or not known)


@given(worlds())
def test_numbers_go_on_behind_all_that_arrived(world: World) -> None:
    used = [call.number for asked in world.asked for call in asked.calls]
    assert elsewhere(world).take_numbers(1) == max(used) + 1


@given(worlds())
def test_what_was_not_delivered_is_not_continued(world: World) -> None:
    delivered = {call_id for _, call_id in world.delivered}
    assert {live.call.call_id for live in elsewhere(world).forest._live} == delivered
