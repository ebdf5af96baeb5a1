"""Long prompts are tokenised in threads; what came before makes none long."""

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
from lightning_rl_proxy.forest.incremental_decode import DecodedBody
from lightning_rl_proxy.gateway import Gateway
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
