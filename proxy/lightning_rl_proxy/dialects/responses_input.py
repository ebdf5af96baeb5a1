"""Input items of OpenAI Responses become messages. Pure.

The items of one answer, which name its call in their ids, become one message again, whatever their order.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from lightning_rl_proxy.dialects.base import refused, text_of
from lightning_rl_proxy.dialects.responses_output import ITEM_ID, response_id
from lightning_rl_proxy.dialects.responses_tools import called, called_with_text, named_in
from lightning_rl_proxy.dialects.wire.responses import ResponsesWire

_ROLES = ("user", "assistant", "system", "developer")


class _Piece(NamedTuple):
    """What one item says of an answer: its reasoning, its text or a call. `answer` is the call that it came from."""

    kind: Literal["reasoning", "message", "call"]
    value: Any
    answer: str | None


class _Said(msgspec.Struct):
    """One answer, put together from the items that a client sends back."""

    content: str | list[dict[str, Any]] | None = None
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    answer: str | None = None

    def ends_before(self, piece: _Piece) -> bool:
        """Whether an item is another answer's. Ids tell; where there are none, reasoning comes first, and text once."""
        if piece.kind == "message" and self.content is not None:
            return True
        if piece.answer is not None and self.answer is not None:
            return piece.answer != self.answer
        return piece.kind == "reasoning" and (self.content is not None or bool(self.calls))

    def add(self, piece: _Piece) -> None:
        self.answer = self.answer or piece.answer
        if piece.kind == "message":
            self.content = piece.value
        elif piece.kind == "call":
            self.calls.append(piece.value)
        elif piece.value:
            self.reasoning.append(piece.value)

    def empty(self) -> bool:
        """Whether this is reasoning that cannot be read and led to nothing."""
        return self.content is None and not self.calls and not self.reasoning

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content or ""}
        if self.calls:
            message["tool_calls"] = self.calls
        if self.reasoning:
            message["reasoning_content"] = "\n".join(self.reasoning)
        return message


def messages_of(wire: ResponsesWire, responses: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The messages of a request, its instructions first. What is `kept` of `responses`, by their ids, is where an
    `item_reference` finds its item. Raises GatewayError(400) for what is no item."""
    messages = [{"role": "system", "content": wire.instructions}] if wire.instructions else []
    if isinstance(wire.input, str):
        return [*messages, {"role": "user", "content": wire.input}]
    if not wire.input and wire.previous_response_id is None:
        raise refused("input", "is missing; it is a text or a list of items")
    pieces: list[_Piece] = []
    for index, item in enumerate(wire.input or ()):
        read = _item(f"input[{index}]", item, responses)
        if isinstance(read, dict):
            messages += [*_answers(pieces), read]
            pieces = []
        else:
            pieces += read
    return messages + _answers(pieces)


def _item(where: str, item: Any, responses: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any] | list[_Piece]:
    """An item as a message, or as what it says of an answer."""
    if not isinstance(item, dict):
        raise refused(where, f"is no item but {type(item).__name__}")
    if isinstance(space := item.get("namespace"), str):
        item = named_in(space, item)
    kind = item.get("type")
    match ("message" if "role" in item else "item_reference") if kind is None else kind:
        case "message":
            return _message(where, item)
        case "function_call":
            return [_Piece("call", called(where, item), _answer_of(item))]
        case "custom_tool_call" | "local_shell_call" | "apply_patch_call":
            call = called_with_text(where, str(kind), item, _recorded_call(item.get("call_id"), responses))
            return [_Piece("call", call, _answer_of(item))]
        case "local_shell_call_output" if "call_id" not in item:
            return {
                "role": "tool",
                "tool_call_id": text_of(where, item, "id"),
                "content": text_of(where, item, "output"),
            }
        case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output" | "apply_patch_call_output":
            content = _content(f"{where}.output", item.get("output", "" if kind == "apply_patch_call_output" else None))
            return {"role": "tool", "tool_call_id": text_of(where, item, "call_id"), "content": content}
        case "reasoning":
            return [_Piece("reasoning", _reasoned(where, item), _answer_of(item))]
        case "item_reference":
            return _referred(where, item, responses)
        case _:
            raise refused(
                f"{where}.type",
                f"is {kind!r}; items are message, reasoning, item_reference, and calls and outputs of function_call, "
                "custom_tool_call, local_shell_call, apply_patch_call",
                "unsupported_parameter",
            )


def _message(where: str, item: dict[str, Any]) -> dict[str, Any] | list[_Piece]:
    role = item.get("role")
    if role not in _ROLES:
        raise refused(f"{where}.role", f"is {role!r}; it is one of {list(_ROLES)}")
    content = _content(f"{where}.content", item.get("content"))
    if role == "assistant":
        return [_Piece("message", content, _answer_of(item))]
    return {"role": "system" if role == "developer" else role, "content": content}


def _reasoned(where: str, item: dict[str, Any]) -> str:
    """The reasoning as far as it can be read: in full, else in summary."""
    for name in ("content", "summary"):
        parts = item.get(name)
        if not isinstance(parts, list | None):
            raise refused(f"{where}.{name}", "is no list of parts")
        if parts:
            return "\n".join(text_of(f"{where}.{name}[{i}]", part, "text") for i, part in enumerate(parts))
    return ""


def _recorded_call(call_id: Any, responses: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any] | None:
    """The call of that id as the model made it, where it is one of ours and its response is known."""
    match = ITEM_ID.fullmatch(call_id) if isinstance(call_id, str) else None
    messages = responses.get(response_id(match[2])) if match else None
    calls = messages[-1].get("tool_calls") or () if messages else ()
    return next((call for call in calls if call["id"] == call_id), None)


def _referred(where: str, item: dict[str, Any], responses: Mapping[str, list[dict[str, Any]]]) -> list[_Piece]:
    """What the item that is named says, from the answer that it was an item of."""
    named = text_of(where, item, "id")
    match = ITEM_ID.fullmatch(named)
    messages = responses.get(response_id(match[2])) if match else None
    if match and messages:
        kind, number, message = match[1], int(match[3]), messages[-1]
        if kind == "rs":
            return [_Piece("reasoning", message.get("reasoning_content"), match[2])]
        if kind == "msg":
            return [_Piece("message", message["content"], match[2])]
        if number < len(calls := message.get("tool_calls", ())):
            return [_Piece("call", calls[number], match[2])]
    raise refused(f"{where}.id", f"is {named!r}, no item of an answer that is known here; send the item itself")


def _content(where: str, content: Any) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused(where, "is neither text nor parts")
    parts = [_part(f"{where}[{i}]", part) for i, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(where: str, part: Any) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise refused(where, f"is no part but {type(part).__name__}")
    match part.get("type"):
        case "input_text" | "output_text":
            return {"type": "text", "text": text_of(where, part, "text")}
        case "refusal":
            return {"type": "text", "text": text_of(where, part, "refusal")}
        case "input_image":
            if part.get("file_id") is not None:
                raise refused(f"{where}.file_id", "names a file, and no files are kept here", "unsupported_parameter")
            detail = {"detail": part["detail"]} if part.get("detail") else {}
            return {"type": "image_url", "image_url": {"url": text_of(where, part, "image_url")} | detail}
        case kind:
            raise refused(
                f"{where}.type",
                f"is {kind!r}; parts are input_text, input_image, output_text, refusal",
                "unsupported_parameter",
            )


def _answer_of(item: dict[str, Any]) -> str | None:
    """The call whose answer an item is part of, where its ids still tell."""
    for name in ("id", "call_id"):
        match = ITEM_ID.fullmatch(item[name]) if isinstance(item.get(name), str) else None
        if match:
            return match[2]
    return None


def _answers(pieces: Sequence[_Piece]) -> list[dict[str, Any]]:
    """Assistant messages of items that follow each other: one per answer."""
    answers: list[_Said] = []
    for piece in pieces:
        if not answers or answers[-1].ends_before(piece):
            answers.append(_Said())
        answers[-1].add(piece)
    return [answer.message() for answer in answers if not answer.empty()]
