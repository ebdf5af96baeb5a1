"""An answer becomes the response of OpenAI Responses: output items, whole or as events. Pure.

Its items are its reasoning, its text, then its tool calls. It leaves at least a message or a call, if only an empty
message: clients send back the items that they were given, and an answer without any would be lost to the history.
The items name its call in their ids.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal

from lightning_rl_proxy.dialects.base import Opening, Request, sse
from lightning_rl_proxy.dialects.chat_completions import token_logprobs
from lightning_rl_proxy.dialects.responses_tools import call_items
from lightning_rl_proxy.rendering.base import Delta, ParsedAnswer, SampledToken

ITEM_ID = re.compile(r"(rs|msg|fc|call|ctc|lsh|apc)_([0-9a-f]{32})_(\d+)")

# What a response repeats of its request, and says where the request says nothing. The temperature that nobody asked for
# is the algorithm's business.
_REPEATED: dict[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}


def response_id(call_id: str) -> str:
    """The id by which clients continue the answer of a call."""
    return f"resp_{call_id}"


class ResponseEvents:
    """See `Events`: numbered `response.*` events, whose last is the response as `serialize` gives it.

    Text may come behind a call. So the message stays open until the answer is complete, and the calls are told then.
    Reasoning that comes when text has begun stands in the last event alone.
    """

    def __init__(self, request: Request, opening: Opening) -> None:
        self._request = request
        self._opening = opening
        self._number = 0
        self._index = 0  # of the item that is open, or comes next
        self._reasoning: list[str] = []
        self._writing = False
        self._tokens: list[SampledToken] = []  # since the last text

    def start(self) -> bytes:
        response = response_of(self._request, self._opening, None)
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def delta(self, index: int, delta: Delta) -> bytes:
        self._tokens += delta.tokens or ()
        if not delta.text or delta.kind == "tool_call":
            return b""
        return self._think(delta.text) if delta.kind == "reasoning" else self._write(delta.text)

    def stop(self, index: int, answer: ParsedAnswer) -> bytes:
        events = []
        for item in _output(self._request, self._opening, answer):
            if item["type"] == "message":
                events.append(self._begin_message() + self._end(item))
            elif item["type"] == "function_call":
                events.append(self._end_reasoning() + self._call(item))
            elif item["type"] == "custom_tool_call":
                events.append(self._end_reasoning() + self._custom_call(item))
            elif item["type"] != "reasoning":
                ended = self._end_reasoning()  # first: it counts events and items on
                begun = self._event("output_item.added", output_index=self._index, item=item)
                events.append(ended + begun + self._done(item))
        return b"".join(events)

    def end(self, answers: Sequence[ParsedAnswer]) -> bytes:
        response = response_of(self._request, self._opening, answers[0])
        return self._event(response["status"], response=response)

    def _think(self, text: str) -> bytes:
        if self._writing:
            return b""
        item = _reasoning(self._opening, "")
        begun = b"" if self._reasoning else self._begin(item)
        self._reasoning.append(text)
        return begun + self._event("reasoning_text.delta", **self._at(item), delta=text)

    def _write(self, text: str) -> bytes:
        begun = self._begin_message()
        at = self._at(_message(self._opening, "", "in_progress", []))
        logprobs, self._tokens = _logprobs(self._tokens, self._request), []
        return begun + self._event("output_text.delta", **at, delta=text, logprobs=logprobs)

    def _begin_message(self) -> bytes:
        if self._writing:
            return b""
        ended = self._end_reasoning()
        self._writing = True
        return ended + self._begin(_message(self._opening, "", "in_progress", []))

    def _end_reasoning(self) -> bytes:
        if self._index or not self._reasoning or self._writing:
            return b""
        return self._end(_reasoning(self._opening, "".join(self._reasoning)))

    def _begin(self, item: dict[str, Any]) -> bytes:
        added = self._event("output_item.added", output_index=self._index, item=item | {"content": []})
        return added + self._event("content_part.added", **self._at(item), part=item["content"][0])

    def _end(self, item: dict[str, Any]) -> bytes:
        part = item["content"][0]
        fields = {name: part[name] for name in ("text", "logprobs") if name in part}
        done = self._event(f"{part['type']}.done", **self._at(item), **fields)
        return done + self._event("content_part.done", **self._at(item), part=part) + self._done(item)

    def _call(self, item: dict[str, Any]) -> bytes:
        at = {"item_id": item["id"], "output_index": self._index}
        begun = item | {"arguments": "", "status": "in_progress"}
        return b"".join(
            (
                self._event("output_item.added", output_index=self._index, item=begun),
                self._event("function_call_arguments.delta", **at, delta=item["arguments"]),
                self._event("function_call_arguments.done", **at, name=item["name"], arguments=item["arguments"]),
                self._done(item),
            )
        )

    def _custom_call(self, item: dict[str, Any]) -> bytes:
        at = {"item_id": item["id"], "output_index": self._index}
        return b"".join(
            (
                self._event("output_item.added", output_index=self._index, item=item | {"input": ""}),
                self._event("custom_tool_call_input.delta", **at, delta=item["input"]),
                self._event("custom_tool_call_input.done", **at, input=item["input"]),
                self._done(item),
            )
        )

    def _done(self, item: dict[str, Any]) -> bytes:
        done = self._event("output_item.done", output_index=self._index, item=item)
        self._index += 1
        return done

    def _at(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": self._index, "content_index": 0}

    def _event(self, name: str, /, **data: Any) -> bytes:
        kind = f"response.{name}"
        number, self._number = self._number, self._number + 1
        return sse({"type": kind, "sequence_number": number} | data, kind)


def response_of(request: Request, opening: Opening, answer: ParsedAnswer | None) -> dict[str, Any]:
    """The response; before its answer it is in progress and empty."""
    status, reason = ("in_progress", None) if answer is None else _status(answer)
    return {name: _repeated(default, request.fields.get(name)) for name, default in _REPEATED.items()} | {
        "id": response_id(opening.call_id),
        "object": "response",
        "created_at": opening.created,
        "model": opening.model,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": reason} if reason else None,
        "output": [] if answer is None else _output(request, opening, answer),
        "usage": None if answer is None else _usage(opening, answer),
    }


def _repeated(default: Any, value: Any) -> Any:
    if value is None:
        return default
    return default | value if isinstance(default, dict) else value


def _status(answer: ParsedAnswer) -> tuple[Literal["completed", "incomplete"], str | None]:
    if answer.finish_reason == "length":
        return "incomplete", "max_output_tokens"
    if answer.finish_reason == "content_filter":
        return "incomplete", "content_filter"
    return "completed", None


def _output(request: Request, opening: Opening, answer: ParsedAnswer) -> list[dict[str, Any]]:
    items = [_reasoning(opening, answer.reasoning)] if answer.reasoning else []
    if answer.content or not answer.tool_calls:
        # As in Chat Completions they are those of all tokens: which of them are the text's is not known.
        logprobs = _logprobs(answer.tokens(), request) if request.logprobs else []
        items.append(_message(opening, answer.content, _status(answer)[0], logprobs))
    return items + call_items(request, opening, answer)


def _reasoning(opening: Opening, text: str) -> dict[str, Any]:
    """Reasoning is there in full, so it is no summary."""
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{opening.call_id}_0", "type": "reasoning", "summary": [], "content": content}


def _message(opening: Opening, text: str, status: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {
        "id": f"msg_{opening.call_id}_0",
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [part],
    }


def _logprobs(tokens: Sequence[SampledToken], request: Request) -> list[dict[str, Any]]:
    """As of Chat Completions; this API has no null for bytes that are not known."""
    entries = token_logprobs(tokens, request) or []
    return [
        _with_bytes(entry) | {"top_logprobs": [_with_bytes(one) for one in entry["top_logprobs"]]} for entry in entries
    ]


def _with_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    return entry if entry["bytes"] is not None else entry | {"bytes": []}


def _usage(opening: Opening, answer: ParsedAnswer) -> dict[str, Any]:
    """The tokens; those of reasoning are not counted apart, nor is what an engine cached."""
    return {
        "input_tokens": opening.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": opening.prompt_tokens + answer.output_tokens,
    }
