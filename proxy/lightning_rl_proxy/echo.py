"""What of a message identifies it to the client that sends it back: what the model would see of it, and no more.

Clients keep the history in objects of their own and write it anew with every request. So a message is its role, its
text without the white space at its ends, and its tool calls by name and argument values; which call a tool message
answers counts, what that call's id reads like does not. Reasoning, ids, nulls, spacing and providers' extras come and
go. Other text, other values, another order of calls, another image are another message. Pure, and linear in the body.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

_REASONING = frozenset({"thinking", "redacted_thinking", "reasoning"})  # types of content parts
_TRUTH = {"true": True, "false": False}
_EXACT = 2**53  # whole floats below are whole numbers


class Echo(NamedTuple):
    """A message as its client keeps it: role, digests of its text and of its calls, and the ids of those calls.

    `calls` is empty where there are none; of a tool message it is the call that the message answers. `ids` are no part
    of the message's identity.
    """

    role: str
    text: bytes
    calls: bytes
    ids: tuple[str, ...]

    def same(self, other: "Echo") -> bool:
        """Whether the model would see the same."""
        return self[:3] == other[:3]


class Head(NamedTuple):
    """What stands before the first turn: a digest of the tools, and the system messages."""

    tools: bytes
    systems: tuple[bytes, ...]


class Conversation(NamedTuple):
    """A head, and the messages behind it."""

    head: Head
    body: list[Echo]


def read(messages: Sequence[dict[str, Any]], tools: Any) -> Conversation:
    """The conversation that a request's messages and tools are."""
    echoes: list[Echo] = []
    numbers: dict[str, int] = {}  # of the calls, through the whole conversation, by their latest id
    called = answered = 0
    for message in messages:
        echo = hear(message)
        if echo.role == "tool":
            # A client that drops the ids answers its calls in their order.
            number = numbers.get(message.get("tool_call_id") or "", answered)
            answered += 1
            echo = echo._replace(calls=b"answers %d" % number)
        elif echo.calls:
            answered = called
            for call_id in echo.ids:
                numbers[call_id] = called
                called += 1
        echoes.append(echo)
    first = next((i for i, echo in enumerate(echoes) if echo.role != "system"), len(echoes))
    head = Head(_digest(_json(tools or [])), tuple(echo.text for echo in echoes[:first]))
    return Conversation(head, echoes[first:])


def hear(message: dict[str, Any]) -> Echo:
    """One message, alone."""
    role = str(message.get("role"))
    content = message.get("content")
    text = b"text " + _bytes(content.strip()) if isinstance(content, str) else _parts(content)
    calls: bytes = b""
    ids: tuple[str, ...] = ()
    if message.get("tool_calls") or message.get("function_call") or message.get("audio"):
        calls, ids = _calls(message)
    return Echo("system" if role == "developer" else role, _digest(text), calls, ids)


def seed(model: str) -> bytes:
    """The key of a conversation with `model` before its first turn."""
    return _digest(model.encode())


def chain(key: bytes, echo: Echo) -> bytes:
    """The key of the conversation `key` with one message more."""
    return _digest(b"%b %b %b %b" % (key, echo.text, echo.calls, echo.role.encode()))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


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
    what = [_tool_call(call) for call in listed]
    ids = tuple(str(call.get("id")) if isinstance(call, dict) else "" for call in listed)
    if message.get("function_call"):
        what.append(_tool_call({"function": message["function_call"]}))
    if audio:
        what.append({"audio": audio.get("id") if isinstance(audio, dict) else audio})
    return _digest(_json(what)), ids


def _tool_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict):
        return [function.get("name"), *_arguments(function.get("arguments"))]
    return {k: v for k, v in call.items() if k not in ("id", "index")} if isinstance(call, dict) else call


def _arguments(given: Any) -> list[Any]:
    """The values of arguments, however they were written; the text of those that are no JSON."""
    text = given.strip() if isinstance(given, str) else None
    if not given or text == "":
        return [{}]
    try:
        return [msgspec.Raw(_json(_plain(given if text is None else msgspec.json.decode(text))))]
    except (msgspec.DecodeError, OverflowError, RecursionError, UnicodeEncodeError):
        return [None, _bytes(str(given) if text is None else text).hex()]


def _plain(value: Any) -> Any:
    """A value as every JSON writer would have it: 1.0 is 1, and "True" is true."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, str):
        return _TRUTH.get(value.lower(), value) if len(value) < 6 else value
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    return value
