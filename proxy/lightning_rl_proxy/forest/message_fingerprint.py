"""What of a message identifies it to the client that sends it back: what the model would see of it, and no more.

Clients keep the history in objects of their own and write it anew with every request. So a message is its role, its
text without the white space at its ends, and its tool calls by name and argument values; which call a tool message
answers counts, what that call's id reads like does not. Ids, nulls, spacing and providers' extras come and go. Other
text, other values, another order of calls, another image are another message. Reasoning may be left out, as most
clients do: it is no part of a message, but where it is there it is a `thought` that tells answers apart. Pure, and
linear in what is read: a history that was read before is compared with what it was then, by equality of the raw
messages.
"""

import ast
import hashlib
import math
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

_THOUGHT = ("reasoning_content", "reasoning")  # fields of a message, the first that says something counts
_REASONING = frozenset({"thinking", "redacted_thinking", "reasoning"})  # types of content parts
_EXACT = 2**53  # whole floats below are whole numbers
_REPR = 10_000  # characters; longer arguments are not tried as Python's


class MessageFingerprint(NamedTuple):
    """A message as its client keeps it: role, digests of its text and of its calls, and the ids of those calls.

    `calls` is empty where there are none; of a tool message it is the call that the message answers, and `ids` the id
    by which it names that call. `ids` are no part of the message's identity.
    """

    role: str
    text: bytes
    calls: bytes
    ids: tuple[str, ...]

    def same(self, other: "MessageFingerprint") -> bool:
        """Whether the model would see the same."""
        return self[:3] == other[:3]


class Head(NamedTuple):
    """What stands before the first turn: a digest of the tools, and the system messages."""

    tools: bytes
    systems: tuple[bytes, ...]


class ConversationFingerprint(NamedTuple):
    """A head, and the messages behind it."""

    head: Head
    body: list[MessageFingerprint]


class Numbering:
    """The tool calls of a conversation numbered from 0, which is how the tool messages say what they answer.

    `called` is the number of calls so far, `answered` that of the first which a tool message without an id answers, and
    `earlier` finds the number of a call by its id in the part of the conversation that was read before.
    """

    def __init__(self, called: int = 0, answered: int = 0, earlier: Callable[[str], int | None] = lambda _: None):
        self.called = called
        self.answered = answered
        self._earlier = earlier
        self._numbers: dict[str, int] = {}  # by their latest id

    def numbered(self, echo: MessageFingerprint) -> MessageFingerprint:
        """The conversation's next message, with the call that it answers if it is a tool's."""
        if echo.role == "tool":
            number = self._number(echo.ids[0])
            # A client that drops the ids answers its calls in their order.
            number = self.answered if number is None else number
            self.answered += 1
            return echo._replace(calls=b"answers %d" % number)
        if echo.calls:
            self.answered = self.called
            for call_id in echo.ids:
                self._numbers[call_id] = self.called
                self.called += 1
        return echo

    def _number(self, call_id: str) -> int | None:
        number = self._numbers.get(call_id)
        return self._earlier(call_id) if number is None else number


def read(messages: Sequence[dict[str, Any]], numbering: Numbering) -> list[MessageFingerprint]:
    """The messages that come next in the conversation that `numbering` has counted so far."""
    return [numbering.numbered(fingerprint_of(message)) for message in messages]


def split(fingerprints: list[MessageFingerprint], tools: bytes) -> ConversationFingerprint:
    """A whole conversation's messages as its head, with the digest of its tools, and what follows."""
    first = next((i for i, echo in enumerate(fingerprints) if echo.role != "system"), len(fingerprints))
    return ConversationFingerprint(Head(tools, tuple(echo.text for echo in fingerprints[:first])), fingerprints[first:])


def digest_tools(tools: Any, kwargs: Any = None) -> bytes:
    """What identifies a request's tools, and what else its prompt is rendered with where that is not as for others."""
    if kwargs:
        return _digest(_json([tools or [], kwargs]))
    return _digest(_json(tools)) if tools else _NO_TOOLS


def comparable(message: dict[str, Any]) -> dict[str, Any] | None:
    """The message, if whatever equals it in Python is the same JSON: one without numbers, since 1 == 1.0 == True."""
    plain = all(type(value) is str for value in message.values())
    return message if plain or not _holds_number(message) else None


def fingerprint_of(message: dict[str, Any]) -> MessageFingerprint:
    """One message, alone."""
    role = str(message.get("role"))
    content = message.get("content")
    text = b"text " + _bytes(content.strip()) if isinstance(content, str) else _parts(content)
    calls: bytes = b""
    ids: tuple[str, ...] = ()
    if message.get("tool_calls") or message.get("function_call") or message.get("audio"):
        calls, ids = _calls(message)
    if role == "tool":
        ids = (str(message.get("tool_call_id") or ""),)
    return MessageFingerprint("system" if role == "developer" else role, _digest(text), calls, ids)


def thought(message: dict[str, Any]) -> bytes:
    """What identifies the reasoning that a message says; empty where it says none, or none that can be read."""
    texts = (text.strip() for name in _THOUGHT if isinstance(text := message.get(name), str))
    return thought_of(next((text for text in texts if text), None))


def thought_of(reasoning: str | None) -> bytes:
    """The same of the reasoning itself."""
    text = "" if reasoning is None else reasoning.strip()
    return _digest(_bytes(text)) if text else b""


@lru_cache
def seed(model: str) -> bytes:
    """The key of a conversation with `model` before its first turn."""
    return _digest(model.encode())


def chain(key: bytes, echo: MessageFingerprint) -> bytes:
    """The key of the conversation `key` with one message more."""
    return _digest(b"%b %b %b %b" % (key, echo.text, echo.calls, echo.role.encode()))


def _holds_number(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds_number(inner) for inner in value.values())
    if isinstance(value, list):
        return any(_holds_number(inner) for inner in value)
    return not isinstance(value, str | None)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


_NO_TOOLS = _digest(_json([]))


def _parts(content: Any) -> bytes:
    """Content that is no string: runs of text parts are their text, others (images, sound) what they hold."""
    if not content:
        return b"text "
    if not isinstance(content, list):
        return b"parts " + _json(content)
    runs: list[Any] = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if isinstance(part, dict) and part.get("type") in _REASONING:
            continue
        if not isinstance(text, str):
            runs.append({k: v for k, v in part.items() if k != "cache_control"} if isinstance(part, dict) else [part])
        elif runs and isinstance(runs[-1], str):
            runs[-1] += text
        else:
            runs.append(text)
    if runs and isinstance(runs[0], str):
        runs[0] = runs[0].lstrip()
    if runs and isinstance(runs[-1], str):
        runs[-1] = runs[-1].rstrip()
    runs = [run for run in runs if run != ""]
    if not runs or (len(runs) == 1 and isinstance(runs[0], str)):
        return b"text " + _bytes("".join(runs))
    return b"parts " + _json(runs)


def _calls(message: dict[str, Any]) -> tuple[bytes, tuple[str, ...]]:
    tool_calls, audio = message.get("tool_calls"), message.get("audio")
    listed = tool_calls if isinstance(tool_calls, list) else []
    calls = [_tool_call(call) for call in listed]
    ids = tuple(str(call.get("id")) if isinstance(call, dict) else "" for call in listed)
    if message.get("function_call"):
        calls.append(_tool_call({"function": message["function_call"]}))
    if audio:
        calls.append({"audio": audio.get("id") if isinstance(audio, dict) else audio})
    return _digest(_json(calls)), ids


def _tool_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict):
        return [function.get("name"), *_arguments(function.get("arguments"))]
    return {k: v for k, v in call.items() if k not in ("id", "index")} if isinstance(call, dict) else call


def _arguments(arguments: Any) -> list[Any]:
    """The values of arguments, however they were written; the text of those that are neither JSON nor Python."""
    text = arguments.strip() if isinstance(arguments, str) else None
    if not arguments or text == "":
        return [{}]
    try:
        return [msgspec.Raw(_json(_plain(arguments if text is None else value_of(text, "{"))))]
    except (TypeError, ValueError, OverflowError, RecursionError, MemoryError):
        return [None, _bytes(str(arguments) if text is None else text).hex()]


def value_of(text: str, opening: str) -> Any:
    """The value that a text writes as JSON, or as Python prints a dict or list, which begins with `opening`. Raises
    ValueError, RecursionError or MemoryError for another text."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        if text[0] != opening or len(text) > _REPR:
            raise
    try:
        with warnings.catch_warnings(action="ignore"):  # of what reads oddly as Python: it is seldom meant as such
            value = ast.literal_eval(text)  # which builds literals alone, and calls nothing
    except SyntaxError as error:
        raise ValueError(str(error)) from error
    if not _is_json(value):
        raise ValueError("a literal that JSON does not have")
    return value


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_json(inner) for name, inner in value.items())
    if isinstance(value, list):
        return all(_is_json(inner) for inner in value)
    return math.isfinite(value) if isinstance(value, float) else isinstance(value, str | int | None)


def _plain(value: Any) -> Any:
    """A value as every JSON writer would have it: 1.0 is 1."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    return value
