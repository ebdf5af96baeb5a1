"""Agent-lightning's training scripts are run whole: their configuration and their `Trainer` as they are written, with
other paths, sizes and devices alone, on agents in the shape of theirs."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

import lightning_rl as agl
from lightning_rl.store.contract import RolloutTrace
from lightning_rl.store.sql import SqlStore
from lightning_rl.telemetry.metrics import jsonl
from lightning_rl_adapters.call import calls_of
from tests.e2e.test_agent_lightning_shapes import LitGraph, function

pytestmark = pytest.mark.e2e

SCRIPTS = json.loads((Path(__file__).parents[1] / "data/agent_lightning_scripts.json").read_text())
MCP_SERVER = Path(__file__).parents[1] / "lightning_rl/tools/mcp_server_of_tests.py"
TASKS = [{"question": f"cars: {c} id\nHow many cars are there?", "result": "count"} for c in ("size", "color")]
# Of the machine: the model and the files, how much is done, and what computes it.
SIZES: dict[str, Any] = {
    "data": {"train_batch_size": 2, "max_prompt_length": 400, "max_response_length": 12},
    "actor_rollout_ref": {
        "model": {"path": None},
        "rollout": {"name": "embedded", "n": 2},
        "actor": {"ppo_mini_batch_size": 2},
    },
    "trainer": {"total_training_steps": 1, "logger": ["console", "jsonl"], "device": "cpu"},
}


def resized(config: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """A script's configuration with the values of `sizes`, and all else as it is."""
    found = dict(config)
    for name, value in sizes.items():
        found[name] = resized(config.get(name, {}), value) if isinstance(value, dict) else value
    return found


@agl.rollout
async def with_mcp_tools(task: dict[str, str], llm: agl.LLM) -> None:
    """As the calculator and the retriever ask: the tools of an MCP server that the agent starts itself, several rewards
    of which one counts."""
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    async with (
        stdio_client(StdioServerParameters(command=sys.executable, args=[str(MCP_SERVER), "stdio"])) as pipes,
        ClientSession(*pipes) as session,
        openai.AsyncOpenAI(base_url=llm.endpoint, api_key="dummy") as client,
    ):
        await session.initialize()
        tools = [one for one in (await session.list_tools()).tools if one.name == "add"]
        shown: Any = [
            {"type": "function", "function": {"name": one.name, "parameters": {"type": "object", "properties": {}}}}
            for one in tools
        ]
        messages: Any = [{"role": "user", "content": task["question"]}]
        first = await client.chat.completions.create(model=llm.model, messages=messages, tools=shown)
        said = first.choices[0].message
        summed = await session.call_tool("add", {"a": 1, "b": 2})
        messages += [said.model_dump(exclude_none=True), {"role": "user", "content": str(summed.content[0].text)}]  # type: ignore[union-attr]
        await client.chat.completions.create(model=llm.model, messages=messages, tools=shown)
    agl.emit_reward({"task": float(task["result"] in (said.content or "")), "format": 1.0}, primary_key="task")


MODES = ("train", "val")
AGENTS: dict[str, tuple[Any, int]] = {
    "agentlightning v0.3.0 spider/train_sql_agent.py": (LitGraph(), 2),
    "agentlightning v0.3.0 calc_x/train_calc_agent.py": (with_mcp_tools, 2),
    "agentlightning v0.3.0 rag/train_rag.py": (with_mcp_tools, 2),
    "agentlightning v1.0.0 gsm8k/train_gsm8k_agent.py": (function, 1),
}


def test_every_script_with_a_configuration_is_here() -> None:
    assert {name for name, script in SCRIPTS.items() if script["config"] is not None} == AGENTS.keys()


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=[] if "rag" in name else [pytest.mark.long]) for name in AGENTS]
)
def test_a_script_is_trained_whole(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = resized(SCRIPTS[script]["config"], SIZES)
    names: dict[str, Any] = {
        "agl": agl, "config": config, "algorithm": agl.VERL(config), "n_runners": 2, "store": None,
        "args": SimpleNamespace(debug=False), "active_agent": None, "tracer": agl.OtelTracer(),
        "adapter": agl.LlmProxyTraceToTriplet(),
    }  # fmt: skip
    made = [call for call in SCRIPTS[script]["calls"] if call.startswith("agl.Trainer(")]
    trainer = eval(made[-1], names) if made else agl.Trainer(algorithm=names["algorithm"], n_runners=2)
    agent, calls = AGENTS[script]
    trainer.fit(agent, train_dataset=TASKS, val_dataset=TASKS[:1])

    [run] = [file.parent for file in Path("runs").rglob("metrics.jsonl")]
    [step] = [line for line in jsonl.read(run / "metrics.jsonl") if line["step"] == 1]
    found = traces(run)
    assert {trace.rollout.status for trace in found} == {"succeeded"}
    sampled = {mode: [calls_of(one.attempts[-1].spans) for one in found if one.rollout.mode == mode] for mode in MODES}
    assert [len(one) for one in sampled["train"]] == [calls] * 4
    tokens = {mode: sum(call.sampled_tokens for one in each for call in one) for mode, each in sampled.items()}
    assert step["tokens/trained"] == tokens["train"]
    assert step["tokens/received"] == sum(tokens.values())
    assert len(sampled["val"]) == 1 + config["trainer"]["val_before_train"]


def traces(run: Path) -> list[RolloutTrace]:
    store = SqlStore(f"sqlite:///{run / 'store.db'}")
    rollouts, _ = store.page(limit=100)
    return list(store.traces([rollout.rollout_id for rollout in rollouts]).values())
