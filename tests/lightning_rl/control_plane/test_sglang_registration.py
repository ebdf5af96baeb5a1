"""A whole gateway in front of an SGLang server: probed when registered, recorded token by token, paused, resumed."""

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from lightning_rl.cli.serve import engine_request
from lightning_rl.control_plane.gateways.engine_registration import attacher
from lightning_rl.control_plane.launch import ServerNotStarted, launch
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Claim, Finish, RolloutRequest
from lightning_rl.store.errors import Conflict, Invalid
from lightning_rl_adapters.call import Call, calls_of
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from lightning_rl_proxy.routing.router import Router
from tests.lightning_rl.control_plane.test_process import TOKENIZER, policy_of
from tests.proxy.engines.sglang_stand_in import StandIn, log_softmax, logits
from tests.proxy.engines.vllm_stand_in import serving

QUESTION: Any = {"role": "user", "content": "How many users?"}


@pytest.fixture(scope="module")
def vocabulary() -> tuple[int, ...]:
    """Some words of the policy's tokenizer, and the end of a turn."""
    tokenizer = FastTokenizer(TOKENIZER)
    words = [tokenizer.encode(word)[0] for word in ("SELECT", "name", "id", "1", ",", "FROM")]
    return (*words, tokenizer.convert_tokens_to_ids("<|im_end|>"))


@contextlib.contextmanager
def behind_a_gateway(folder: Path, server: StandIn) -> Iterator[tuple[HttpStore, Claim]]:
    with serving(server.app) as url:
        engine = {"model": "policy", "kind": "sglang", "url": url, "policy_version": 3}
        with launch(folder, policy_of(engines=[engine]), admin_key="a", runner_key="r") as running:
            store = HttpStore(running.url, "a")
            store.enqueue([RolloutRequest(task=1, rollout_id="r1", mode="train")])
            (claim,) = store.claim("w")
            yield store, claim


def client(claim: Claim) -> openai.OpenAI:
    llm = claim.resources["main_llm"]
    return openai.OpenAI(base_url=llm["base_url"], api_key=llm["api_key"], max_retries=0)


def recorded(store: HttpStore, claim: Claim) -> list[Call]:
    """End the attempt: its calls."""
    store.finish("r1", claim.attempt.attempt_id, Finish(status="succeeded", reward=1.0))
    (trace,) = store.traces(["r1"])["r1"].attempts
    return sorted(calls_of(trace.spans), key=lambda call: call.number)


def say(sdk: openai.OpenAI, messages: list[Any], *, stream: bool) -> str:
    asked: dict[str, Any] = {"model": "policy", "messages": messages, "temperature": 0.7, "max_tokens": 20}
    if not stream:
        return sdk.chat.completions.create(**asked).choices[0].message.content or ""
    events = sdk.chat.completions.create(**asked, stream=True)
    return "".join(event.choices[0].delta.content or "" for event in events if event.choices)


def test_an_engine_that_an_update_left_out_takes_no_calls_and_is_not_told_the_version(tmp_path: Path) -> None:
    servers = [StandIn(), StandIn()]
    with serving(servers[0].app) as url, serving(servers[1].app) as outdated:
        engines = [{"model": "policy", "kind": "sglang", "url": each} for each in (url, outdated)]
        with launch(tmp_path, policy_of(engines=engines), admin_key="a", runner_key="r") as running:
            store = HttpStore(running.url, "a")
            store.resume("policy", 1, outdated=lambda: [outdated])
            assert [each["away"] is None for each in store.engines()] == [True, False]
    assert [server.weight_version for server in servers] == ["1", "default"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"incremental": True, "interval": 3},
        pytest.param({"raw": True}, marks=pytest.mark.long),
    ],
)
def test_what_is_recorded_is_what_the_model_computed(
    tmp_path: Path, vocabulary: tuple[int, ...], stream: bool, flags: dict[str, Any]
) -> None:
    server = StandIn(vocabulary=vocabulary, context=512, **flags)
    with behind_a_gateway(tmp_path, server) as (store, claim), client(claim) as sdk:
        messages = [QUESTION]
        for _ in range(3):
            messages += [{"role": "assistant", "content": say(sdk, messages, stream=stream)}, QUESTION]
        calls = recorded(store, claim)
    asked = [request for request in server.requests if request.body["rid"] != "probe"]
    heat = 1.0 if server.raw else 0.7
    for call, request in zip(calls, asked, strict=True):
        assert call.response_ids == request.ids
        prompt = request.body["input_ids"]
        contexts = [logits([*prompt, *request.ids[:i]], vocabulary) for i in range(len(request.ids))]
        expected = [
            log_softmax({t: value / heat for t, value in values.items()})[token]
            for values, token in zip(contexts, request.ids, strict=True)
        ]
        assert call.logprobs == pytest.approx(expected, abs=1e-6)
        assert call.logprob_kind == ("raw" if server.raw else "sampled")
        assert [(v.version, v.start, v.end) for v in call.versions] == [(3, 0, len(request.ids))]
    for one, two in itertools.pairwise(asked):
        assert two.body["input_ids"][: len(one.body["input_ids"])] == one.body["input_ids"]
        assert two.body["input_ids"][len(one.body["input_ids"]) :][: len(one.ids)] == one.ids


@pytest.mark.long
def test_a_pause_of_the_gateway_holds_sglang_and_the_rest_has_the_new_version(
    tmp_path: Path, vocabulary: tuple[int, ...]
) -> None:
    server = StandIn(vocabulary=vocabulary[:-1], context=20000)  # which never ends by itself
    with behind_a_gateway(tmp_path, server) as (store, claim), client(claim) as sdk:
        asked: dict[str, Any] = {"model": "policy", "messages": [QUESTION], "max_tokens": 3000, "stream": True}
        events = iter(sdk.chat.completions.create(**asked))
        next(events)
        store.pause(mode="keep")
        at = len(server.requests[-1].ids)
        assert [path for path, _ in server.orders] == ["/pause_generation"]
        store.resume(policy_version=4)
        reader = threading.Thread(target=lambda: list(events))
        reader.start()
        reader.join(60)
        (call,) = recorded(store, claim)
    assert (len(call.response_ids), call.finish_reason) == (3000, "length")
    assert 0 < at < 3000
    assert [(v.version, v.start, v.end) for v in call.versions] == [(3, 0, at), (4, at, 3000)]


def test_a_prompt_that_does_not_fit_is_told_as_clients_know_it(tmp_path: Path, vocabulary: tuple[int, ...]) -> None:
    server = StandIn(vocabulary=vocabulary, context=8)
    with behind_a_gateway(tmp_path, server) as (_, claim), client(claim) as sdk:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="maximum context length is 8 tokens") as refused:
                say(sdk, [QUESTION], stream=stream)
            assert refused.value.code == "context_length_exceeded"


@pytest.mark.long
def test_servers_are_registered_by_request_or_refused(tmp_path: Path) -> None:
    with serving(StandIn().app) as good, serving(StandIn(version="0.5.2").app) as old:
        with launch(tmp_path, policy_of(engines=[]), admin_key="a", runner_key="r") as running:
            store = HttpStore(running.url, "a")
            assert store.register_engine("policy", "sglang", good, 3)["kind"] == "sglang"
            assert store.state()["models"]["policy"]["policy_version"] == 3
            with pytest.raises(Invalid, match=r"SGLang 0\.5\.2; SGLang 0\.5\.23 is the oldest"):
                store.register_engine("policy", "sglang", old)
            with pytest.raises(Conflict, match="cannot be reached"):
                store.register_engine("policy", "sglang", "http://127.0.0.1:1")
        poor = {"model": "policy", "kind": "sglang", "url": old}
        with (
            pytest.raises(ServerNotStarted, match=r"SGLang 0\.5\.2"),
            launch(tmp_path, policy_of(engines=[poor]), admin_key="a", runner_key="r"),
        ):
            pass


def test_what_a_server_does_without_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Renderer:
        stop_token_ids = (0,)

    with serving(StandIn(seeded=False, incremental=True).app) as url, caplog.at_level(logging.WARNING):
        asyncio.run(attacher(Router("m"), Renderer())(engine_request(f"sglang={url}", "m")))  # type: ignore[arg-type]
    [said] = caplog.messages
    assert f"engine {url} of model m does without seeds (no --enable-deterministic-inference)" in said
