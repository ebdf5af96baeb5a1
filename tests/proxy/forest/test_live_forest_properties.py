"""The live forest against the recorded one, for any work of an agent: branches, samples, repeats, edits, sub-agents.

Agents ask and are answered in any order. What their requests find must be what reading every message would find, and
what a naive look at all earlier conversations would; the spans must build the same forest, and its rows be what the
engine saw and said.
"""

import copy
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rl_adapters import credit, forest, rows
from lightning_rl_adapters.call import Call, VersionRange, calls_of, to_span
from lightning_rl_adapters.span import Span
from lightning_rl_adapters.triplet import prompt_ids
from lightning_rl_proxy.forest.live_forest import LiveForest
from lightning_rl_proxy.forest.nodes import Answered, LiveCall, Place
from lightning_rl_proxy.http.attempt import LiveAttempt
from lightning_rl_proxy.http.inflight_request import InflightRequest
from lightning_rl_proxy.rendering.base import ParsedAnswer
from tests.proxy.forest.test_message_fingerprint import ALTERATIONS, an_attempt, with_other_ids
from tests.random_examples import examples

Message = dict[str, Any]
TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]
SPEAK, END = 1, 2


class Spelling:
    """A chat format of one token per character; it writes an answer in other tokens than a model samples it in."""

    vision = None

    def __init__(self) -> None:
        self.stop_token_ids = [END]

    def render(self, messages: Sequence[Message], tools: Any) -> list[int]:
        """See `Renderer`."""
        ids = [len(tools or [])]
        for message in messages:
            ids += [*map(ord, message["role"]), *map(ord, f" {message.get('content')}{message.get('tool_calls')}"), END]
        return [*ids, SPEAK]

    def whole(self, messages: Sequence[Message], tools: Any) -> list[int]:
        """See `Renderer`."""
        return self.render(messages, tools)[:-1]

    def extend(
        self, prompt: list[int], response: list[int], messages: Sequence[Message], tools: Any
    ) -> list[int] | None:
        """See `Renderer`. A message of this text cannot be appended."""
        refused = any(m["role"] == "assistant" or "rewrite" in str(m.get("content")) for m in messages)
        return None if refused else self.render(messages, tools)

    def parse(self, *_: Any) -> ParsedAnswer:
        """Of no use here."""
        raise NotImplementedError


@dataclass
class Asked:
    """A request in flight or answered."""

    messages: list[Message]
    place: Place
    prompt: list[int]
    calls: list[Call]
    answers: list[Message]
    inflight: InflightRequest


class World:
    """One attempt, the agents that work in it, and an engine whose tokens say which call they are of."""

    def __init__(self) -> None:
        self.attempt: LiveAttempt = an_attempt()
        self.asked: list[Asked] = []
        # By the conversation as its client has it, the call id of each answer.
        self.delivered: list[tuple[list[Message], str]] = []

    def ask(self, messages: list[Message], answers: Sequence[Message]) -> Asked:
        """A request that waits for as many answers."""
        first = self.attempt.take_numbers(len(answers))
        place = self.attempt.forest.find_place("m", messages, TOOLS, Spelling())
        asked = Asked(messages, place, place.prompt_ids.copy(), [], [], InflightRequest(b"", lambda: None))
        for number, answer in enumerate(answers, start=first):
            said = copy.deepcopy(answer)
            for index, made in enumerate(said.get("tool_calls", [])):
                made["id"] = f"call_c{number}_{index}"
            ids = [1000 + 10 * number + i for i in range(number % 3 + 1)]
            call = Call(
                call_id=f"c{number}", rollout_id="r", attempt_id="a", number=number, model="m",
                prompt_ids=place.added_ids, response_ids=ids, logprobs=[-0.5] * len(ids),
                versions=[VersionRange(number, 0, len(ids))], temperature=1.0, finish_reason="stop",
                parent_id=None if place.parent is None else place.parent.call.call_id,
            )  # fmt: skip
            asked.calls.append(call)
            asked.answers.append(said)
            asked.inflight.commits.append(Answered(place, call, said, reasoned=False))
        self.asked.append(asked)
        return asked

    def deliver(self, asked: Asked) -> None:
        """The answers of a request reach their client."""
        self.attempt.commit(asked.inflight)
        for answer, call in zip(asked.answers, asked.calls, strict=True):
            self.delivered.append(([*asked.messages, answer], call.call_id))

    def lives(self) -> dict[str, LiveCall]:
        """What can be continued, by call id."""
        self.attempt.forest.find_turn("m", [], TOOLS)  # with which the answers are read that wait
        return {live.call.call_id: live for live in self.attempt.forest._live}

    def spans(self) -> list[Span]:
        """What is recorded, as it comes out of the store."""
        made = [to_span(call) for asked in self.asked for call in asked.calls]
        return msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=list[Span])


def text_of(message: Message) -> Any:
    content = message.get("content")
    parts = content if isinstance(content, list) else [content or ""]
    text = "".join(part if isinstance(part, str) else part["text"] for part in parts)
    arguments = [json.loads(call["function"]["arguments"], parse_int=float) for call in message.get("tool_calls") or []]
    return message["role"].replace("developer", "system"), text.strip(), json.dumps(arguments, sort_keys=True)


def deepest(world: World, messages: list[Message]) -> str | None:
    """What a request continues in messages, by a look at every conversation there is."""
    wanted = [text_of(message) for message in messages]
    found = [
        (len(known), order, call_id)
        for order, (known, call_id) in enumerate(world.delivered)
        if [text_of(message) for message in known] == wanted[: len(known)]
    ]
    return max(found, key=lambda one: one[:2])[2] if found else None


answers = st.sampled_from(["ok", "done", ""]).map(lambda text: {"role": "assistant", "content": text}) | st.integers(
    0, 2
).map(
    lambda n: {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "", "type": "function", "function": {"name": "run", "arguments": f'{{"n": {n}}}'}}],
    }
)
questions = st.sampled_from(["q", "and?", "rewrite", " go on"]).map(lambda text: {"role": "user", "content": text})


def echoed(messages: list[Message], dice: random.Random) -> list[Message]:
    """The messages as a client might write them again: mostly as they were."""
    again = copy.deepcopy(messages)
    if dice.random() < 0.1:
        with_other_ids(again)
    for alter in dice.sample(ALTERATIONS[:1] + ALTERATIONS[2:], dice.choice([0, 0, 1, 2])):
        for message in again:
            if dice.random() < 0.3:
                alter(message, dice)
    if dice.random() < 0.2 and again:
        dice.choice(again)["provider_extra"] = dice.choice([1, True, {"score": 1.0}])
    return again


def next_request(draw: st.DrawFn, world: World, dice: random.Random) -> list[Message]:
    """Of a sub-agent, or behind, or equal to, or like an earlier one."""
    what = draw(st.sampled_from(["new", "go on", "go on", "go on", "repeat", "edit"]))
    if what == "new" or not world.delivered:
        return [{"role": "system", "content": draw(st.sampled_from(["You plan.", "You search."]))}, draw(questions)]
    history, _ = draw(st.sampled_from(world.delivered))
    if what == "repeat":
        return echoed(history[:-1], dice)
    history = echoed(history, dice)
    if what == "edit":
        place = draw(st.integers(0, len(history) - 1))
        edited = history[place]
        if edited.get("tool_calls") and draw(st.booleans()):
            edited["tool_calls"][0]["function"]["arguments"] = '{"n": "[elided]"}'
        else:
            edited["content"] = "edited"
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": draw(st.sampled_from(["1", "2"]))}
        for call in history[-1].get("tool_calls") or []
    ]
    return [*history, *(results or [draw(questions)])]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """An attempt after some work, all of it checked on the way against a naive reading."""
    world, dice = World(), draw(st.randoms(use_true_random=False))
    waiting: list[Asked] = []
    for _ in range(draw(st.integers(1, 12))):
        if waiting and draw(st.booleans()):
            world.deliver(waiting.pop(draw(st.integers(0, len(waiting) - 1))))
            continue
        messages = next_request(draw, world, dice)
        expected = deepest(world, messages)
        with patch.object(LiveForest, "_start", lambda *_: None):
            read = world.attempt.forest.find_place("m", messages, TOOLS, Spelling())
        asked = world.ask(messages, draw(st.lists(answers, min_size=1, max_size=3)))
        found = asked.place
        assert (found.parent, found.prompt_ids, found.added_ids) == (read.parent, read.prompt_ids, read.added_ids)
        assert (found.fork, found.nearest) == (read.fork, read.nearest)
        continued = None if found.trail is None else found.trail.continued
        if expected is None:
            assert continued is None
        else:
            assert continued is not None
            assert continued.key == world.lives()[expected].key  # which of equal ones it is the ids may say
            assert found.parent in (None, continued)
        waiting.append(asked)
    return world


@settings(max_examples=examples(150))
@given(worlds())
def test_the_recorded_forest_is_the_live_one_and_rows_are_what_the_engine_saw_and_said(world: World) -> None:
    calls = calls_of(world.spans())
    built = forest.build(calls)
    for asked in world.asked:
        world.attempt.commit(asked.inflight)
    lives, by_call = world.lives(), {call.call_id: asked for asked in world.asked for call in asked.calls}
    assert built.nodes.keys() == lives.keys() == by_call.keys()
    for call_id, node in built.nodes.items():
        asked, live = by_call[call_id], lives[call_id]
        assert (None if node.parent is None else node.parent.call.call_id) == live.call.parent_id
        assert prompt_ids(node) == asked.prompt == live.prompt_ids()
        assert live.context() == prompt_ids(node) + node.call.response_ids
    for call_id, live in lives.items():
        live.prompt = None  # no longer at hand
        assert live.prompt_ids() == by_call[call_id].prompt
    cut = rows.cut(built, credit.final_values(built, 1.0))
    for row, leaf in zip(cut, built.leaves(), strict=True):
        assert row.token_ids == by_call[leaf.call.call_id].prompt + leaf.call.response_ids
    trained = Counter(t for row in cut for t, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask)
    assert trained == Counter(token for call in calls for token in call.response_ids)


def conversation(agent: int, turns: int) -> list[Message]:
    return [{"role": "user", "content": f"agent {agent} turn {turn}"} for turn in range(turns)]


def grown(lengths: Sequence[int], dice: random.Random) -> dict[tuple[int, int], tuple[Any, ...]]:
    """The forest of agents that work side by side: of each call its parent, and its prompt by whose tokens they are."""
    world, names = World(), dict[str, tuple[int, int]]()
    histories: list[list[Message]] = [[] for _ in lengths]
    left = [conversation(agent, turns) for agent, turns in enumerate(lengths)]
    waiting: dict[int, Asked] = {}
    while waiting or any(left):
        agent = dice.choice([a for a in range(len(lengths)) if a in waiting or left[a]])
        if (asked := waiting.pop(agent, None)) is not None:
            world.deliver(asked)
            histories[agent] = [*asked.messages, asked.answers[0]]
        else:
            turn = lengths[agent] - len(left[agent])
            asked = world.ask([*histories[agent], left[agent].pop(0)], [{"role": "assistant", "content": "ok"}])
            names[asked.calls[0].call_id] = (agent, turn)
            waiting[agent] = asked
    built = forest.build(calls_of(world.spans()))
    return {
        names[call_id]: (
            None if node.parent is None else names[node.parent.call.call_id],
            [names[step.call.call_id] for step in node.path()],
            node.call.prompt_ids,
        )
        for call_id, node in built.nodes.items()
    }


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms(), st.randoms())
def test_the_order_in_which_agents_ask_and_are_answered_does_not_change_the_forest(
    lengths: list[int], one: random.Random, other: random.Random
) -> None:
    assert grown(lengths, one) == grown(lengths, other)


def test_a_repeat_of_a_request_that_could_not_be_appended_is_another_sample_of_it() -> None:
    for question, before in (("rewrite", []), ("q2", [{"role": "user", "content": "q1"}, said("altered")])):
        world = World()
        first = world.ask([{"role": "user", "content": "q0"}], [said("a")])
        world.deliver(first)
        messages = [*first.messages, *first.answers, *before, {"role": "user", "content": question}]
        forked, again = world.ask(messages, [said("b")]), world.ask(messages, [said("c")])
        assert forked.place.fork is not None
        assert again.place.fork == forked.place.fork  # it came before the first was answered
        world.deliver(forked)
        repeated = world.ask(messages, [said("d")])
        assert (repeated.place.fork, repeated.place.parent) == (None, None)
        assert repeated.prompt == forked.prompt
        world.deliver(repeated)
        on = world.ask([*messages, said("d"), {"role": "user", "content": "on"}], [said("e")])
        assert (on.place.parent, on.place.fork) == (world.lives()[repeated.calls[0].call_id], None)


def test_branches_that_differ_in_their_middle_alone_go_on_each_by_itself() -> None:
    world = World()

    def goes_on(history: list[Message], question: str) -> Asked:
        asked = world.ask([*history, {"role": "user", "content": question}], [said("ok")])
        world.deliver(asked)
        return asked

    def history_of(asked: Asked) -> list[Message]:
        return [*asked.messages, *asked.answers]

    first = goes_on([], "q")
    middles = [goes_on(history_of(first), way) for way in ("one way", "another")]
    ends = [goes_on(history_of(middle), "and?") for middle in middles]
    for parent in (middles[0], ends[0], middles[1], ends[1]):
        on = goes_on(history_of(parent), "on")
        assert on.place.parent is world.lives()[parent.calls[0].call_id]


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}
