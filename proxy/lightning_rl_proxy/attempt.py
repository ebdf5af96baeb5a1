"""One attempt's live forest: find the place of a request, continue it at token level, commit the answer.

A request's place depends on its messages alone: the deepest answered call whose conversation, as the client saw it,
is a prefix of the request's. Several that fit are equal for the client; the one answered last is continued. No lock is
held over a generation, so calls may overlap as they like. What a chat backend's prompt was in tokens is known after its
answer, if ever: its place by messages comes first, and `with_prompt` corrects it.
"""

import asyncio
import hashlib
import json
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from lightning_rl_adapters.call import Call
from lightning_rl_proxy.address import Address
from lightning_rl_proxy.ledger import AttemptInfo
from lightning_rl_proxy.rendering import Renderer


class LiveCall:
    """An answered call that later calls may continue."""

    __slots__ = ("call", "parent")

    def __init__(self, call: Call, parent: "LiveCall | None") -> None:
        self.call = call
        self.parent = parent

    def context(self) -> tuple[list[int], list[int]]:
        """The call's whole prompt and its response."""
        chain: list[Call] = []
        node = self.parent
        while node is not None:
            chain.append(node.call)
            node = node.parent
        prompt: list[int] = []
        for call in reversed(chain):
            prompt += call.prompt_ids
            prompt += call.response_ids
        return prompt + self.call.prompt_ids, self.call.response_ids


class Place:
    """Where a request goes: the call it continues (or None), the ids it adds, the whole prompt, the cause of a fork."""

    __slots__ = ("added_ids", "fork_cause", "key", "new_messages", "parent", "prompt_ids")

    def __init__(
        self,
        parent: LiveCall | None,
        added_ids: list[int],
        prompt_ids: list[int],
        new_messages: Sequence[dict[str, Any]],
        fork_cause: str | None,
        key: bytes,
    ) -> None:
        self.parent = parent
        self.added_ids = added_ids
        self.prompt_ids = prompt_ids
        self.new_messages = new_messages
        self.fork_cause = fork_cause
        self.key = key

    def with_prompt(self, prompt_ids: list[int], messages: Sequence[dict[str, Any]]) -> "Place":
        """This place, now that the ids of its prompt are known; a new root where they do not continue its parent's."""
        prompt, response = ([], []) if self.parent is None else self.parent.context()
        context = prompt + response
        if prompt_ids[: len(context)] != context:
            return Place(None, prompt_ids, prompt_ids, messages, "not_append_only", self.key)
        added = prompt_ids[len(context) :]
        return Place(self.parent, added, prompt_ids, self.new_messages, self.fork_cause, self.key)


class Exchange:
    """One request in flight or answered: its task, the calls sampled for it, and whether a client received it."""

    def __init__(self, body_key: bytes) -> None:
        self.body_key = body_key
        self.task: asyncio.Task[bytes] | None = None
        self.calls: list[tuple[Call, dict[str, Any]]] = []
        self.commits: list[tuple[bytes, LiveCall]] = []
        self.client_gone = False
        self.recorded = False


class Attempt:
    """The live side of one attempt: what may be continued, what is in flight, and the numbers of its calls."""

    def __init__(self, address: Address, info: AttemptInfo, checked_at: float) -> None:
        self.address = address
        self.info = info
        self.checked_at = checked_at
        self.sealed = not info.open
        self.exchanges: dict[bytes, list[Exchange]] = {}
        self.tokens_received = 0
        self._next_number = 0
        self._answered: dict[bytes, LiveCall] = {}
        self._models: set[str] = set()  # that have answered

    def take_numbers(self, n: int) -> int:
        """Reserve `n` numbers in order of arrival; the first of them."""
        first = self._next_number
        self._next_number += n
        return first

    def find_place(
        self, model: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, renderer: Renderer
    ) -> Place:
        """The place of a request that has just arrived."""
        parent, seen, key = self._continued(model, messages, tools)
        if parent is None:
            return self._root(messages, tools, renderer, key, self._cause(model))
        prompt, response = parent.context()
        new_messages = messages[seen:]
        added = renderer.extend(prompt, response, new_messages, tools) if new_messages else None
        if added is None:
            return self._root(messages, tools, renderer, key, "not_append_only")
        return Place(parent, added, prompt + response + added, new_messages, None, key)

    def find_turn(self, model: str, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None) -> Place:
        """The place by messages alone of a request that nobody here renders: without prompt ids."""
        parent, seen, key = self._continued(model, messages, tools)
        cause = self._cause(model) if parent is None else None
        return Place(parent, [], [], messages[seen:], cause, key)

    def commit(self, exchange: Exchange) -> None:
        """Make the answers of a delivered exchange continuable; of equal conversations the last answered wins."""
        for key, live in exchange.commits:
            self._answered[key] = live
            self._models.add(live.call.model)

    def answered(self, place: Place, call: Call, message: dict[str, Any]) -> tuple[bytes, LiveCall]:
        """The key under which a later request will find the answer `message`, and the call to continue then."""
        return _chain(place.key, message), LiveCall(call, place.parent)

    def joinable(self, body_key: bytes, *, marked_as_retry: bool) -> Exchange | None:
        """The earlier exchange that an equal request joins instead of sampling anew.

        Equal bodies alone are separate samples; it takes a retry mark, or an earlier client that left before its whole
        answer was written. The oldest whose client is gone comes first, then the oldest undelivered.
        """
        earlier = self.exchanges.get(body_key, [])
        for exchange in earlier:
            if exchange.client_gone:
                return exchange
        if not marked_as_retry or not earlier:
            return None
        return next((exchange for exchange in earlier if not exchange.recorded), earlier[-1])

    def _continued(
        self, model: str, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> tuple[LiveCall | None, int, bytes]:
        """The call that a request continues, how many of its messages that call has seen, and the request's key."""
        keys = conversation_keys(model, tools, messages)
        for seen in range(len(messages), 0, -1):
            if (parent := self._answered.get(keys[seen])) is not None:
                return parent, seen, keys[-1]
        return None, 0, keys[-1]

    def _cause(self, model: str) -> str | None:
        """Why a request that continues nothing is no continuation: None where it is the first of its model."""
        return "edited_history" if model in self._models else None

    def _root(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        renderer: Renderer,
        key: bytes,
        cause: str | None,
    ) -> Place:
        ids = renderer.render(messages, tools)
        return Place(None, ids, ids, messages, cause, key)


def new_call_id() -> str:
    """An id for a call."""
    return uuid.uuid4().hex


def conversation_keys(
    model: str, tools: list[dict[str, Any]] | None, messages: Sequence[dict[str, Any]]
) -> list[bytes]:
    """`keys[i]` stands for the first i messages (and model, tools); equal keys are one conversation to the client."""
    key = hashlib.blake2b(msgspec.json.encode([model, tools or []]), digest_size=16).digest()
    keys = [key]
    for message in messages:
        key = _chain(key, message)
        keys.append(key)
    return keys


def _chain(key: bytes, message: dict[str, Any]) -> bytes:
    return hashlib.blake2b(key + msgspec.json.encode(_essence(message)), digest_size=16).digest()


def _essence(message: dict[str, Any]) -> tuple[Any, ...]:
    """What a client keeps of a message when it sends it back: not ids, not reasoning, not the spacing at its ends."""
    content, tool_calls = message.get("content"), message.get("tool_calls")
    text = content.strip() if isinstance(content, str) else _text(content)
    calls = [_tool_call(call) for call in tool_calls] if isinstance(tool_calls, list) else []
    return message.get("role"), text, calls


def _text(content: Any) -> Any:
    """Content that is no string: parts of text are their text, others (images, sound) stay as they are."""
    if not content:
        return ""
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content).strip()
    return content


def _tool_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return {name: value for name, value in call.items() if name != "id"} if isinstance(call, dict) else call
    return function.get("name"), _arguments(function.get("arguments"))


def _arguments(text: Any) -> str:
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except json.JSONDecodeError:
        return str(text)
    return json.dumps(value, sort_keys=True)
