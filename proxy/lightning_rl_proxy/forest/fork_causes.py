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
        known = {name: value for name, value in at.items() if value is not None}
        return {semconv.FORK_CAUSE: self.cause.value} | ({semconv.FORK_AT: known} if known else {})


def find(
    asked: ConversationFingerprint, known: ConversationFingerprint, shared: int, *, holds_answer: bool
) -> Fork | None:
    """The fork of `asked` from `known`, whose first `shared` messages are equal; None for another sample of a prompt.

    `holds_answer`: whether a message of `asked` is an answer of the attempt.
    """
    whole = shared == len(asked.body)
    if asked.head != known.head and (whole or any(echo.role == "assistant" for echo in asked.body[:shared])):
        cause = _other_head(asked, known) if holds_answer else ForkCause.NEW_CONVERSATION
    elif whole:
        return None
    else:
        cause = _cause(asked.body, known.body, shared, holds_answer=holds_answer)
    return Fork(cause, *_first_message(asked, known, shared))


def first_difference(ids: list[int], others: list[int]) -> int:
    """The index of the first token that differs; where one is the beginning of the other, its length."""
    n = min(len(ids), len(others))
    if ids[:n] == others[:n]:
        return n
    return next(i for i in range(n) if ids[i] != others[i])


def _other_head(asked: ConversationFingerprint, known: ConversationFingerprint) -> ForkCause:
    return ForkCause.TOOLS_CHANGED if asked.head.tools != known.head.tools else ForkCause.SYSTEM_CHANGED


def _first_message(
    asked: ConversationFingerprint, known: ConversationFingerprint, shared: int
) -> tuple[int, str] | tuple[None, None]:
    """The index and role of the first message of `asked` that differs, if one does."""
    mine, theirs = asked.head.systems, known.head.systems
    roles = ["system"] * len(mine) + [echo.role for echo in asked.body]
    at = len(mine) + shared
    if mine != theirs:
        at = next((i for i, (one, other) in enumerate(zip(mine, theirs, strict=False)) if one != other), -1)
        at = min(len(mine), len(theirs)) if at < 0 else at
    return (at, roles[at]) if at < len(roles) else (None, None)


def _cause(
    asked: list[MessageFingerprint], known: list[MessageFingerprint], at: int, *, holds_answer: bool
) -> ForkCause:
    """The cause where `asked[at]` is the first message that differs."""
    if at == len(known):
        return ForkCause.NOT_APPEND_ONLY  # it goes on behind the whole of `known`, with an answer that nobody sampled
    answer_differs = at > 0 and known[at].role == "assistant"
    if not holds_answer and not answer_differs:
        return ForkCause.NEW_CONVERSATION
    if _messages_are_gone(asked, known, at):
        return ForkCause.TRUNCATED_BY_CLIENT
    mine, theirs = asked[at], known[at]
    if mine.role != theirs.role:
        return ForkCause.EDITED_TEXT
    if mine.role == "system":
        return ForkCause.SYSTEM_CHANGED
    return ForkCause.TOOL_CALL_CHANGED if mine.calls != theirs.calls else ForkCause.EDITED_TEXT


def _messages_are_gone(asked: list[MessageFingerprint], known: list[MessageFingerprint], at: int) -> bool:
    """Whether the first message that both hold behind `at` stands earlier in `asked`, or an answer was left out."""
    places: dict[MessageFingerprint, int] = {}
    for index in range(len(known) - 1, at, -1):
        places[known[index]._replace(ids=())] = index
    for index in range(at, len(asked)):
        place = places.get(asked[index]._replace(ids=()))
        if place is not None:
            return place > index
    return known[at].role in ("assistant", "tool") and asked[at].role not in ("assistant", "tool")
