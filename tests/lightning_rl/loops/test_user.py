"""A model beside the policy as the user: asked by its own name, from the other side of the conversation."""

import asyncio
import threading
from typing import Any

import pytest

from lightning_rl.agents.resources import LLM
from lightning_rl.loops.user import FunctionUser, ModelUser, UserError
from tests.proxy.engines.service import running

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "You help."},
    {"role": "user", "content": [{"type": "text", "text": "A table, please."}]},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "t"}]},
    {"role": "tool", "content": "free at 8", "tool_call_id": "t"},
    {"role": "assistant", "content": "At 8?"},
]


def test_the_model_sees_the_conversation_from_the_other_side() -> None:
    with running() as service:
        service.tokens = False
        service.script.extend(["Yes.", "Thanks. ###DONE###", ""])
        root = service.url.removesuffix("/v1")
        llm = LLM("policy", service.url, "key", anthropic_base_url=root)
        # The door of an attempt has the tag in its path; the service here has none.
        llm = type("Untagged", (LLM,), {"for_agent": lambda self, name: self})(**vars(llm))
        user = ModelUser("helper", "Be a guest.", "###DONE###")
        said = [asyncio.run(user({"user_prompt": "You are Ann."}, TALK, llm)) for _ in range(3)]
        assert said == ["Yes.", None, None]
        request = service.requests[0]
    assert request["model"] == "helper"
    assert request["messages"] == [
        {"role": "system", "content": "You are Ann.\n\nBe a guest."},
        {"role": "assistant", "content": "A table, please."},
        {"role": "user", "content": "At 8?"},
    ]


def test_a_user_says_a_text_or_nothing() -> None:
    llm = LLM("policy", "http://127.0.0.1:9/v1", "key")
    with pytest.raises(UserError, match=r"simulator returned 3; return a text, or None"):
        asyncio.run(FunctionUser(lambda task, messages: 3)("task", [], llm))


def test_users_that_take_their_time_do_not_wait_for_one_another() -> None:
    """As many as there are rollouts: asyncio's pool has a few threads for each core."""
    llm, all_there = LLM("policy", "http://127.0.0.1:9/v1", "key"), threading.Barrier(64, timeout=30)

    def user(task: Any, messages: Any) -> str:
        all_there.wait()
        return "yes"

    class Async:
        async def __call__(self, task: Any, messages: Any) -> str:
            return "no"

    async def ask() -> list[str | None]:
        return list(await asyncio.gather(*(FunctionUser(user)("task", [], llm) for _ in range(64))))

    assert asyncio.run(ask()) == ["yes"] * 64
    assert asyncio.run(FunctionUser(Async())("task", [], llm)) == "no"
