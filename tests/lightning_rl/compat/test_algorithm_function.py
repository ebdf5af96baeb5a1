"""Agent-lightning's algorithms by hand: a function, the store under its names, prompts as resources, conversations."""

import asyncio
import functools
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

import lightning_rl as agl
from lightning_rl.agents.agent import AgentSignature
from lightning_rl.compat.algorithm_function import AlgorithmSignature
from lightning_rl.compat.lightning_store import StoreKeyMissing
from lightning_rl.control_plane.launch import launch
from lightning_rl.data.dataset import TaskError
from lightning_rl.inspect.dev import Dev
from lightning_rl.processes.child import ChildDied
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Finish, RolloutRequest
from lightning_rl.store.errors import NotFound
from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import to_span
from tests.adapters.test_conventions import recorded
from tests.adapters.words import say
from tests.lightning_rl.runner.conftest import policy_of
from tests.proxy.engines.service import Service, running

KEYS = {"admin_key": "admin", "runner_key": "runner"}
PROMPTS = ["Answer {question}.", "Please, {question}!", "{question}?"]


@agl.prompt_rollout
def polite(task: str, prompt_template: agl.PromptTemplate) -> float:
    return float("Please" in prompt_template.format(question=task))


@pytest.mark.e2e
def test_a_function_finds_the_best_prompt(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    @agl.algo
    async def best_prompt(
        *, store: agl.LightningStore, train_dataset: Any, initial_resources: Any, adapter: Any
    ) -> None:
        first = await store.get_latest_resources()
        assert first is not None
        assert first.resources == initial_resources
        rewards: dict[str, float] = {}
        for prompt in PROMPTS:
            published = await store.add_resources({"prompt_template": agl.PromptTemplate(prompt)})
            asked = [
                await store.enqueue_rollout(task, "train", published.resources_id, metadata={"prompt": prompt})
                for task in train_dataset
            ]
            ended = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in asked], timeout=120)
            assert [rollout.status for rollout in ended] == ["succeeded"] * len(asked)
            rewards[prompt] = sum(rollout.reward or 0.0 for rollout in ended) / len(ended)
            [attempt] = await store.query_attempts(asked[0].rollout_id)
            assert await store.get_latest_attempt(asked[0].rollout_id) == attempt
            assert adapter.adapt(await store.query_spans(asked[0].rollout_id, "latest")) == []
        seen["rewards"] = rewards
        seen["rollouts"] = await store.query_rollouts(status_in=["succeeded"], limit=4, offset=1)
        seen["none"] = await store.query_rollouts(status_in=["queuing"]), await store.get_rollout_by_id("nobody")

    trainer = agl.Trainer(
        algorithm=best_prompt, adapter=agl.TraceToMessages(), run_dir=tmp_path / "run", n_runners=2,
        initial_resources={"prompt_template": agl.PromptTemplate("{question}")},
    )  # fmt: skip
    trainer.fit(polite, train_dataset=["a", "b"])
    assert seen["rewards"] == {prompt: float("Please" in prompt) for prompt in PROMPTS}
    assert [rollout.metadata["prompt"] for rollout in seen["rollouts"]] == [
        PROMPTS[0],
        PROMPTS[1],
        PROMPTS[1],
        PROMPTS[2],
    ]
    assert seen["none"] == ([], None)


def test_a_parameter_that_nothing_fills_is_named() -> None:
    with pytest.raises(AlgorithmSignature, match="nothing fills parameter 'beam'; an algorithm is given store, train_"):
        agl.algo(lambda store, beam: None)
    assert agl.algo(lambda store, beam=3: beam)(None) == 3
    with pytest.raises(AlgorithmSignature, match="'beam'"):
        agl.algo(functools.partial(lambda store, beam: None))


def _run(function: Any) -> None:
    algorithm = agl.algo(function)
    algorithm.store, algorithm.check = HttpStore("http://127.0.0.1:9", "admin"), lambda: None
    algorithm.run([], [])


def test_what_a_function_returns_is_awaited_in_a_notebook_too() -> None:
    ended: list[str] = []

    class Async:
        async def __call__(self, store: agl.LightningStore) -> None:
            await asyncio.sleep(0)
            ended.append(type(store).__name__)

    async def cell() -> None:
        _run(Async())

    _run(Async())
    asyncio.run(cell())
    assert ended == ["LightningStore"] * 2


def test_a_function_runs_in_the_thread_that_ctrl_c_is_told_of() -> None:
    def interrupted() -> None:
        assert threading.current_thread() is threading.main_thread()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run(interrupted)


def test_each_llm_is_answered_by_its_own_service(tmp_path: Path) -> None:
    with running() as first, running() as second, launch(tmp_path, policy_of(), **KEYS) as serving:
        store = agl.LightningStoreClient(serving.url, "admin")

        def model_asked(service: Service, key: str) -> str:
            llm = agl.LLM(endpoint=service.url, model="gpt", api_key=key)
            published = asyncio.run(store.add_resources({"main_llm": llm}))
            claim = store.store.start(RolloutRequest(task="t", resources_id=published.resources_id))
            given = claim.resources["main_llm"]
            with openai.OpenAI(base_url=given["base_url"], api_key=given["api_key"]) as client:
                client.chat.completions.create(model=given["model"], messages=[{"role": "user", "content": "hi"}])
            return str(given["model"])

        asked = [model_asked(*one) for one in [(first, "a"), (second, "b"), (first, "c"), (second, "b")]]
        assert asked == ["gpt", f"gpt@{second.url}"] * 2
        assert (first.keys, second.keys) == (["Bearer a", "Bearer c"], ["Bearer b"] * 2)
        assert {request["model"] for request in [*first.requests, *second.requests]} == {"gpt"}
        asyncio.run(store.close())


def test_a_task_that_is_no_json_value_is_refused() -> None:
    store = agl.LightningStore(HttpStore("http://127.0.0.1:9", "admin"))
    with pytest.raises(TaskError, match="the task is no JSON value"):
        asyncio.run(store.enqueue_rollout({"x": float("nan")}))


def test_a_store_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTNING_RL_ADMIN_KEY", raising=False)
    with pytest.raises(StoreKeyMissing, match="set LIGHTNING_RL_ADMIN_KEY"):
        agl.LightningStoreClient("http://127.0.0.1:9")
    with launch(tmp_path, policy_of(), **KEYS) as serving:
        asyncio.run(_use(agl.LightningStoreClient(serving.url, "admin")))


async def _use(store: agl.LightningStoreClient) -> None:
    sampling = {"temperature": 0.5}
    llm = agl.LLM(endpoint="http://127.0.0.1:9/v1", model="judge", api_key="k", sampling_parameters=sampling)
    given = {"judge": llm, "prompt_template": agl.PromptTemplate("{{ a }}", "jinja")}
    published = await store.update_resources("mine", given)
    assert published == await store.get_resources_by_id("mine")
    assert published.resources["judge"].model == "judge"
    assert published.resources["judge"].val_sampling_parameters == sampling
    assert published.resources["prompt_template"].format(a=3) == "3"
    assert [engine["model"] for engine in store.store.engines() if engine["kind"] == "openai"] == ["judge"]
    mine = await store.start_rollout("task", config=agl.RolloutConfig(max_attempts=1))
    assert (mine.status, mine.config.max_attempts, mine.resources_id) == ("running", 1, "mine")
    assert await store.wait_for_rollouts(rollout_ids=[mine.rollout_id], timeout=0.1) == []
    store.store.finish(mine.rollout_id, mine.attempt.attempt_id, Finish(status="succeeded", reward=1.0))
    [waits, also] = await store.enqueue_many_rollouts([{"input": "other"}, SimpleNamespace(input=1, mode="val")])
    assert (waits.input, waits.mode, also.input, also.mode) == ("other", "train", 1, "val")
    assert (waits.start_time, waits.end_time) == (waits.created_at, None)
    await store.update_rollout(waits.rollout_id, status="cancelled")
    ended = await store.wait_for_rollouts(rollout_ids=[waits.rollout_id, mine.rollout_id])
    assert [rollout.status for rollout in ended] == ["cancelled", "succeeded"]
    with pytest.raises(ValueError, match="cannot be set to 'failed'"):
        await store.update_rollout(waits.rollout_id, status="failed")
    with pytest.raises(AttributeError, match="runners claim rollouts"):
        await store.dequeue_rollout("worker")
    with pytest.raises(TypeError, match="resource 'x' is 3"):
        await store.add_resources({"x": 3})
    with pytest.raises(NotFound, match="there is no rollout 'nope' to wait for"):
        await store.wait_for_rollouts(rollout_ids=[waits.rollout_id, "nope"])
    assert await store.wait_for_rollouts(rollout_ids=[]) == []
    await store.close()


def test_an_algorithm_that_polls_hears_that_a_process_has_died() -> None:
    def check() -> None:
        raise ChildDied("the runner is gone")

    store = agl.LightningStore(HttpStore("http://127.0.0.1:9", "admin"), check=check)
    for asked in (store.query_rollouts(), store.get_rollout_by_id("r1")):
        with pytest.raises(ChildDied):
            asyncio.run(asked)


def test_a_prompt_is_filled_by_either_engine() -> None:
    assert agl.PromptTemplate("{a} and {b}").format(a=1, b="x") == "1 and x"
    with pytest.raises(KeyError, match="b"):
        agl.PromptTemplate("{a} and {b}").format(a=1)
    with pytest.raises(Exception, match="'b' is undefined"):
        agl.PromptTemplate("{{ b }}", "jinja").format(a=1)
    with pytest.raises(ValueError, match="no engine 'poml'"):
        agl.PromptTemplate("<poml/>", "poml")
    with pytest.raises(AgentSignature, match="takes no prompt"):
        agl.prompt_rollout(lambda task, llm: 1.0)


def test_resources_that_an_algorithm_publishes_itself_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = {"prompt_template": agl.PromptTemplate("x")}
    with pytest.raises(TypeError, match="Baseline takes no initial_resources"):
        agl.Trainer(polite, initial_resources=prompt).fit(agl.Baseline(), ["a"])
    with pytest.raises(AgentSignature, match=r"nothing fills parameter 'prompt_template'; .*lrl\.algo"):
        agl.Trainer(polite).fit(agl.Baseline(), ["a"])
    made: list[Dev] = []
    monkeypatch.setattr(agl.Trainer, "fit", lambda self, dev, tasks: made.append(dev))
    llm = agl.LLM(endpoint="https://api.example/v1", model="large", api_key="k")
    agl.Trainer(lambda task, llm: 1.0, initial_resources={"main_llm": llm}).dev(["a"])
    assert (made[0].model, made[0].base_url, made[0].api_key) == ("large", "https://api.example/v1", "k")
    with pytest.raises(TypeError, match="dev takes initial_resources of one LLM"):
        agl.Trainer(polite, initial_resources=prompt).dev(["a"])


def test_an_attempts_calls_as_conversations() -> None:
    calls = [say(1, "a", "b"), say(2, "c", "d", after=1), say(3, "e", "f", after=1, delivered=False)]
    spans = [
        to_span(
            call,
            **{
                semconv.INPUT_MESSAGES: [{"role": "user", "content": asked}],
                semconv.OUTPUT_MESSAGES: [{"role": "assistant", "content": answered}],
            },
        )
        for call, asked, answered in zip(calls, "ace", "bdf", strict=True)
    ]
    rows = agl.TraceToMessages().adapt(spans)
    assert [[message["content"] for message in row["messages"]] for row in rows] == [["a", "b"], ["a", "b", "c", "d"]]
    assert [row["tools"] for row in rows] == [None, None]


def test_calls_that_an_agents_own_spans_tell_of_are_conversations_too() -> None:
    for name in ("openllmetry", "openllmetry_before_1_0", "openinference"):
        first, *_, last = agl.TraceToMessages().adapt(recorded(name))
        assert [message["content"] for message in last["messages"]] == ["Add.", "1 + 2?", "I add."], name
        assert [tool["function"]["name"] for tool in first["tools"]] == ["add"]
