"""Agents of the tests beside. Runners import this file, so it loads no torch."""

import asyncio
import zlib
from pathlib import Path
from typing import Any

import openai

import lightning_rl as lrl
from lightning_rl.errors import InfrastructureError


@lrl.rollout
async def some_fail(task: int, llm: lrl.LLM) -> float | None:
    """Task 1 raises after its call, task 2 gives no reward, task 3 makes no call."""
    if task != 3:
        async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
            chat: Any = [{"role": "user", "content": f"number {task}"}]
            await client.chat.completions.create(model=llm.model, messages=chat)
    if task == 1:
        raise RuntimeError("this agent has a bug")
    return None if task == 2 else 1.0


@lrl.rollout
async def step_rewards(task: int, llm: lrl.LLM) -> None:
    """Two calls; the first is rewarded with the task, the second with 1, both by their ids, the first late."""
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        chat: Any = [{"role": "user", "content": f"number {task}"}]
        first = await client.chat.completions.create(model=llm.model, messages=chat)
        chat += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "and"}]
        second = await client.chat.completions.create(model=llm.model, messages=chat)
    lrl.emit_reward(1.0, name="second", call_id=second.id)
    lrl.emit_reward(float(task), name="first", call_id=first.id)
    lrl.emit_reward(0.5, name="polite")


@lrl.rollout
async def says_something(task: Any, llm: lrl.LLM) -> None:
    """One call, and no reward: others judge it."""
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        chat: Any = [{"role": "user", "content": f"number {task['n']}"}]
        await client.chat.completions.create(model=llm.model, messages=chat)


@lrl.rollout
async def two_calls(task: int, llm: lrl.LLM) -> float:
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        chat: Any = [{"role": "user", "content": f"number {task}"}]
        first = await client.chat.completions.create(model=llm.model, messages=chat)
        chat += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "and"}]
        second = await client.chat.completions.create(model=llm.model, messages=chat)
    return float(len(second.choices[0].message.content or "") % 3)


@lrl.rollout
async def looks_up(task: int, llm: lrl.LLM) -> float:
    """A call, a tool, another call; task 3 raises in its tool."""
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        chat: Any = [{"role": "user", "content": f"number {task}"}]
        first = await client.chat.completions.create(model=llm.model, messages=chat)
        with lrl.operation("look up", inputs={"number": task}) as step:
            if task == 3:
                raise KeyError("nothing there")
            step.output = task
        chat += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "and"}]
        second = await client.chat.completions.create(model=llm.model, messages=chat)
    return float(len(second.choices[0].message.content or "") % 3)


@lrl.rollout
async def straggles(task: int, llm: lrl.LLM) -> float:
    """Two calls with a tool between them that mostly answers at once; every fifth task's takes its time."""
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        chat: Any = [{"role": "user", "content": f"number {task}"}]
        first = await client.chat.completions.create(model=llm.model, messages=chat)
        await asyncio.sleep(1.0 if task % 5 == 4 else 0.01)
        chat += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "and"}]
        second = await client.chat.completions.create(model=llm.model, messages=chat)
    return float(len(second.choices[0].message.content or "") % 3)


def _by_text(text: str) -> float:
    """A reward by which any two answers may differ."""
    return float(zlib.crc32(text.encode()) % 7)


async def _said(llm: lrl.LLM, text: str, model: str | None = None) -> str:
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        chat: Any = [{"role": "user", "content": text}]
        answer = await client.chat.completions.create(model=model or llm.model, messages=chat)
    return answer.choices[0].message.content or ""


@lrl.rollout
async def plan_and_execute(task: int, planner: lrl.LLM, executor: lrl.LLM) -> dict[str, float]:
    """One call of each, with another model's name: the URL says which. The executor reads the plan."""
    plan = await _said(planner, f"plan {task}", model="gpt-4o")
    done = await _said(executor, f"do {task}: {plan}", model="gpt-4o")
    return {"reward": _by_text(plan + done), "executor": _by_text(done)}


@lrl.rollout
async def plan_and_execute_by_tags(task: int, llm: lrl.LLM) -> float:
    """The same with one endpoint, whose tags say who calls."""
    plan = await _said(llm.for_agent("planning"), f"plan {task}")
    done = await _said(llm.for_agent("executor"), f"do {task}: {plan}")
    return _by_text(plan + done)


@lrl.rollout
async def plan_and_execute_by_names(task: int, llm: lrl.LLM) -> float:
    """The same with one endpoint, and the policies' names as those of models."""
    plan = await _said(llm, f"plan {task}", model="planner")
    done = await _said(llm, f"do {task}: {plan}", model="executor")
    return _by_text(plan + done)


@lrl.rollout
async def plan_by_tags_alone(task: int, llm: lrl.LLM) -> float:
    """Two agents that one policy may answer, or two."""
    plan = await _said(llm.for_agent("planner"), f"plan {task}", model="any")
    done = await _said(llm.for_agent("executor"), f"do {task}: {plan}", model="any")
    return _by_text(plan + done)


@lrl.rollout
async def needs_service(service: str, llm: lrl.LLM) -> float:
    """Calls, and rewards itself with 1; infrastructure fails while the file `service` is not there."""
    await _said(llm, "which service?")
    if not Path(service).exists():
        raise InfrastructureError(f"{service} is not there")
    return 1.0
