"""Chat backends as the control plane knows them: registered once, keys forgotten, a server without a tokenizer."""

import asyncio
from functools import partial
from typing import ClassVar

import msgspec
import openai
import pytest

from lightning_rl.algorithms.base import Endpoint
from lightning_rl.control_plane.gateways.engine_registration import attacher
from lightning_rl.control_plane.gateways.engines import EngineRequest
from lightning_rl.control_plane.launch import ServerNotStarted, launch
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Finish, RolloutRequest
from lightning_rl.store.errors import Conflict, Invalid
from lightning_rl_adapters.call import Call, to_span
from lightning_rl_proxy.engines.chat_backend import LitellmBackend, OpenAIBackend
from lightning_rl_proxy.routing.router import Router
from tests.proxy.engines.service import running

KEY = "a-key-that-nobody-may-see"
OPENAI = {"model": "helper", "kind": "openai", "url": "https://example.com/v1", "api_key": KEY, "remote_model": "gpt"}


def test_a_key_is_handed_on_and_never_shown(served) -> None:
    status, one = served.call("POST", "/api/v1/engines", OPENAI)
    assert status == 201
    assert served.attached[0].api_key == KEY
    assert served.call("POST", "/api/v1/engines", OPENAI | {"api_key": "another"}) == (201, one)
    listed = served.call("GET", "/api/v1/engines")
    assert listed == (200, {"engines": [one]})
    expected = {"model": "helper", "kind": "openai", "url": "https://example.com/v1", "policy_version": 0}
    assert one == expected | {"engine_id": one["engine_id"], "away": None, "in_flight": 0, "adapter": False}
    assert KEY not in repr(served.attached[0])


def test_the_newest_key_of_a_service_holds(served) -> None:
    for key in (KEY, "another", None):
        served.call("POST", "/api/v1/engines", OPENAI | {"api_key": key})
    assert [request.api_key for request in served.attached] == [KEY, "another"]
    assert served.gateway.asked[-1] == ("detach", "helper 0")
    assert len(served.call("GET", "/api/v1/engines")[1]["engines"]) == 1


def test_another_remote_model_under_the_same_name_is_a_conflict(served) -> None:
    served.call("POST", "/api/v1/engines", OPENAI)
    status, answer = served.call("POST", "/api/v1/engines", OPENAI | {"remote_model": "gpt-2"})
    assert status == 409
    assert "registered as 'gpt'" in answer["error"]["message"]
    assert KEY not in answer["error"]["message"]


def test_litellm_needs_no_url(served) -> None:
    status, answer = served.call("POST", "/api/v1/engines", {"model": "anthropic/claude", "kind": "litellm"})
    assert (status, answer["url"]) == (201, None)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"url": None}, "needs its url"),
        ({"url": "example.com"}, "url"),
        ({"policy_version": 3}, "policy_version"),
        ({"kind": "vllm"}, "api_key and remote_model"),
        ({"kind": "vllm", "api_key": None}, "api_key and remote_model"),
    ],
)
def test_a_registration_that_means_nothing_is_400_and_named(served, changes, named) -> None:
    status, answer = served.call("POST", "/api/v1/engines", OPENAI | changes)
    assert status == 400
    assert named in answer["error"]["message"]
    assert KEY not in answer["error"]["message"]
    assert served.attached == []


def request(**changes) -> EngineRequest:
    return msgspec.convert(OPENAI | changes, EngineRequest)


def test_a_registration_makes_the_backend_of_its_kind(monkeypatch) -> None:
    router = Router("policy")
    made = []
    monkeypatch.setattr(router, "register_backend", made.append)
    attach = attacher(router, None)
    asyncio.run(attach(request()))
    asyncio.run(attach(request(kind="litellm", url=None, remote_model="anthropic/claude")))
    asyncio.run(attach(request(kind="litellm", url=None, remote_model=None)))
    first, second, third = made
    assert isinstance(first, OpenAIBackend)
    assert (first.model, first.url, first.remote_model) == ("helper", "https://example.com/v1", "gpt")
    assert isinstance(second, LitellmBackend)
    assert (second.model, second.litellm_model, third.litellm_model) == ("helper", "anthropic/claude", "helper")


def test_a_server_without_a_tokenizer_refuses_token_engines() -> None:
    with pytest.raises(Invalid, match="started without a tokenizer"):
        asyncio.run(attacher(Router("policy"), None)(EngineRequest(model="m", kind="vllm", url="http://127.0.0.1:1")))


def test_without_litellm_registering_it_names_the_extra(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Invalid, match=r"lightning-rl\[litellm\]"):
        asyncio.run(attacher(Router("policy"), None)(request(kind="litellm")))


def test_a_name_of_the_other_kind_is_a_conflict() -> None:
    class Renderer:
        stop_token_ids: ClassVar = [0]

    attach = attacher(Router("policy"), Renderer())
    asyncio.run(attach(request()))
    with pytest.raises(Conflict, match="'helper' is a chat backend's already"):
        asyncio.run(attach(EngineRequest(model="helper", kind="embedded", url="http://127.0.0.1:1")))


def test_triplets_and_rows_say_what_is_not_exact(served) -> None:
    runner, admin = served.client("runner"), served.client()
    admin.enqueue([RolloutRequest(task=1, rollout_id="r1")])
    (claim,) = runner.claim("w")
    attempt_id = claim.attempt.attempt_id
    call = Call(
        call_id="c0", rollout_id="r1", attempt_id=attempt_id, number=0, model="helper", prompt_ids=[], response_ids=[],
        logprobs=None, versions=[], temperature=1.0, finish_reason="stop", exact=False, trainable=False,
    )  # fmt: skip
    served.gateway.on_their_way = [to_span(call)]
    runner.finish("r1", attempt_id, Finish(status="succeeded", reward=1.0))
    path = f"/api/v1/rollouts/r1/attempts/{attempt_id}"
    [row] = served.call("GET", f"{path}/rows")[1]["rows"]
    assert (row["exact"], row["excluded"], row["token_ids"]) == (False, "inexact", [])
    [triplet] = served.call("GET", f"{path}/triplets")[1]["triplets"]
    assert (triplet["exact"], triplet["reward"], triplet["prompt_token_ids"]) == (False, 1.0, [])


policy_of = partial(Endpoint, tokenizer=None, renderer="auto", engines=[])


def test_an_agent_runs_on_a_service_behind_a_server_without_a_tokenizer(tmp_path) -> None:
    with running() as service:
        engine = {"model": "gpt", "kind": "openai", "url": service.url, "api_key": KEY}
        with launch(tmp_path, policy_of(model="gpt", engines=[engine]), admin_key="a", runner_key="r") as serving:
            admin, runner = HttpStore(serving.url, "a"), HttpStore(serving.url, "r")
            assert admin.state()["models"]["gpt"]["trainable"] is False
            with pytest.raises(Invalid, match="started without a tokenizer"):
                admin.register_engine("m", "vllm", "http://127.0.0.1:1")
            admin.enqueue([RolloutRequest(task=1, rollout_id="r1")])
            (claim,) = runner.claim("w")
            llm = claim.resources["main_llm"]
            sdk = openai.OpenAI(base_url=llm["base_url"], api_key=llm["api_key"])
            answer = sdk.chat.completions.create(model=llm["model"], messages=[{"role": "user", "content": "one"}])
            assert answer.choices[0].message.content == "ok"
            runner.finish("r1", claim.attempt.attempt_id, Finish(status="succeeded", reward=1.0))
            (trace,) = admin.traces(["r1"])["r1"].attempts
            assert len(trace.spans) == 1
        assert service.keys == [f"Bearer {KEY}"]
        kept = [path for path in tmp_path.iterdir() if path.is_file() and KEY.encode() in path.read_bytes()]
        assert kept == []


def test_a_chat_only_server_that_is_given_a_token_engine_says_why_it_cannot_start(tmp_path) -> None:
    engine = {"model": "m", "kind": "vllm", "url": "http://127.0.0.1:1"}
    with (
        pytest.raises(ServerNotStarted, match="started without a tokenizer"),
        launch(tmp_path, policy_of(model="m", engines=[engine]), admin_key="a", runner_key="r"),
    ):
        pass
