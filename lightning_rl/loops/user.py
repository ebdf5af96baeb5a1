"""Who speaks as the user after the first prompt: a function, or a model beside the policy.

Invariant: the model is asked by its own name through the rollout's URL, so its calls are recorded, and are never the
policy's.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from lightning_rl.agents.resources import LLM
from lightning_rl.config.schema import UserTurns
from lightning_rl.errors import Explained
from lightning_rl.loading import load
from lightning_rl.tools.threads import in_thread
from lightning_rl.trajectories.conversation import text_of

TAG = "user"
Messages = Sequence[Mapping[str, Any]]
# From the task, the messages and the rollout's LLM to what the user says next; None when they are done.
User = Callable[[Any, Messages, LLM], Awaitable[str | None]]


class UserError(Explained, TypeError):
    """A user simulator said what is no text."""


def user_of(turns: UserTurns) -> User | None:
    """The user that the config names; None where it names none. Raises NotLoadable for a function that is not there."""
    if turns.path is not None:
        return FunctionUser(load(turns.path, "user simulator"), turns.path)
    return None if turns.model is None else ModelUser(turns.model, turns.prompt, turns.done)


class FunctionUser:
    """A function of (task, messages), sync (then in a thread) or async."""

    def __init__(self, function: Callable[[Any, Messages], Any], name: str = "user simulator") -> None:
        self._function = function
        self._name = name

    async def __call__(self, task: Any, messages: Messages, llm: LLM) -> str | None:
        """See `User`."""
        if inspect.iscoroutinefunction(self._function):
            text = await self._function(task, messages)
        else:
            text = await in_thread(self._function, task, messages)  # of its own: each rollout's user may take its time
            if inspect.isawaitable(text):  # of an object whose call is async
                text = await text
        if text is not None and not isinstance(text, str):
            raise UserError(f"{self._name} returned {text!r:.80}; return a text, or None when the user is done")
        return text


class ModelUser:
    """The model `name` plays the user: what the policy said is said to it, and what the user said it said itself."""

    def __init__(self, name: str, prompt: str, done: str) -> None:
        self._name = name
        self._prompt = prompt
        self._done = done

    async def __call__(self, task: Any, messages: Messages, llm: LLM) -> str | None:
        """See `User`."""
        scene = task.get("user_prompt") if isinstance(task, Mapping) else None
        system = "\n\n".join(filter(None, [scene, self._prompt]))
        chat: Any = [{"role": "system", "content": system}, *_from_the_other_side(messages)]
        answer = await llm.for_agent(TAG).async_openai().chat.completions.create(model=self._name, messages=chat)
        text = (answer.choices[0].message.content or "").strip()
        return None if not text or self._done in text else text


def _from_the_other_side(messages: Messages) -> list[dict[str, str]]:
    """The texts of user and policy, their roles exchanged; the user sees neither tools nor the system's words."""
    roles = {"user": "assistant", "assistant": "user"}
    turns = [(roles[message["role"]], text_of(message)) for message in messages if message.get("role") in roles]
    return [{"role": role, "content": text} for role, text in turns if text]
