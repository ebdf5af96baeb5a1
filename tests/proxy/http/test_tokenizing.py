"""Long prompts are tokenised in threads; what came before makes none long."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from lightning_rl_proxy.dialects import chat_completions, completions
from lightning_rl_proxy.dialects.base import Request
from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.forest.incremental_decode import DecodedBody
from lightning_rl_proxy.gateway import Gateway
from lightning_rl_proxy.http import tokenizing as module
from lightning_rl_proxy.http.tokenizing import Tokenizing
from lightning_rl_proxy.rendering.base import Renderer
from lightning_rl_proxy.rendering.chat_templates import TemplateRenderer
from lightning_rl_proxy.rendering.load import load_renderer
from lightning_rl_proxy.rendering.renderers import LibraryRenderer
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from lightning_rl_proxy.routing.router import Router
from tests.proxy.conftest import MODEL, SECRET, TOKENIZER, MemoryLedger, ScriptedEngine, Served, listening
from tests.proxy.rendering.test_chat_templates import CHATML, HERMES, NO_SYSTEM

# The tools stand in the user's turn, with what is said there.
TOGETHER = """{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if loop.first and tools %}{{- tools | tojson + '\\n' }}{% endif %}{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
LARGE = "which it does " * 1000


def tools(description: str = LARGE) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {}}
    return [{"type": "function", "function": {"name": "run", "description": description, "parameters": parameters}}]


def renderer_of(template: str | None) -> Renderer:
    if template is None:
        return load_renderer(TOKENIZER, "qwen3", MODEL)
    return TemplateRenderer(TOKENIZER, FastTokenizer(TOKENIZER, "text"), {"default": template}, model=MODEL)


@pytest.mark.parametrize(
    ("template", "apart"), [(None, True), (HERMES, True), (CHATML, True), (NO_SYSTEM, False), (TOGETHER, False)],
    ids=["qwen3", "hermes", "no tools", "no special tokens", "together"],
)  # fmt: skip
def test_what_came_before_is_not_new_where_a_format_writes_each_message_apart(
    template: str | None, apart: bool
) -> None:
    tokenizing = Tokenizing(renderer_of(template), lambda: None, 1)

    def is_long(*said: str, shown: list[dict[str, Any]] | None = None) -> bool:
        roles = ["user", "assistant"] * len(said)
        messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
        body = msgspec.json.encode({"model": MODEL, "messages": messages} | ({"tools": shown} if shown else {}))
        request = chat_completions.parse(msgspec.json.decode(body))
        found = tokenizing.is_long(request, DecodedBody(body, msgspec.json.decode(body)))
        if found:
            tokenizing.remember(request)
        return found

    assert not is_long("how many?", shown=tools("small"))
    assert is_long("how many?", shown=tools())
    assert is_long("and how many?", shown=tools()) is not apart
    assert is_long("and how many?", shown=tools(LARGE + "."))
    assert is_long(LARGE)
    assert is_long(LARGE, "3", "and how many?") is not apart
    assert is_long(LARGE, "3", LARGE + ".")
    first, second = LARGE[:5000], LARGE[1:5001]
    assert is_long(LARGE, "3", first) is not apart
    assert is_long(LARGE, "3", first, "4", second) is not apart


def asked(*said: Any, read: int = 0, **fields: Any) -> tuple[Request, DecodedBody]:
    """A request of messages, of which the first `read` were in an earlier one."""
    messages = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, said, strict=False)]
    given = {"model": MODEL, "messages": messages, **fields}
    request = msgspec.structs.replace(chat_completions.parse(given), known=read)
    return request, DecodedBody(msgspec.json.encode(given), given, messages[:read])


def test_of_messages_that_were_read_before_those_that_are_new_count() -> None:
    tokenizing = Tokenizing(renderer_of(None), lambda: None, 1)
    for long, new in ((False, "short"), (True, LARGE), (True, [{"type": "text", "text": LARGE}])):
        assert tokenizing.is_long(*asked(LARGE, "3", new, read=2)) is long


@pytest.mark.parametrize("template", [None, NO_SYSTEM], ids=["apart", "together"])
def test_where_nothing_is_known_the_whole_body_counts(template: str | None) -> None:
    tokenizing = Tokenizing(renderer_of(template), lambda: None, 1)
    for _ in range(2):
        assert tokenizing.is_long(*asked("how many?", user="me" * 5000))


def test_where_the_format_refuses_the_question_itself_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = renderer_of(None)

    def refuse(*_: Any) -> list[int]:
        raise GatewayError(400, "no")

    monkeypatch.setattr(renderer, "render", refuse)
    tokenizing = Tokenizing(renderer, lambda: None, 1)
    tokenizing.remember(asked(LARGE)[0])
    assert tokenizing.is_long(*asked(LARGE))


def test_what_was_asked_least_lately_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KNOWN", 3)  # two messages, and what stands before both: nothing
    tokenizing = Tokenizing(renderer_of(None), lambda: None, 1)
    first, second, third = (asked(LARGE + end) for end in "abc")
    tokenizing.remember(first[0])
    tokenizing.remember(second[0])
    assert not tokenizing.is_long(*first)
    tokenizing.remember(third[0])
    assert [tokenizing.is_long(*one) for one in (first, second, third)] == [False, True, False]


def test_where_parts_are_not_kept_or_images_are_shown_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    seeing, forgetful = renderer_of(HERMES), renderer_of(HERMES)
    monkeypatch.setattr(seeing, "vision", object())
    monkeypatch.setattr(forgetful.tokenizer._texts, "_cuts", None)
    for renderer in (seeing, forgetful):
        tokenizing = Tokenizing(renderer, lambda: None, 1)
        tokenizing.remember(asked(LARGE)[0])
        assert tokenizing.is_long(*asked(LARGE))


def test_a_prompt_is_bounded_by_the_context_of_now_and_a_short_one_needs_no_thread() -> None:
    contexts = iter([None, 7])
    tokenizing = Tokenizing(renderer_of(None), lambda: next(contexts), 1)

    async def bounds() -> list[tuple[int | None, bool]]:
        def seen() -> tuple[int | None, bool]:
            in_thread = threading.current_thread() is not threading.main_thread()
            return tokenizing.renderer.tokenizer.long_texts.context, in_thread

        return [await tokenizing.of_body(seen, size) for size in (9000, 8192, 9000)]

    assert asyncio.run(bounds()) == [(None, True), (None, False), (7, True)]


def test_whoever_is_cancelled_waits_until_its_prompt_is_tokenised() -> None:
    tokenizing = Tokenizing(renderer_of(None), lambda: None, 1)
    begun, go, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go.wait()
        done.set()

    async def cancelled() -> bool:
        task = asyncio.ensure_future(tokenizing.in_thread(work))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        await asyncio.sleep(0)
        waits = not task.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return waits and done.is_set()

    assert asyncio.run(cancelled())


def test_a_long_prompt_that_its_client_wrote_itself_is_long_whatever_came_before() -> None:
    tokenizing = Tokenizing(load_renderer(TOKENIZER, "qwen3", MODEL), lambda: None, 1)
    for _ in range(2):
        for prompt, long in (("how many?", False), (LARGE, True)):
            fields = {"model": MODEL, "prompt": prompt}
            request = completions.parse(fields)
            assert tokenizing.is_long(request, DecodedBody(msgspec.json.encode(fields), fields)) is long
        messages = [{"role": "user", "content": "how many?"}]
        tokenizing.remember(chat_completions.parse({"model": MODEL, "messages": messages}))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[LibraryRenderer, list[str]]:
    """A renderer, and the names of the threads in which it rendered."""
    renderer = load_renderer(TOKENIZER, "qwen3", MODEL)
    seen, render = [], renderer.render

    def watch(*asked: Any) -> list[int]:
        seen.append(threading.current_thread().name)
        time.sleep(0.02)
        return render(*asked)

    monkeypatch.setattr(renderer, "render", watch)
    return renderer, seen


@pytest.fixture
def served(
    request: pytest.FixtureRequest, watched: tuple[LibraryRenderer, list[str]], tokenizer: FastTokenizer, tmp_path: Path
) -> Iterator[Served]:
    """A gateway with as many threads as the parameter says."""
    ledger, engine, router = MemoryLedger(), ScriptedEngine(tokenizer), Router(MODEL)
    router.register(engine)
    gateway = Gateway(
        ledger=ledger, secret=SECRET, journal=tmp_path / "journal", renderer=watched[0], router=router,
        tokenizing_threads=getattr(request, "param", 1),
    )  # fmt: skip
    with listening(gateway) as (url, loop):
        yield Served(url, gateway, ledger, engine, loop)


def say(served: Served, attempt_id: str, content: str, **more: Any) -> None:
    where: Any = {"attempt_id": attempt_id}
    with openai.OpenAI(base_url=served.base_url(**where), api_key=served.key(**where), max_retries=0) as client:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}], **more)


@pytest.mark.parametrize("served", [1, 2], indirect=True)
def test_long_prompts_are_tokenised_in_so_many_threads(
    served: Served, watched: tuple[LibraryRenderer, list[str]], request: pytest.FixtureRequest
) -> None:
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda i: say(served, f"a{i}", f"how many {i}? " * 1000), range(6)))
    in_threads = [name for name in watched[1] if name.startswith("tokenizing")]
    assert len(in_threads) == 6
    assert len(set(in_threads)) == request.node.callspec.params["served"]


def test_an_attempt_with_tools_that_others_had_is_placed_at_once(
    served: Served, watched: tuple[LibraryRenderer, list[str]]
) -> None:
    for number in range(3):
        say(served, f"a{number}", f"how many {number}?", tools=tools())
    assert [name for name in watched[1] if name.startswith("tokenizing")] == ["tokenizing_0"]
