"""An attempt goes on at another gateway, by every dialect, as it would have gone on where it was.

Two gateways with the same scripts: the attempt begins at one; what that recorded is all that the other has. From then
on both are asked the same, and must send their engines the same, record the same, and find the same places.
"""

import base64
import json
import random
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import from_span
from lightning_rl_adapters.span import Packed, Span, unpack
from lightning_rl_proxy.engines.chat_backend import BackendAnswer
from lightning_rl_proxy.gateway import Gateway
from lightning_rl_proxy.recording.ledger import AttemptInfo
from lightning_rl_proxy.rendering.base import Renderer
from lightning_rl_proxy.rendering.load import load_renderer
from lightning_rl_proxy.rendering.renderers import LibraryRenderer
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from lightning_rl_proxy.routing.router import Router
from tests import seeing
from tests.proxy.conftest import MODEL, SECRET, TOKENIZER, MemoryLedger, ScriptedEngine, Served, calls_in, listening
from tests.random_examples import examples

CAT, DOG = seeing.picture(1, 16, 24), seeing.picture(2, 16, 24)
FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
JUDGE = "judge"


class Heir(MemoryLedger):
    """Tells what is recorded of an attempt, as the store does to a gateway that takes it over; `given` are the names of
    all spans that it was ever given, those that it had already too."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[str] = []

    async def add_spans(self, spans: Sequence[Packed]) -> None:
        self.given += [unpack(span.record).name for span in spans]
        await super().add_spans(spans)

    async def attempt(self, rollout_id: str, attempt_id: str) -> AttemptInfo | None:
        info = await super().attempt(rollout_id, attempt_id)
        spans = [span for span in self.spans if span.attempt_id == attempt_id]
        return None if info is None else msgspec.structs.replace(info, spans=spans)


class Judge:
    """A chat service that tells no tokens."""

    model = JUDGE

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def complete(self, body: dict[str, Any]) -> BackendAnswer:
        self.asked.append(body)
        message = {"role": "assistant", "content": "fair"}
        return BackendAnswer(
            body={
                "id": f"theirs-{len(self.asked)}",
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
            }
        )

    async def embed(self, body: dict[str, Any]) -> bytes:
        raise NotImplementedError

    async def close(self) -> None:
        pass


class Pair:
    """The two gateways and their judges. `one` is asked alone until `hand_over`."""

    def __init__(self, one: Served, two: Served, judges: Sequence[Judge]) -> None:
        self.one, self.two, self.judges = one, two, judges
        self.client = httpx.Client()
        self.attempt = ""
        self._known = (0, 0)

    def begin(self) -> None:
        """Another attempt, of which nobody knows."""
        self.attempt = uuid.uuid4().hex

    def say(self, *texts: str) -> None:
        for each in (self.one, self.two):
            each.engine.script.clear()
            each.engine.script.extend(texts)

    def post(self, served: Served, door: str, body: Any, *, retry: bool = False) -> httpx.Response:
        headers = {"authorization": f"Bearer {served.key('r1', self.attempt)}"}
        headers |= {"x-stainless-retry-count": "1"} if retry else {}
        url = f"{served.base_url('r1', self.attempt)}/{door}"
        answer = self.client.post(url, content=json.dumps(body), headers=headers, timeout=30)
        assert answer.status_code == 200, answer.text
        return answer

    def ask(self, door: str, body: Any) -> dict[str, Any]:
        """At the first."""
        told: dict[str, Any] = self.post(self.one, door, body).json()
        return told

    def hand_over(self) -> None:
        """The second gets what the first has recorded, as it comes out of a store."""
        spans = self.recorded(self.one)
        random.Random(0).shuffle(spans)
        self.two.ledger.spans = msgspec.msgpack.decode(msgspec.msgpack.encode(spans), type=list[Span])
        self.two.engine.script = self.one.engine.script.copy()  # of which the one has said some
        self._known = (len(self.one.engine.prompts), len(self.two.engine.prompts))

    def recorded(self, served: Served) -> list[Span]:
        served.run(served.gateway._recorder.stored)
        mine = [span for span in served.ledger.spans if span.attempt_id == self.attempt]
        return sorted(mine, key=lambda span: (span.name, span.number))

    def both(self, door: str, body: Any) -> list[httpx.Response]:
        """The same request at both; each call of it is the same call."""
        answers = [self.post(each, door, body) for each in (self.one, self.two)]
        self.check()
        return answers

    def check(self) -> None:
        """What came since the hand-over is the same at both."""
        one, two = self._known
        assert self.one.engine.prompts[one:] == self.two.engine.prompts[two:]
        assert self.one.engine.media[one:] == self.two.engine.media[two:]
        names: dict[str, str] = {}  # ids of calls, which each made for itself, by their numbers
        told = []
        for served in (self.one, self.two):
            new = self.recorded(served)
            names |= {span.span_id: str(span.number) for span in new}
            told.append([self._told(span, names) for span in new])
        for here, there in zip(*told, strict=True):
            assert here == there

    @staticmethod
    def _told(span: Span, names: dict[str, str]) -> dict[str, Any]:
        own = dict(span.attributes)
        own.pop(semconv.ENGINE_US, None)  # no two took as long
        own.pop(semconv.OUTPUT_MESSAGES, None)  # with ids of tool calls, which are made of the calls' own
        if own.get(semconv.PARENT) is not None:
            own[semconv.PARENT] = names[own[semconv.PARENT]]
        messages = json.dumps(own.pop(semconv.INPUT_MESSAGES, None))
        return own | {"name": span.name, "messages": messages}


@contextmanager
def pair_of(tokenizer: FastTokenizer, renderer: Renderer, folder: Path) -> Iterator[Pair]:
    with ExitStack() as opened:
        served, judges = [], []
        for which, ledger in (("one", MemoryLedger()), ("two", Heir())):
            engine, judge, router = ScriptedEngine(tokenizer), Judge(), Router(MODEL)
            router.register(engine)
            router.register_backend(judge)
            gateway = Gateway(ledger=ledger, secret=SECRET, journal=folder / which, renderer=renderer, router=router)
            url, loop = opened.enter_context(listening(gateway))
            served.append(Served(url, gateway, ledger, engine, loop))
            judges.append(judge)
        pair = Pair(*served, judges)
        opened.enter_context(pair.client)
        pair.begin()
        yield pair


@pytest.fixture(scope="module")
def reads() -> LibraryRenderer:
    return load_renderer(TOKENIZER, "qwen3", MODEL)


@pytest.fixture(scope="module")
def pair(reads: LibraryRenderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair_of(FastTokenizer(TOKENIZER), reads, tmp_path_factory.mktemp("pair")) as pair:
        yield pair


@pytest.fixture(scope="module")
def seeing_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = seeing.make_folder(tmp_path_factory.mktemp("seeing") / "model")
    with pair_of(FastTokenizer(folder), load_renderer(folder, "auto", MODEL), folder) as pair:
        yield pair


def chat(messages: Sequence[Any], **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": messages} | more


def went_on(messages: Sequence[Any], answer: dict[str, Any], *new: Any) -> list[Any]:
    said = answer["choices"][0]["message"]
    return [*messages, {name: said[name] for name in ("role", "content", "tool_calls") if said.get(name)}, *new]


def newest(pair: Pair) -> Span:
    """The call that the second recorded last."""
    return max((span for span in pair.recorded(pair.two) if span.name == semconv.CALL_SPAN), key=lambda one: one.number)


# Images


def test_a_conversation_with_images_goes_on_with_them_in_their_places_and_none_is_recorded_again(
    seeing_pair: Pair,
) -> None:
    pair, tools = seeing_pair, [{"type": "function", "function": FUNCTION}]
    pair.begin()
    pair.say(CALL, "a dog", "a cat")
    first = [seeing.asked("look", CAT)]
    answer = pair.ask("chat/completions", chat(first, tools=tools))
    [made] = answer["choices"][0]["message"]["tool_calls"]
    result = {"role": "tool", "tool_call_id": made["id"], "content": [seeing.part(DOG)]}
    second = went_on(first, answer, result)
    answer = pair.ask("chat/completions", chat(second, tools=tools))
    pair.hand_over()
    given = pair.two.ledger.given
    given.clear()
    third = went_on(second, answer, seeing.asked("and this?", CAT))
    pair.both("chat/completions", chat(third, tools=tools))
    assert newest(pair).attributes[semconv.PARENT] is not None
    assert [one.image.data for one in pair.two.engine.media[-1]] == [CAT, DOG, CAT]
    assert given == [semconv.CALL_SPAN]  # the tools are known there, too
    assert [span.name for span in pair.recorded(pair.two)].count(semconv.TOOLS_SPAN) == 1
    # Another image in the place of one: another branch; one that nobody showed before is recorded, once.
    bird = seeing.picture(3, 16, 24)
    for last in (DOG, bird, bird):
        pair.both("chat/completions", chat([*second, third[-2], seeing.asked("and this?", last)], tools=tools))
    pair.both("chat/completions", chat([seeing.asked("look", DOG)], tools=tools))
    assert [span.name for span in pair.recorded(pair.two)].count(semconv.MEDIA_SPAN) == 3
    assert given.count(semconv.MEDIA_SPAN) == 1


def test_an_image_is_the_same_however_its_url_is_written(seeing_pair: Pair) -> None:
    pair = seeing_pair
    pair.begin()
    pair.say("a cat")
    odd = "data:IMAGE/X-any;base64," + base64.b64encode(CAT).decode()
    asked = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": odd}}]}
    answer = pair.ask("chat/completions", chat([asked]))
    pair.hand_over()
    for shown in (asked, {"role": "user", "content": [seeing.part(CAT)]}):
        pair.both("chat/completions", chat(went_on([shown], answer, {"role": "user", "content": "sure?"})))
        assert newest(pair).attributes[semconv.PARENT] is not None


def test_a_response_that_saw_an_image_goes_on_by_its_id(seeing_pair: Pair) -> None:
    pair = seeing_pair
    pair.begin()
    pair.say("a cat", "yes")
    image = {"type": "input_image", "image_url": seeing.data_url(CAT)}
    asked = {"model": MODEL, "input": [{"role": "user", "content": [image]}], "instructions": "Look."}
    answer = pair.ask("responses", asked)
    pair.hand_over()
    for instructions in ("Look.", "Look again."):
        more = {"previous_response_id": answer["id"], "input": "sure?", "instructions": instructions}
        pair.both("responses", {"model": MODEL} | more)
        assert [one.image.data for one in pair.two.engine.media[-1]] == [CAT]


# Every dialect


class Agent:
    """Works by one dialect or another at the first gateway; its histories are what it may go on with."""

    def __init__(self, pair: Pair, data: st.DataObject) -> None:
        self.pair, self.draw = pair, data.draw
        self.chats: list[tuple[str, list[Any]]] = []  # model and messages
        self.texts: list[str] = []
        self.ids: list[list[int]] = []
        self.responses: list[str] = []

    def request(self) -> tuple[str, dict[str, Any]]:
        """A request of some dialect, behind an earlier answer or not."""
        kind = self.draw(st.sampled_from(["chat", "chat", "judge", "text", "ids", "responses", "messages"]))
        word = self.draw(st.sampled_from(["hi", "and?", " more"]))
        n = self.draw(st.sampled_from([1, 1, 2]))
        if kind in ("chat", "judge"):
            model = MODEL if kind == "chat" else JUDGE
            known = [messages for of, messages in self.chats if of == model]
            history = self.draw(st.sampled_from([[], *known]))
            body: dict[str, Any] = {"model": model, "messages": [*history, {"role": "user", "content": word}], "n": n}
            if kind == "chat" and self.draw(st.booleans()):
                choice = self.draw(st.sampled_from(["auto", "required"]))
                body |= {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": choice}
            return "chat/completions", body
        if kind == "text":
            return "completions", {
                "model": MODEL,
                "prompt": self.draw(st.sampled_from(["", *self.texts])) + word,
                "n": n,
            }
        if kind == "ids":
            start = self.draw(st.sampled_from([[], *self.ids]))
            return "completions", {"model": MODEL, "prompt": [*start, 40, 41 + len(word)], "n": n}
        if kind == "responses":
            model = self.draw(st.sampled_from([MODEL, MODEL, JUDGE]))
            body = {"model": model, "input": word}
            body |= self.draw(st.sampled_from([{}, {"instructions": "Be brief."}]))
            if self.responses and self.draw(st.booleans()):
                body["previous_response_id"] = self.draw(st.sampled_from(self.responses))
            return "responses", body
        return "messages", {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": word}]}

    def fingerprint_of(self, door: str, body: dict[str, Any], answer: dict[str, Any]) -> None:
        """Keep what an answer lets the agent go on with."""
        if door == "responses":
            self.responses.append(answer["id"])
        elif door == "chat/completions":
            tools = [
                {"role": "tool", "tool_call_id": call["id"], "content": "seen"}
                for call in answer["choices"][0]["message"].get("tool_calls") or []
            ]
            self.chats.append((body["model"], went_on(body["messages"], answer, *tools)))
        elif door == "completions" and isinstance(body["prompt"], str):
            self.texts.append(body["prompt"] + answer["choices"][0]["text"])
            self.texts.append(body["prompt"] + answer["choices"][0]["text"] + "<|im_end|>")
        elif door == "completions":
            last = max(calls_in(self.pair.recorded(self.pair.one)), key=lambda span: span.number)
            self.ids.append(body["prompt"] + from_span(last).response_ids)


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_by_every_dialect_an_attempt_goes_on_as_it_would_have_and_retries_hear_what_was_answered(
    pair: Pair, data: st.DataObject
) -> None:
    pair.begin()
    agent = Agent(pair, data)
    asked = []
    for _ in range(data.draw(st.integers(1, 5))):
        pair.say(*data.draw(st.lists(st.sampled_from(["ok", "done", CALL, "<think>\nhm\n</think>\n\nok"]), max_size=2)))
        door, body = agent.request()
        answer = pair.ask(door, body)
        agent.fingerprint_of(door, body, answer)
        asked.append((door, body, answer))
    pair.hand_over()
    sampled, judged = len(pair.two.engine.prompts), len(pair.judges[1].asked)
    for door, body, answer in asked:
        if not any((door, body) == (other, again) for other, again, later in asked if later is not answer):
            again = pair.post(pair.two, door, body, retry=True).json()
            assert heard(again, body) == heard(answer, body)
    assert (len(pair.two.engine.prompts), len(pair.judges[1].asked)) == (sampled, judged)  # nothing was sampled anew
    assert pair.recorded(pair.two) == pair.recorded(pair.one)
    for _ in range(3):
        pair.say("fine", "fine too")
        pair.both(*agent.request())


def heard(answer: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """An answer but for the time it was made; of a service's, what it said."""
    if body["model"] == JUDGE and "messages" in body:
        return {"choices": answer["choices"], "usage": answer["usage"]}
    return {name: value for name, value in answer.items() if name not in ("created", "created_at", "completed_at")}


STREAMS = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}], "n": 2},
    "completions": {"prompt": "once", "n": 2, "stop": ["fine"]},
    "responses": {"input": "hi"},
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50},
}


@pytest.mark.parametrize("door", STREAMS)
def test_a_retried_stream_tells_the_recorded_answer_again(pair: Pair, door: str) -> None:
    pair.begin()
    pair.say("this is fine by me", "so it is fine here")
    body = {"model": MODEL, "stream": True} | STREAMS[door]
    first = pair.post(pair.one, door, body)
    pair.hand_over()
    again = pair.post(pair.two, door, body, retry=True)
    assert events(again) == events(first)
    assert pair.recorded(pair.two) == pair.recorded(pair.one)


def events(answer: httpx.Response) -> list[str]:
    """The events of a stream, without its times; those of a choice in their order."""
    told = re.sub(r'"(created|created_at|completed_at)":[0-9.]+', "", answer.text)
    return sorted(told.split("\n\n"), key=lambda event: event.partition('"index":1')[1])


@pytest.mark.parametrize("first", ["once upon", [40, 41]])
def test_a_prompt_goes_on_in_the_form_in_which_its_client_wrote_it(pair: Pair, first: Any) -> None:
    """Text behind text, ids behind ids; the same prompt in the other form is another one, here as there."""
    pair.begin()
    pair.ask("completions", {"model": MODEL, "prompt": first})
    pair.hand_over()
    [call] = [from_span(span) for span in pair.recorded(pair.one)]
    ids = call.prompt_ids + call.response_ids
    as_text = FastTokenizer(TOKENIZER).decode(ids)
    for prompt, continues in ((as_text + " more", isinstance(first, str)), ([*ids, 42], isinstance(first, list))):
        pair.both("completions", {"model": MODEL, "prompt": prompt})
        assert (newest(pair).attributes[semconv.PARENT] == call.call_id) == continues


def test_of_equal_samples_a_retry_hears_the_last_choice_by_choice(pair: Pair) -> None:
    """Samples of one body are separate; the choices of each end in any order."""
    pair.begin()
    body = chat([{"role": "user", "content": "hi"}], n=2)
    pair.say("a", "b")
    pair.ask("chat/completions", body)
    pair.say("c and more of it", "d")
    last = pair.ask("chat/completions", body)
    pair.hand_over()
    for span in pair.two.ledger.spans:  # as if the later choice had ended first
        span.end_ns -= span.number * 10**9
    again = pair.post(pair.two, "chat/completions", body, retry=True).json()
    assert (again["id"], again["choices"]) == (last["id"], last["choices"])


def test_a_call_of_which_something_is_missing_is_not_continued(pair: Pair) -> None:
    pair.begin()
    first = [{"role": "user", "content": "hi"}]
    second = went_on(first, pair.ask("chat/completions", chat(first)), {"role": "user", "content": "and?"})
    third = went_on(second, pair.ask("chat/completions", chat(second)), {"role": "user", "content": "so?"})
    pair.hand_over()
    pair.two.ledger.spans = [span for span in pair.two.ledger.spans if span.number]
    pair.post(pair.two, "chat/completions", chat(third))
    new = newest(pair)
    assert (new.number, new.attributes[semconv.PARENT]) == (2, None)


def test_a_call_stands_behind_its_parent_whatever_the_clocks_of_its_gateways_said(pair: Pair) -> None:
    pair.begin()
    first = [{"role": "user", "content": "hi"}]
    second = went_on(first, pair.ask("chat/completions", chat(first)), {"role": "user", "content": "and?"})
    third = went_on(second, pair.ask("chat/completions", chat(second)), {"role": "user", "content": "so?"})
    pair.hand_over()
    for span in pair.two.ledger.spans:
        span.end_ns -= span.number * 10**12
    pair.both("chat/completions", chat(third))
