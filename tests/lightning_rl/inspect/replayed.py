"""Agents to be replayed: one for each way to ask, by the task's `kind`; and some that somebody has changed since."""

import asyncio
from typing import Any

import anthropic
import openai

import lightning_rl as lrl


@lrl.rollout
async def every_way(task: dict[str, Any], llm: lrl.LLM) -> Any:
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        return await _WAYS[task["kind"]](client, llm, task)


@lrl.rollout
async def changed(task: dict[str, Any], llm: lrl.LLM) -> Any:
    """It says "and then" where it said "and"."""
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        return await _chat(client, llm, task | {"second": "and then what"})


@lrl.rollout
async def asks_on(task: dict[str, Any], llm: lrl.LLM) -> Any:
    """It asks its first question once more at the end."""
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        reward = await _chat(client, llm, task)
        await _ask(client, llm, [{"role": "user", "content": f"number {task['i']}"}])
    return reward


@lrl.rollout
async def asks_less(task: dict[str, Any], llm: lrl.LLM) -> Any:
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        await _ask(client, llm, [{"role": "user", "content": f"number {task['i']}"}])
    return 1.0


@lrl.rollout
async def hotter(task: dict[str, Any], llm: lrl.LLM) -> Any:
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        return await _chat(client, llm, task | {"top_p": 0.5})


@lrl.rollout
async def swallows(task: dict[str, Any], llm: lrl.LLM) -> Any:
    """What it asks is refused, and it goes on as if nothing was."""
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        for _ in range(3):
            try:
                await _ask(client, llm, [{"role": "user", "content": "something else"}])
            except openai.BadRequestError:
                continue
    return 1.0


async def _ask(client: openai.AsyncOpenAI, llm: lrl.LLM, chat: Any, **more: Any) -> str:
    answer = await client.chat.completions.create(model=llm.model, messages=chat, max_tokens=6, **more)
    return answer.choices[0].message.content or ""


async def _chat(client: openai.AsyncOpenAI, llm: lrl.LLM, task: dict[str, Any]) -> float:
    chat: Any = [{"role": "user", "content": f"number {task['i']}"}]
    chat.append({"role": "assistant", "content": await _ask(client, llm, chat, top_p=task.get("top_p", 1.0))})
    chat.append({"role": "user", "content": task.get("second", "and")})
    return float(len(await _ask(client, llm, chat)))


async def _stream(client: openai.AsyncOpenAI, llm: lrl.LLM, task: dict[str, Any]) -> float:
    chat: Any = [{"role": "user", "content": f"number {task['i']}"}]
    said = ""
    async for event in await client.chat.completions.create(model=llm.model, messages=chat, max_tokens=6, stream=True):
        said += event.choices[0].delta.content or ""
    return float(len(said))


async def _parallel(client: openai.AsyncOpenAI, llm: lrl.LLM, task: dict[str, Any]) -> float:
    """Three equal questions at once, and one of two answers."""
    chat: Any = [{"role": "user", "content": "how many"}]
    said = await asyncio.gather(*(_ask(client, llm, chat) for _ in range(3)))
    two = await client.chat.completions.create(model=llm.model, messages=chat, max_tokens=6, n=2)
    return float(sum(map(len, [*said, *(choice.message.content or "" for choice in two.choices)])))


async def _responses(client: openai.AsyncOpenAI, llm: lrl.LLM, task: dict[str, Any]) -> float:
    first = await client.responses.create(model=llm.model, input="how many", max_output_tokens=6)
    second = await client.responses.create(
        model=llm.model, input="and", previous_response_id=first.id, max_output_tokens=6
    )
    return float(len(first.output_text + second.output_text))


async def _messages(client: openai.AsyncOpenAI, llm: lrl.LLM, task: dict[str, Any]) -> float:
    async with anthropic.AsyncAnthropic(base_url=llm.anthropic_base_url, auth_token=llm.api_key) as other:
        asked: Any = [{"role": "user", "content": "how many"}]
        said = await other.messages.create(model=llm.model, messages=asked, max_tokens=6)
        return float(len(str(said.content)))


async def _completions(client: openai.AsyncOpenAI, llm: lrl.LLM, task: dict[str, Any]) -> float:
    said = await client.completions.create(model=llm.model, prompt="SELECT", max_tokens=6)
    return float(len(said.choices[0].text))


async def _stops(client: openai.AsyncOpenAI, llm: lrl.LLM, task: dict[str, Any]) -> float:
    chat: Any = [{"role": "user", "content": "how many"}]
    return float(len(await _ask(client, llm, chat, stop=["e", "o"])))


async def _forced(client: openai.AsyncOpenAI, llm: lrl.LLM, task: dict[str, Any]) -> float:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    chat: Any = [{"role": "user", "content": "look"}]
    await _ask(client, llm, chat, tools=[tool], tool_choice={"type": "function", "function": {"name": "look"}})
    return 1.0


async def _fails(client: openai.AsyncOpenAI, llm: lrl.LLM, task: dict[str, Any]) -> float:
    await _ask(client, llm, [{"role": "user", "content": "number 1"}])
    raise KeyError("this agent has a bug")


async def _emits(client: openai.AsyncOpenAI, llm: lrl.LLM, task: dict[str, Any]) -> None:
    chat: Any = [{"role": "user", "content": "how many"}]
    answer = await client.chat.completions.create(model=llm.model, messages=chat, max_tokens=6)
    lrl.emit_reward(0.25, name="first", call_id=answer.id)
    lrl.emit_reward(0.5, name="polite")
    lrl.emit_reward(2.0)


async def _silent(client: openai.AsyncOpenAI, llm: lrl.LLM, task: dict[str, Any]) -> float:
    return 3.0


_WAYS = {
    "chat": _chat, "stream": _stream, "parallel": _parallel, "responses": _responses, "messages": _messages,
    "completions": _completions, "stops": _stops, "forced": _forced, "fails": _fails, "emits": _emits,
    "silent": _silent,
}  # fmt: skip
KINDS = list(_WAYS)
