"""How busy the gateway says its engines are: with calls, and with attempts that are about to call."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from lightning_rl_proxy.http import call_handler, open_attempts
from lightning_rl_proxy.recording.ledger import AttemptInfo
from tests.proxy.conftest import Served


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
