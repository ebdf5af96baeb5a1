"""Agent-lightning's LLMProxy composed by hand: models behind the gateway of a store's server, and out of it again."""

import asyncio
from pathlib import Path
from typing import Any, cast

import openai
import pytest

import lightning_rl as agl
from lightning_rl.compat import llm_proxy
from lightning_rl.control_plane.launch import launch
from lightning_rl.store.contract import Finish, RolloutRequest
from lightning_rl.store.errors import Conflict, NotFound, StoreError, Unreachable
from tests.lightning_rl.runner.conftest import policy_of
from tests.proxy.engines.service import running


def listed(name: str, model: str, **more: Any) -> dict[str, Any]:
    return {"model_name": name, "litellm_params": {"model": model, **more}}


@pytest.mark.long
def test_a_composition_by_hand_asks_its_model_and_records_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("THEIR_KEY", "k1")
    with (
        running() as service,
        launch(tmp_path, policy_of(), admin_key="admin", runner_key="runner") as serving,
    ):
        service.reply = lambda body: "it is " + body["messages"][0]["content"]
        store = agl.LightningStoreClient(serving.url, "admin")
        models = [listed("small", "openai/gpt-small", api_base=service.url, api_key="os.environ/THEIR_KEY")]
        proxy = agl.LLMProxy(port=4000, model_list=models, store=store)
        assert "LLMProxy starts no server, so ['port'] have no effect" in caplog.text
        asyncio.run(proxy.start())
        assert proxy.is_running()
        asyncio.run(store.add_resources({"main_llm": proxy.as_resource()}))
        claim = store.store.start(RolloutRequest(task="x", mode="train"))
        llm = claim.resources["main_llm"]
        with openai.OpenAI(base_url=llm["base_url"], api_key=llm["api_key"]) as client:
            answer = client.chat.completions.create(model=llm["model"], messages=[{"role": "user", "content": "x"}])
        assert answer.choices[0].message.content == "it is x"
        store.store.finish(claim.rollout.rollout_id, claim.attempt.attempt_id, Finish(status="succeeded", reward=1.0))
        [call] = asyncio.run(store.query_spans(claim.rollout.rollout_id))
        assert call.attributes["gen_ai.response.model"] == "small"
        [sent] = service.requests
        assert (sent["model"], service.keys) == ("gpt-small", ["Bearer k1"])
        with pytest.raises(RuntimeError, match="stop it before another store is set"):
            proxy.set_store(store)
        asyncio.run(proxy.update_model_list([listed("other", "openai/gpt-other", api_base=service.url)]))
        assert [engine["model"] for engine in store.store.engines()] == ["other"]
        asyncio.run(proxy.stop())
        assert (proxy.is_running(), store.store.engines()) == (False, [])
        store.store.close()


def test_what_a_proxy_cannot_be_told_is_an_error_that_says_what_does_its_work() -> None:
    instead = {"middlewares": "takes no middleware", "callbacks": "records token ids", "nonsense": "no such"}
    for name, why in instead.items():
        with pytest.raises(TypeError, match=f"LLMProxy takes no '{name}': .*{why}"):
            agl.LLMProxy(model_list=[], **{name: ["x"]})
    with pytest.raises(ValueError, match=r"litellm_params \['rpm'\] are not taken"):
        agl.LLMProxy(model_list=[listed("a", "openai/a", rpm=3)])
    with pytest.raises(ValueError, match="give model_name, and litellm_params with model"):
        agl.LLMProxy(model_list=[{"model_name": "a"}])
    two = agl.LLMProxy(model_list=[listed("a", "openai/a"), listed("b", "openai/b")])
    with pytest.raises(ValueError, match=r"which of the models \['a', 'b'\]"):
        two.as_resource()
    resource = two.as_resource(model="b", sampling_parameters={"temperature": 0.5})
    assert (resource.model, resource.sampling_parameters) == ("b", {"temperature": 0.5})
    with pytest.raises(ValueError, match="comes with its claim"):
        two.as_resource("r", "a", model="b")
    with pytest.raises(RuntimeError, match="the proxy has no store"):
        asyncio.run(two.start())


def test_models_are_there_together_and_leave_together() -> None:
    there: list[str] = []
    down: dict[str, StoreError] = {"register b": Conflict("b is not up yet")}

    class Store:
        def register_engine(self, model: str, *_: Any, **__: Any) -> dict[str, str]:
            if f"register {model}" in down:
                raise down[f"register {model}"]
            there.append(model)
            return {"engine_id": model}

        def remove_engine(self, engine_id: str) -> None:
            if f"remove {engine_id}" in down:
                raise down[f"remove {engine_id}"]
            if engine_id not in there:
                raise NotFound(engine_id)
            there.remove(engine_id)

    class Server:
        store = Store()

    proxy = agl.LLMProxy(model_list=[listed(name, f"openai/{name}") for name in "abc"], store=cast(Any, Server()))
    with pytest.raises(Conflict):
        asyncio.run(proxy.start())
    assert (there, proxy.is_running()) == ([], False)
    del down["register b"]
    asyncio.run(proxy.start())
    assert there == ["a", "b", "c"]
    down["remove a"] = Unreachable("gone")
    there.remove("b")  # by somebody else
    with pytest.raises(Unreachable):
        asyncio.run(proxy.stop())
    assert (there, proxy.is_running()) == (["a"], True)
    del down["remove a"]
    asyncio.run(proxy.stop())
    assert (there, proxy.is_running()) == ([], False)


def test_a_vllm_server_is_an_engine_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []

    class Store:
        def register_engine(self, *arguments: Any, **more: Any) -> dict[str, Any]:
            told.append((*arguments, more["api_key"], more["remote_model"]))
            return {"engine_id": "e1"}

    store = agl.LightningStoreClient("http://127.0.0.1:9", "k")
    monkeypatch.setattr(store, "store", Store())
    model = listed("policy", "hosted_vllm/Qwen/Qwen3-0.6B", api_base="http://127.0.0.1:8000/v1/")
    asyncio.run(agl.LLMProxy(model_list=[model], store=store).start())
    assert told == [("policy", "vllm", "http://127.0.0.1:8000", None, None)]


def test_a_key_in_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THEIR_KEY", raising=False)
    with pytest.raises(ValueError, match="the environment variable THEIR_KEY, which is not set"):
        llm_proxy._key("os.environ/THEIR_KEY")
