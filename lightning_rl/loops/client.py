"""The openai client of an event loop: making one costs more than a call; URL and key come with each use."""

import asyncio
import weakref

import openai

from lightning_rl.agents.resources import LLM

_of_loops: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, openai.AsyncOpenAI]" = weakref.WeakKeyDictionary()


def client_of(llm: LLM) -> openai.AsyncOpenAI:
    """A client that asks `llm`. Connections belong to the event loop that opened them, so each has its own."""
    loop = asyncio.get_running_loop()
    if loop not in _of_loops:
        _of_loops[loop] = openai.AsyncOpenAI(base_url="http://unused.invalid/v1", api_key="unused")
    return _of_loops[loop].with_options(base_url=llm.base_url, api_key=llm.api_key)
