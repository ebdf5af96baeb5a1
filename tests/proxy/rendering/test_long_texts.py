"""Long prompts: the ids are those of any other way, nobody else waits for them, what cannot fit is refused early."""

import gzip
import itertools
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from lightning_rl_proxy.errors import PromptTooLong
from lightning_rl_proxy.http.limits import RequestLimits
from lightning_rl_proxy.rendering.long_texts import LongTexts
from tests.proxy.conftest import TOKENIZER, Served
from tests.random_examples import examples

WHOLE = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
LONGEST = max(len(token) for token in WHOLE.get_vocab())  # of a vocabulary of bytes
WORDS = ["SELECT ", "  ", "\n\n", "schools", "<|im_end|>", "é", "🌲", "a", "1234", "\t", "<think>", " of the"]
DOORS: dict[str, tuple[str, Any]] = {
    "chat/completions": ("messages", lambda text: [{"role": "user", "content": text}]),
    "completions": ("prompt", lambda text: text),
    "responses": ("input", lambda text: text),
    "messages": ("messages", lambda text: [{"role": "user", "content": text}]),
}
PATHS = DOORS | {"messages/count_tokens": DOORS["messages"]}


NUMBERS = itertools.count()


def unknown() -> str:
    """A long text that nobody has tokenised yet."""
    return f"SELECT {next(NUMBERS)}; " * 2000


def ask(served: Served, path: str, text: str, attempt_id: str = "a1", *, packed: bool = False) -> httpx.Response:
    name, said = PATHS[path]
    most = "max_output_tokens" if path == "responses" else "max_tokens"
    body = json.dumps({"model": "policy", name: said(text), most: 8}).encode()
    url = f"{served.base_url(attempt_id=attempt_id)}/{path}"
    headers = {"authorization": f"Bearer {served.key(attempt_id=attempt_id)}"}
    headers |= {"content-encoding": "gzip"} if packed else {}
    return httpx.post(url, content=gzip.compress(body) if packed else body, headers=headers, timeout=30)


@settings(max_examples=examples(40))
@given(st.lists(st.sampled_from(WORDS) | st.text(max_size=6), min_size=1, max_size=12), st.integers(1, 600))
def test_the_ids_are_those_of_the_whole_text(pieces: list[str], times: int) -> None:
    text = "".join(pieces) * times
    whole = WHOLE.encode(text, add_special_tokens=False).ids
    texts = LongTexts(WHOLE)
    assert texts.encode(WHOLE, text) == whole
    texts.context = len(whole) + 1  # which it fits
    with texts.of_one_prompt():
        assert texts.encode(WHOLE, text) == whole


class Counting:
    """A tokenizer that counts the characters that it is given."""

    def __init__(self) -> None:
        self.characters = 0

    def encode_batch_fast(self, texts: list[str], **how: Any) -> Any:
        self.characters += sum(map(len, texts))
        return WHOLE.encode_batch_fast(texts, **how)


def test_what_cannot_fit_is_refused_before_or_soon_after_it_is_tokenised() -> None:
    texts, seen = LongTexts(WHOLE), Counting()
    texts.context = 1000
    with pytest.raises(PromptTooLong, match="maximum context length is 1000 tokens"):
        texts.encode(seen, "a" * (3 * 1000 * LONGEST + 1))  # type: ignore[arg-type]
    assert seen.characters == 0, "its bytes alone are too many"
    texts.context = 10_000
    with pytest.raises(PromptTooLong):
        texts.encode(seen, "é" * 150_000)  # type: ignore[arg-type]
    assert seen.characters < 100_000, "it was not counted to its end"


def test_the_messages_of_a_prompt_are_bounded_together() -> None:
    texts = LongTexts(WHOLE)
    texts.context = 1000
    with texts.of_one_prompt():
        for _ in range(2):
            texts.encode(WHOLE, "é" * 400)
        with pytest.raises(PromptTooLong):
            [texts.encode(WHOLE, "é" * 400) for _ in range(8)]
    texts.encode(WHOLE, "é" * 400)


@pytest.mark.parametrize("path", DOORS)
def test_a_prompt_that_cannot_fit_is_a_400_at_every_door(
    served: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.engine, "context", 2048)
    answer = ask(served, path, "é" * 9000)
    assert (answer.status_code, served.engine.prompts) == (400, [])
    assert "2048" in answer.json()["error"]["message"]
    counted = {"chat/completions": "code", "completions": "code", "responses": "code"}.get(path)
    if counted:
        assert answer.json()["error"][counted] == "context_length_exceeded"
    assert ask(served, path, "hello").status_code == 200


def test_what_is_too_long_is_counted_by_who_asks_how_long_it_is(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.engine, "context", 512)
    long = unknown() * 2
    around = []  # what the format writes around a text
    for words in (long, "a"):
        counted = ask(served, "messages/count_tokens", words)
        assert counted.status_code == 200, counted.text
        around.append(counted.json()["input_tokens"] - len(WHOLE.encode(words).ids))
    assert around[0] == around[1]
    answer = ask(served, "messages", long)
    assert answer.status_code == 400
    assert re.search(r"tokens > 512 maximum \(or more: ", answer.json()["error"]["message"])


@pytest.mark.parametrize("packed", [False, True])
def test_the_limit_of_a_body_follows_the_context(served: Served, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.engine, "context", 2048)
    most = RequestLimits().for_context(2048).body_bytes
    assert most == 2**20 + 64 * 2048
    answer = ask(served, "chat/completions", "a" * most, packed=packed)
    assert (answer.status_code, f"over {most} bytes" in answer.text) == (413, True)
    assert RequestLimits(body_bytes=1000).for_context(2048).body_bytes == 1000


@pytest.fixture
def held(served: Served, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Long texts take until the second event is set; the first says that one has begun."""
    begun, go_on = threading.Event(), threading.Event()
    whole = LongTexts.encode

    def encode(self: LongTexts, tokenizer: Any, text: str, **how: Any) -> list[int]:
        if len(text) > 10_000:
            begun.set()
            assert go_on.wait(20)
        return whole(self, tokenizer, text, **how)

    monkeypatch.setattr(LongTexts, "encode", encode)
    return begun, go_on


@pytest.mark.parametrize("path", DOORS)
def test_nobody_waits_while_a_long_prompt_is_tokenised(
    served: Served, held: tuple[threading.Event, threading.Event], path: str
) -> None:
    begun, go_on = held
    with ThreadPoolExecutor() as threads:
        long = threads.submit(ask, served, path, unknown())
        assert begun.wait(20)
        assert ask(served, path, "hello", "a2").status_code == 200
        assert not long.done()
        go_on.set()
        assert long.result(20).status_code == 200


def test_calls_of_one_attempt_find_their_places_in_order_of_arrival(
    served: Served, held: tuple[threading.Event, threading.Event]
) -> None:
    begun, go_on = held
    with ThreadPoolExecutor() as threads:
        long = threads.submit(ask, served, "chat/completions", unknown())
        assert begun.wait(20)
        short = threads.submit(ask, served, "chat/completions", "hello")
        served.eventually(lambda: sum(len(a.inflight) for a in served.gateway.attempts) == 2)
        assert served.engine.prompts == []
        go_on.set()
        assert (long.result(20).status_code, short.result(20).status_code) == (200, 200)
    assert [len(prompt) > 1000 for prompt in served.engine.prompts] == [True, False]


def test_an_attempt_that_ends_meanwhile_ends(served: Served, held: tuple[threading.Event, threading.Event]) -> None:
    begun, go_on = held
    with ThreadPoolExecutor() as threads:
        long = threads.submit(ask, served, "chat/completions", unknown())
        assert begun.wait(20)
        sealing = threads.submit(served.seal)
        go_on.set()
        assert long.result(20).status_code == 409
        sealing.result(20)
    assert served.engine.prompts == []
