"""How busy the gateway says its engines are: with calls, and with attempts that are about to call."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from lightning_rl_proxy.gateway import Gateway
from lightning_rl_proxy.http import call_handler, open_attempts
from lightning_rl_proxy.recording.ledger import AttemptInfo
from lightning_rl_proxy.rendering.load import load_renderer
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from lightning_rl_proxy.routing.router import Router
from tests.proxy.conftest import MODEL, SECRET, TOKENIZER, MemoryLedger, ScriptedEngine, Served, listening


def opened(served: Served, attempt_id: str) -> None:
    info = AttemptInfo(
        rollout_id="r1", attempt_id=attempt_id, mode="train", open=True, sampling={"temperature": 1.0}, seed_key="r1"
    )

    async def work() -> None:
        served.gateway.open(info)

    served.run(work)


def say(served: Served, attempt_id: str, **more: Any) -> None:
    chat: Any = [{"role": "user", "content": "how many?"}]
    where: Any = {"attempt_id": attempt_id}
    with openai.OpenAI(base_url=served.base_url(**where), api_key=served.key(**where), max_retries=0) as client:
        client.chat.completions.create(model="policy", messages=chat, extra_body=more)


def test_an_attempt_that_was_handed_out_is_expected_to_call_until_it_has_or_is_over(served: Served) -> None:
    capacity_freed: list[int] = []
    served.gateway.when_capacity_freed(lambda: capacity_freed.append(served.gateway.load().starting["policy"]))
    opened(served, "a1")
    opened(served, "a2")
    assert served.gateway.load().starting["policy"] == 2
    say(served, "a1")
    say(served, "a1")
    assert served.gateway.load().starting["policy"] == 1
    served.seal(attempt_id="a2")
    now = served.gateway.load()
    assert (now.policy, now.starting["policy"], now.open_attempts, now.models["policy"].calls) == ("policy", 0, 1, 0)
    assert 1 in capacity_freed
    assert capacity_freed[-1] == 0


def test_a_first_call_counts_as_expected_while_its_prompt_is_made(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, goes_on = threading.Event(), threading.Event()
    choose = call_handler._renderer_for

    def slow(*args: Any) -> Any:
        reading.set()
        assert goes_on.wait(20)
        return choose(*args)

    asked: list[int] = []
    generate = served.gateway.router.generate

    async def noting(*args: Any, **kwargs: Any) -> None:
        asked.append(served.gateway.load().starting["policy"])
        await generate(*args, **kwargs)

    monkeypatch.setattr(served.gateway.router, "generate", noting)
    monkeypatch.setattr(call_handler, "_renderer_for", slow)
    opened(served, "a1")
    with ThreadPoolExecutor(1) as pool:
        said = pool.submit(say, served, "a1", chat_template_kwargs={"enable_thinking": False})
        assert reading.wait(20)
        assert served.gateway.load().starting["policy"] == 1
        goes_on.set()
        said.result()
    assert asked == [0]  # an engine that is asked has the call among its own
    assert served.gateway.load().starting["policy"] == 0


def test_an_attempt_that_does_not_call_for_long_is_busy_with_something_else(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(served, "a1")
    assert served.gateway.load().starting["policy"] == 1
    monkeypatch.setattr(open_attempts, "_STARTING_SECONDS", -1.0)
    assert served.gateway.load().starting["policy"] == 0
    assert served.gateway.load().open_attempts == 1


@pytest.mark.parametrize("threads", [1, 2])
def test_long_prompts_are_tokenised_in_so_many_threads(
    threads: int, tokenizer: FastTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = load_renderer(TOKENIZER, "qwen3", MODEL)
    seen, render = [], renderer.render

    def watched(*asked: Any) -> list[int]:
        seen.append(threading.current_thread().name)
        time.sleep(0.02)
        return render(*asked)

    monkeypatch.setattr(renderer, "render", watched)
    ledger, engine, router = MemoryLedger(), ScriptedEngine(tokenizer), Router(MODEL)
    router.register(engine)
    parts: dict[str, Any] = {"ledger": ledger, "router": router, "renderer": renderer, "journal": tmp_path / "journal"}
    gateway = Gateway(secret=SECRET, tokenizing_threads=threads, **parts)
    with listening(gateway) as (url, loop), ThreadPoolExecutor(6) as pool:
        served = Served(url, gateway, ledger, engine, loop)
        chat = [{"role": "user", "content": "how many? " * 1000}]
        list(pool.map(lambda i: say(served, f"a{i}", messages=chat), range(6)))
    assert len(seen) == 6
    assert len(set(seen)) == threads
