"""Parking: a pause makes calls wait, never fail; what is in flight ends in time or freezes, and goes on afterwards."""

import asyncio
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import VersionRange
from lightning_rl_proxy.engines.base import EngineUnavailable
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from tests.proxy.conftest import ScriptedEngine, Served, calls_in
from tests.proxy.test_streaming import permit

USER: Any = {"role": "user", "content": "how many?"}


def client(served: Served, **more: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.base_url(), api_key=served.key(), **more)


def ask(served: Served) -> str | None:
    answer = client(served, max_retries=0).chat.completions.create(model="policy", messages=[USER])
    return answer.choices[0].message.content


def waiting(served: Served) -> None:
    served.eventually(lambda: any(a.inflight for a in served.gateway.attempts))


def raw(served: Served, **more: Any) -> httpx.Response:
    key = {"authorization": f"Bearer {served.key()}"}
    body = {"model": "policy", "messages": [USER], **more}
    return httpx.post(served.url + "/v1/chat/completions", json=body, headers=key, timeout=20)


def test_a_draining_pause_waits_until_what_is_in_flight_has_ended(served: Served) -> None:
    served.engine.steps = asyncio.Semaphore(0)
    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(ask, served)
        served.eventually(lambda: len(served.engine.prompts) == 1)
        pause = pool.submit(served.run, lambda: served.gateway.pause("policy", 20))
        served.eventually(lambda: served.gateway.router.is_paused("policy"))
        assert not pause.done()
        permit(served, 10)
        pause.result(20)
        assert call.result(20) == "ok"
    assert not served.engine.frozen


def test_the_state_says_for_how_long_a_model_is_paused(served: Served) -> None:
    def told() -> Any:
        return served.gateway.state()["models"]["policy"]["paused_seconds"]

    assert told() is None
    served.run(lambda: served.gateway.pause("policy"))
    first = told()
    served.run(lambda: served.gateway.pause("policy"))  # the same pause
    assert 0 <= first < told()
    served.run(lambda: served.gateway.resume("policy"))
    assert told() is None


def test_the_state_says_how_many_calls_are_parked(served: Served) -> None:
    def parked() -> Any:
        return served.gateway.state()["models"]["policy"]["parked"]

    served.run(lambda: served.gateway.pause("policy"))
    assert parked() == 0
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(ask, served) for _ in range(2)]
        served.eventually(lambda: parked() == 2)
        served.run(lambda: served.gateway.resume("policy"))
        assert [call.result(20) for call in calls] == ["ok", "ok"]
    assert parked() == 0


def test_a_record_says_when_the_engine_was_asked_and_when_it_had_ended(served: Served) -> None:
    """A call that waited for the end of a pause waited, and no engine was slow."""
    served.run(lambda: served.gateway.pause("policy"))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(ask, served)
        served.eventually(lambda: served.gateway.state()["models"]["policy"]["parked"] == 1)
        time.sleep(0.05)
        served.run(lambda: served.gateway.resume("policy"))
        call.result(20)
    served.eventually(lambda: bool(calls_in(served.ledger.spans)))
    [span] = calls_in(served.ledger.spans)
    asked, ended = span.attributes[semconv.ENGINE_US]
    assert 50_000 <= asked <= ended <= (span.end_ns - span.start_ns) / 1000 + 1_000


@pytest.mark.parametrize("drain_seconds", [0, 0.05])
def test_what_has_not_ended_by_the_deadline_freezes_and_goes_on(served: Served, drain_seconds: float) -> None:
    served.engine.steps = asyncio.Semaphore(0)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(ask, served)
        served.eventually(lambda: len(served.engine.prompts) == 1)
        served.run(lambda: served.gateway.pause("policy", drain_seconds))
        assert served.engine.frozen
        served.run(lambda: served.gateway.resume("policy", 8))
        assert not served.engine.frozen
        permit(served, 10)
        assert call.result(20) == "ok"


def test_an_idle_engine_is_not_frozen(served: Served) -> None:
    served.run(lambda: served.gateway.pause("policy"))
    assert not served.engine.frozen


def test_a_resume_ends_a_drain_without_freezing_anything(served: Served) -> None:
    served.engine.steps = asyncio.Semaphore(0)
    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(ask, served)
        served.eventually(lambda: len(served.engine.prompts) == 1)
        pause = pool.submit(served.run, lambda: served.gateway.pause("policy", 20))
        served.eventually(lambda: served.gateway.router.is_paused("policy"))
        served.run(lambda: served.gateway.resume("policy", None))
        permit(served, 10)
        pause.result(20)
        assert call.result(20) == "ok"
    assert not served.engine.frozen


def test_only_the_paused_model_waits(served: Served) -> None:
    served.run(lambda: served.gateway.pause("policy"))
    with pytest.raises(KeyError, match="no engine serves model 'other'"):
        served.run(lambda: served.gateway.pause("other"))
    assert client(served).models.list().data[0].id == "policy"


@pytest.mark.scripted("it answers, although it was not told to go on")
def test_an_engine_that_does_not_go_on_is_an_alarm_and_holds_up_no_other_call(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        raise EngineUnavailable("it is gone")

    served.engine.steps = asyncio.Semaphore(0)
    monkeypatch.setattr(served.engine, "resume", fail)
    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.ERROR):
        call = pool.submit(ask, served)
        served.eventually(lambda: len(served.engine.prompts) == 1)
        served.run(lambda: served.gateway.pause("policy"))
        served.run(lambda: served.gateway.resume("policy", None))
        permit(served, 10)
        assert call.result(20) == "ok"
    assert "did not go on after the pause: it is gone" in caplog.text


def test_a_parked_stream_gets_pings(served: Served) -> None:
    served.gateway.patience.ping_seconds = 0.02
    served.run(lambda: served.gateway.pause("policy"))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(raw, served, stream=True)
        waiting(served)
        time.sleep(0.1)
        served.run(lambda: served.gateway.resume("policy", None))
        answer = call.result(20).text
    assert answer.startswith(": ping\n\n: ping\n\n")
    assert answer.endswith("data: [DONE]\n\n")


def test_a_parked_answer_begins_with_white_space_that_no_client_minds(served: Served) -> None:
    served.gateway.patience.ping_seconds = served.gateway.patience.parked_seconds = 0.02
    served.run(lambda: served.gateway.pause("policy"))
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(raw, served), pool.submit(ask, served)]
        served.eventually(lambda: sum(len(e) for a in served.gateway.attempts
                                      for e in a.inflight.values()) == 2)  # fmt: skip
        time.sleep(0.1)
        served.run(lambda: served.gateway.resume("policy", None))
        text = calls[0].result(20).text
        assert calls[1].result(20) == "ok"
    assert text.startswith("  ")
    assert json.loads(text)["choices"][0]["message"]["content"] == "ok"


def test_a_short_pause_adds_nothing_to_an_answer(served: Served) -> None:
    served.run(lambda: served.gateway.pause("policy"))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(raw, served)
        waiting(served)
        served.run(lambda: served.gateway.resume("policy", None))
        assert call.result(20).content.startswith(b"{")


def test_a_failure_behind_white_space_is_one_that_the_sdk_tries_again(served: Served) -> None:
    served.gateway.patience.ping_seconds = served.gateway.patience.parked_seconds = 0.02
    served.run(lambda: served.gateway.pause("policy"))
    served.engine.fail = 1
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(lambda: client(served).chat.completions.create(model="policy", messages=[USER]))
        waiting(served)
        time.sleep(0.1)
        served.run(lambda: served.gateway.resume("policy", None))
        assert call.result(30).choices[0].message.content == "ok"
    served.seal()
    assert len(served.ledger.calls()) == 1


def test_tokens_of_a_generation_that_outlives_an_update_have_their_versions(served: Served) -> None:
    """What a stop string cuts short has no word of the engine on its versions: the gateway's own notes count."""
    served.engine.steps = asyncio.Semaphore(2)
    served.engine.script.append("one two three STOP four")
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(raw, served, stop="STOP")
        served.eventually(lambda: served.gateway.router.received["policy"] == 2)
        served.run(lambda: served.gateway.pause("policy"))
        served.run(lambda: served.gateway.resume("policy", 8))
        permit(served, 100)
        call.result(20)
    served.seal()
    [recorded] = served.ledger.calls()
    assert recorded.versions == [VersionRange(7, 0, 2), VersionRange(8, 2, len(recorded.response_ids))]


def test_a_pause_freezes_every_engine_and_a_resume_tells_the_version_to_each(
    served: Served, tokenizer: FastTokenizer
) -> None:
    other = ScriptedEngine(tokenizer)
    served.gateway.router.register(other)
    for engine in (served.engine, other):
        engine.steps = asyncio.Semaphore(0)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(ask, served) for _ in range(2)]
        served.eventually(lambda: len(served.engine.prompts) == len(other.prompts) == 1)
        served.run(lambda: served.gateway.pause("policy"))
        assert served.engine.frozen
        assert other.frozen
        served.run(lambda: served.gateway.resume("policy", 8))
        assert not served.engine.frozen
        assert not other.frozen
        assert [engine["policy_version"] for engine in served.gateway.state()["engines"].values()] == [8, 8]
        for engine in (served.engine, other):
            served.run(lambda engine=engine: release(engine))
        assert [call.result(20) for call in calls] == ["ok", "ok"]


async def release(engine: ScriptedEngine) -> None:
    assert engine.steps is not None
    for _ in range(20):
        engine.steps.release()
