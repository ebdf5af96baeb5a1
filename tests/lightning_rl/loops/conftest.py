"""The proxy tests' gateway and an attempt's `llm` on it; tools that answer what a test says; what was emitted."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import pytest

from lightning_rl.agents.agent import Agent
from lightning_rl.agents.emitted import Emitted
from lightning_rl.agents.resources import LLM, ProxyLLM
from lightning_rl.tools.trajectory import ToolCall, ToolResult
from lightning_rl_adapters import semconv
from tests.lightning_rl.langgraph.conftest import Recorded, calls_tool, llm, recorded
from tests.proxy.conftest import MODEL, renderer, served, tokenizer

__all__ = ["Recorded", "calls_tool", "llm", "recorded", "renderer", "served", "tokenizer"]


class Tools:
    """The tools of a trajectory, which answer by `reply`, given a call; `opened` is what they were opened with."""

    def __init__(self, reply: Callable[[ToolCall], Any] = lambda call: "fine") -> None:
        self.schemas = [
            {
                "type": "function",
                "function": {
                    "name": "look_up",
                    "description": "Look a word up.",
                    "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
                },
            }
        ]
        self.opened: list[tuple[Any, Any]] = []
        self.calls: list[ToolCall] = []
        self.closed = 0
        self.results: list[ToolResult] = []
        self._reply = reply

    def open(self, selection: Sequence[str] | None, create_kwargs: Mapping[str, Mapping[str, Any]]) -> Any:
        self.opened.append((selection, create_kwargs))
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.closed += 1

    async def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        self.calls += calls
        return [self._result(call) for call in calls]

    def _result(self, call: ToolCall) -> ToolResult:
        said = self._reply(call)
        if isinstance(said, ToolResult):
            return said
        return ToolResult(call.id, call.name, said, 0.0, {}, None)


class Ran(NamedTuple):
    """What an agent returned and emitted."""

    returned: Any
    emitted: Emitted

    def objects(self) -> list[dict[str, Any]]:
        found = [dict(span.attributes or {}).get(semconv.OBJECT) for span in self.emitted.spans]
        return [json.loads(str(told)) for told in found if told is not None]

    @property
    def end(self) -> dict[str, Any]:
        [end] = [told for told in self.objects() if "ended_by" in told]
        return end


Run = Callable[..., Ran]


@pytest.fixture
def run(llm: LLM) -> Run:
    """Run an agent on a task as a runner does."""

    def once(agent: Agent, task: Any, where: LLM = llm) -> Ran:
        resources = {"main_llm": ProxyLLM(MODEL, claimed=where)}
        emitted = Emitted("r1", "a1")

        async def rollout() -> Any:
            found = agent.training_rollout(task, resources, SimpleNamespace(rollout_id="r1", mode="train"))
            return await found

        with emitted.collecting():
            return Ran(asyncio.run(rollout()), emitted)

    return once
