"""Why a request continues no call: what differs between it and the earlier conversation that is nearest to it.

A request that repeats a known prompt whole is another sample of it, and one that holds none of the attempt's answers
has nothing to continue: neither has gone wrong. Pure, and linear in the messages.
"""

from typing import Any

import msgspec

from lightning_rl_adapters import semconv
from lightning_rl_adapters.semconv import ForkCause
from lightning_rl_proxy.forest.message_fingerprint import ConversationFingerprint, MessageFingerprint


class Fork(msgspec.Struct, frozen=True):
    """A cause, the first message of the request that differs, and the first token, each where it is known."""

    cause: ForkCause
    message: int | None = None
    role: str | None = None
    token: int | None = None

    def attributes(self) -> dict[str, Any]:
        """What a span says of it."""
        at = {"message": self.message, "role": self.role, "token": self.token}
        place = {name: value for name, value in at.items() if value is not None}
        return {semconv.FORK_CAUSE: self.cause.value} | ({semconv.FORK_AT: place} if place else {})


def find(
    request: ConversationFingerprint, earlier: ConversationFingerprint, shared: int, *, holds_answer: bool
) -> Fork | None:
    """The fork of `request` from `earlier`, whose first `shared` messages are equal; None for another sample of a
    prompt.

    `holds_answer`: whether a message of `request` is an answer of the attempt.
    """
    whole = shared == len(request.body)
    if request.head != earlier.head and (whole or any(echo.role == "assistant" for echo in request.body[:shared])):
        cause = _other_head(request, earlier) if holds_answer else ForkCause.NEW_CONVERSATION
    elif whole:
        return None
    else:
        cause = _cause(request.body, earlier.body, shared, holds_answer=holds_answer)
    return Fork(cause, *_first_message(request, earlier, shared))


def first_difference(ids: list[int], others: list[int]) -> int:
    """The index of the first token that differs; where one is the beginning of the other, its length."""
    n = min(len(ids), len(others))
    if ids[:n] == others[:n]:
        return n
    return next(i for i in range(n) if ids[i] != others[i])


def _other_head(request: ConversationFingerprint, previous: ConversationFingerprint) -> ForkCause:
    return ForkCause.TOOLS_CHANGED if request.head.tools != previous.head.tools else ForkCause.SYSTEM_CHANGED


def _first_message(
    request: ConversationFingerprint, previous: ConversationFingerprint, shared: int
) -> tuple[int, str] | tuple[None, None]:
    """The index and role of the first message of `request` that differs, if one does."""
    systems, others = request.head.systems, previous.head.systems
    roles = ["system"] * len(systems) + [echo.role for echo in request.body]
    at = len(systems) + shared
    if systems != others:
        at = next((i for i, (one, other) in enumerate(zip(systems, others, strict=False)) if one != other), -1)
        at = min(len(systems), len(others)) if at < 0 else at
    return (at, roles[at]) if at < len(roles) else (None, None)


def _cause(
    messages: list[MessageFingerprint], previous: list[MessageFingerprint], at: int, *, holds_answer: bool
) -> ForkCause:
    """The cause where `messages[at]` is the first message that differs."""
    if at == len(previous):
        return (
            ForkCause.NOT_APPEND_ONLY
        )  # it goes on behind the whole of `previous`, with an answer that nobody sampled
    answer_differs = at > 0 and previous[at].role == "assistant"
    if not holds_answer and not answer_differs:
        return ForkCause.NEW_CONVERSATION
    if _messages_are_gone(messages, previous, at):
        return ForkCause.TRUNCATED_BY_CLIENT
    message, previous_message = messages[at], previous[at]
    if message.role != previous_message.role:
        return ForkCause.EDITED_TEXT
    if message.role == "system":
        return ForkCause.SYSTEM_CHANGED
    return ForkCause.TOOL_CALL_CHANGED if message.calls != previous_message.calls else ForkCause.EDITED_TEXT


def _messages_are_gone(messages: list[MessageFingerprint], previous: list[MessageFingerprint], at: int) -> bool:
    """Whether the first message that both hold behind `at` stands earlier in `messages`, or an answer was left out."""
    places: dict[MessageFingerprint, int] = {}
    for index in range(len(previous) - 1, at, -1):
        places[previous[index]._replace(ids=())] = index
    for index in range(at, len(messages)):
        place = places.get(messages[index]._replace(ids=()))
        if place is not None:
            return place > index
    return previous[at].role in ("assistant", "tool") and messages[at].role not in ("assistant", "tool")
