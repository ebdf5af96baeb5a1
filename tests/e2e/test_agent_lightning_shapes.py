"""The shapes of Agent-lightning's example agents run here with the import changed, and its page says what is true.

AutoGen's is in `test_autogen.py`, for its environment.

Each shape is trained for a step on the tutorial's small model: what counts is that it runs, and is recorded whole.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import openai
import pytest

import lightning_rl as agl
from lightning_rl.agents.agent import as_agent
from lightning_rl.config import compose
from lightning_rl.store.contract import Rollout
from lightning_rl.store.sql import SqlStore
from lightning_rl_adapters.call import Call, calls_of

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-agent-lightning.md"
TASKS = [{"question": f"cars: {c} id\nHow many cars are there?", "result": "count"} for c in ("size", "color")]
CONFIG: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {"train_batch_size": 2, "max_prompt_length": 256, "max_response_length": 16},
    "actor_rollout_ref": {"rollout": {"n": 2, "multi_turn": {"format": "hermes"}}},
    "trainer": {"total_training_steps": 1, "val_before_train": False, "logger": ["console"]},
}


def chat(task: dict[str, str], endpoint: str, key: str, model: str, **more: Any) -> str:
    client = openai.OpenAI(base_url=endpoint, api_key=key)
    messages: Any = [{"role": "user", "content": task["question"]}]
    return client.chat.completions.create(model=model, messages=messages, **more).choices[0].message.content or ""


@agl.rollout
def function(task: dict[str, str], llm: agl.LLM) -> float:
    return float(task["result"] in chat(task, llm.base_url, llm.api_key, llm.model))


@agl.rollout
async def asynchronous(task: dict[str, str], llm: agl.LLM) -> None:
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        messages: Any = [{"role": "user", "content": task["question"]}]
        answer = await client.chat.completions.create(model=llm.model, messages=messages)
    agl.emit_reward(float(task["result"] in (answer.choices[0].message.content or "")))


@agl.rollout
def by_endpoint(task: dict[str, str], llm: agl.LLM) -> float:
    """As theirs ask: the endpoint, and a key of no use."""
    return float(task["result"] in chat(task, llm.endpoint, os.environ.get("NO_SUCH_KEY", "token-abc123"), llm.model))


class LitByHand(agl.LitAgent[dict[str, Any]]):
    """Async, with the URL made of the ids; one way to train, another to validate."""

    def __init__(self, val_temperature: float | None = None) -> None:
        super().__init__()
        self.val_temperature = val_temperature

    async def training_rollout_async(self, task: Any, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
        rewards = [await self.answer(task, resources, rollout) for _ in range(2)]
        return sum(rewards) / 2

    async def validation_rollout_async(self, task: Any, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
        return await self.answer(task, resources, rollout, temperature=self.val_temperature)

    async def answer(self, task: Any, resources: Any, rollout: Any, **more: Any) -> float:
        assert rollout.input == task
        llm = cast(agl.LLM, resources["main_llm"])
        base_url = llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)  # type: ignore[attr-defined]
        async with openai.AsyncOpenAI(base_url=base_url, api_key="dummy") as client:
            messages: Any = [{"role": "user", "content": task["question"]}]
            answer = await client.chat.completions.create(model=llm.model, messages=messages, **more)
        return float(task["result"] in (answer.choices[0].message.content or ""))


class LitGraph(agl.LitAgent[dict[str, Any]]):
    """A graph around LangChain's model, built anew for each rollout, with their tracer's callback if there is one."""

    def __init__(self, max_turns: int = 2, val_temperature: float = 0.0) -> None:
        super().__init__()
        self.max_turns, self.val_temperature = max_turns, val_temperature

    def rollout(self, task: Any, resources: agl.NamedResources, rollout: agl.Rollout) -> float | None:
        llm: Any = cast(agl.LLM, resources["main_llm"])
        trains = rollout.mode == "train"
        graph = graph_of(
            llm.model,
            llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id),  # type: ignore[attr-defined]
            "token-abc123",
            temperature=llm.sampling_parameters.get("temperature", 1.0) if trains else self.val_temperature,
            turns=self.max_turns,
        )
        handler = self.tracer.get_langchain_handler()  # type: ignore[func-returns-value]
        question = {"messages": [{"role": "user", "content": task["question"]}]}
        told = graph.invoke(question, {"callbacks": [handler] if handler else [], "recursion_limit": 20})
        return float(task["result"] in str(told["messages"][1].content))


class ByHand(agl.Agent):
    """The class form, with one way to train and another to validate, and a setting of its own."""

    def __init__(self, max_turns: int) -> None:
        self.max_turns = max_turns

    def training_rollout(self, task: Any, resources: Any, rollout: Rollout) -> float:
        llm = resources["main_llm"].resolve(rollout)
        said = [chat(task, llm.base_url, llm.api_key, llm.model) for _ in range(self.max_turns)]
        return sum(task["result"] in answer for answer in said) / self.max_turns

    def validation_rollout(self, task: Any, resources: Any, rollout: Rollout) -> float:
        llm = resources["main_llm"].resolve(rollout)
        return float(task["result"] in chat(task, llm.base_url, llm.api_key, llm.model, temperature=0.0))


class AsynchronousClass(agl.Agent):
    async def rollout(self, task: Any, resources: Any, rollout: Rollout) -> float:
        llm = resources["main_llm"].resolve(rollout)
        assert f"/rollout/{rollout.rollout_id}/attempt/{rollout.attempt_id}/" in llm.base_url
        async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
            messages: Any = [{"role": "user", "content": task["question"]}]
            await client.chat.completions.create(model=llm.model, messages=messages)
        return 1.0


def graph_of(name: str, base_url: str, key: str, *, temperature: float = 1.0, turns: int = 2) -> Any:
    """Two nodes around `ChatOpenAI`: one writes, the other looks at it and lets it write again."""
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph

    model = ChatOpenAI(model=name, base_url=base_url, api_key=key, temperature=temperature)  # type: ignore[arg-type]

    def write(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    def check(state: MessagesState) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "empty"}]}

    graph = StateGraph(MessagesState)
    graph.add_node("write", write)
    graph.add_node("check", check)
    graph.add_edge(START, "write")
    graph.add_edge("check", "write")
    graph.add_conditional_edges("write", lambda state: "check" if len(state["messages"]) < 2 * turns - 1 else END)
    return graph.compile()


@agl.rollout
def langgraph_writer(task: dict[str, str], llm: agl.LLM) -> float:
    graph = graph_of(llm.model, llm.base_url, llm.api_key)
    told = graph.invoke({"messages": [{"role": "user", "content": task["question"]}]})
    return float(task["result"] in str(told["messages"][1].content))


def trained(agent: Any, folder: Path, *, val: bool = False) -> list[tuple[Rollout, list[Call]]]:
    """Every rollout of one step of training, with its calls; fitted as they do it."""
    trainer = agl.Trainer(algorithm=agl.VERL(CONFIG), n_runners=2, run_dir=folder)
    trainer.fit(agent, train_dataset=TASKS, val_dataset=TASKS[:1] if val else None)
    store = SqlStore(f"sqlite:///{folder / 'store.db'}")
    rollouts, _ = store.page(limit=100)
    traces = store.traces([rollout.rollout_id for rollout in rollouts])
    return [(trace.rollout, calls_of(trace.attempts[-1].spans)) for trace in traces.values()]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("agent", "calls"),
    [
        (function, 1),
        pytest.param(by_endpoint, 1, marks=pytest.mark.long),
        pytest.param(asynchronous, 1, marks=pytest.mark.long),
        (AsynchronousClass, 1),
        pytest.param(langgraph_writer, 2, marks=pytest.mark.long),
        (LitGraph, 2),
    ],
    ids=["function", "endpoint", "async function", "async class", "langgraph", "langgraph in a LitAgent"],
)
def test_a_shape_is_trained_and_recorded_whole(agent: Any, calls: int, tmp_path: Path) -> None:
    if agent in (langgraph_writer, LitGraph):
        pytest.importorskip("langgraph")
        pytest.importorskip("langchain_openai")
    found = trained(agent, tmp_path / "run")
    assert len(found) == len(TASKS) * 2
    for rollout, recorded in found:
        assert (rollout.status, rollout.error) == ("succeeded", None)
        assert rollout.reward in (0.0, 1.0)
        assert len(recorded) == calls
        assert all(call.logprobs is not None and len(call.logprobs) == len(call.response_ids) for call in recorded)
    if agent in (langgraph_writer, LitGraph):
        assert all(second.parent_id == first.call_id for _, (first, second) in found), "one conversation, one row"


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.parametrize("agent", [ByHand(max_turns=2), LitByHand(0.5)], ids=["Agent", "LitAgent"])
def test_a_class_trains_one_way_and_validates_another(agent: Any, tmp_path: Path) -> None:
    found = trained(agent, tmp_path / "run", val=True)
    assert {(rollout.mode, len(calls)) for rollout, calls in found} == {("train", 2), ("val", 1)}
    assert all(rollout.status == "succeeded" for rollout, _ in found)


def test_a_function_stays_one() -> None:
    assert function.__name__ == "function"
    assert as_agent(function) is function


@pytest.mark.long
@pytest.mark.e2e
def test_the_pages_code_runs_as_it_stands(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "script.py").write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2/2  reward" in done.stdout
    assert "row 1: " in done.stdout


def here(page: str) -> list[str]:
    """What stands between backticks in the right columns of the page's tables."""
    rows = re.findall(r"^\| .*? \| (.*) \|$", page, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def test_the_page_names_what_there_is() -> None:
    names = here(PAGE.read_text())
    ours = {match[1] for name in names if (match := re.match(r"@?lrl\.(\w+)", name))}
    assert len(ours) >= 8
    assert [name for name in ours if not hasattr(agl, name)] == []


def test_the_page_names_keys_that_there_are() -> None:
    keys = [
        name
        for name in here(PAGE.read_text())
        if re.match(r"(actor_rollout_ref|algorithm|data|gateway|trainer)\.", name)
    ]
    assert len(keys) >= 6
    config = compose()
    for key in keys:
        found: Any = config
        for part in key.split("."):
            found = getattr(found, part)


def test_the_page_names_methods_of_the_store_that_there_are() -> None:
    from lightning_rl.store.client import HttpStore

    page = PAGE.read_text()
    table = page[page.index("## The store") : page.index("## From version")]
    methods = {name for name in here(table) if re.fullmatch(r"[a-z]+", name)}
    methods -= {"queued", "running", "succeeded", "failed", "cancelled"}
    assert len(methods) >= 8
    assert [name for name in methods if not hasattr(HttpStore, name)] == []
