"""The gateway over the real embedded engine: streams, stop strings, and generations that outlive a weight update."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from lightning_rl import tutorial
from lightning_rl.inference.embedded import EmbeddedPolicy
from lightning_rl.inference.load import ModelSource
from lightning_rl_proxy.engines.vllm import TokenEngine
from lightning_rl_proxy.gateway import Gateway
from lightning_rl_proxy.rendering.load import load_renderer
from lightning_rl_proxy.routing.router import Router
from tests.proxy.conftest import SECRET, MemoryLedger, Served, listening

USER: Any = {"role": "user", "content": "cars: size id\nHow many cars are there?"}


@pytest.fixture(scope="module")
def policy() -> Iterator[EmbeddedPolicy]:
    policy = EmbeddedPolicy(ModelSource(device="cpu"), threads=1)
    policy.start()
    yield policy
    policy.close()


@pytest.fixture
def served(policy: EmbeddedPolicy, tmp_path: Path) -> Iterator[Served]:
    renderer = load_renderer(tutorial.checkpoint(), "auto", policy.name)
    router, ledger = Router(policy.name), MemoryLedger()
    ledger.sampling = {}
    engine = TokenEngine(
        model=policy.name, kind="embedded", url=policy.url, stop_token_ids=renderer.stop_token_ids, policy_version=0
    )
    router.register(engine)
    gateway = Gateway(ledger=ledger, secret=SECRET, journal=tmp_path / "journal", renderer=renderer, router=router)
    with listening(gateway) as (url, loop):
        yield Served(url, gateway, ledger, engine, loop)  # type: ignore[arg-type]


def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.base_url(), api_key=served.key(), max_retries=0)


def test_a_stream_says_what_a_whole_answer_says(served: Served) -> None:
    sdk = client(served)
    whole = sdk.chat.completions.create(model="m", messages=[USER], temperature=0).choices[0].message.content
    stream = sdk.chat.completions.create(model="m", messages=[USER], temperature=0, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == whole
    assert len([piece for piece in pieces if piece]) > 1
    served.seal()
    one, two = served.ledger.calls()
    assert one.response_ids == two.response_ids
    assert one.logprobs == pytest.approx(two.logprobs, abs=1e-5)
    assert one.versions == two.versions
    assert served.gateway.state()["models"]["checkpoint"]["tokens_received"] == 2 * len(one.response_ids)


def test_every_setting_that_the_gateway_takes_for_it_is_taken(served: Served) -> None:
    neutral = {"min_p": 0.0, "repetition_penalty": 1.0}
    own = {"top_k": 5, "stop_token_ids": [7], "priority": 2, **neutral}
    asked: dict[str, Any] = {"top_p": 0.9, "seed": 1, "max_tokens": 3, "stop": ["FROM"], "logprobs": True}
    answer = client(served).chat.completions.create(model="m", messages=[USER], extra_body=own, **asked)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_a_stop_string_ends_the_engines_work(served: Served, policy: EmbeddedPolicy) -> None:
    answer = client(served).chat.completions.create(model="m", messages=[USER], temperature=0, stop=["FROM"])
    assert answer.choices[0].message.content is not None
    assert "SELECT" in answer.choices[0].message.content
    assert "FROM" not in answer.choices[0].message.content
    served.eventually(lambda: policy.engine.in_flight == 0)


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_know(served: Served) -> None:
    long = {"role": "user", "content": "cars " * 3000}
    with pytest.raises(openai.BadRequestError) as refused:
        client(served).chat.completions.create(model="m", messages=[long])  # type: ignore[list-item]
    assert refused.value.code == "context_length_exceeded"
    body = {"model": "m", "max_tokens": 5, "messages": [long]}
    said = httpx.post(served.url + "/v1/messages", json=body, headers={"x-api-key": served.key()}, timeout=20)
    assert said.status_code == 400
    assert said.json()["error"]["message"].startswith("prompt is too long: ")


def test_a_generation_that_outlives_an_update_goes_on_with_the_new_weights(
    served: Served, policy: EmbeddedPolicy
) -> None:
    key = {"authorization": f"Bearer {served.key()}"}
    # So hot, all tokens are equally likely: the end token comes late, and the update falls into the generation.
    body = {"model": "m", "messages": [USER], "temperature": 100, "max_tokens": 200, "stream": True, "seed": 3}
    update = threading.Thread(target=lambda: served.run(lambda: served.gateway.pause(None)))
    with httpx.stream("POST", served.url + "/v1/chat/completions", json=body, headers=key, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        update.start()
        update.join(60)
        policy.engine.update_weights(policy.model, policy.engine.version() + 1)
        version = policy.engine.version()
        served.run(lambda: served.gateway.resume(None, version))
        rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert rest[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    served.seal()
    [call] = served.ledger.calls()
    assert call.delivered
    versions = call.policy_versions()
    assert versions == sorted(versions)  # type: ignore[type-var]
    assert set(versions) == {version - 1, version}
