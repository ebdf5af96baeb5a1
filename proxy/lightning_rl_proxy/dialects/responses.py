"""OpenAI Responses: input items become messages (`responses_input`), an answer becomes output items
(`responses_output`). Pure.

`previous_response_id` goes on from `kept`, what the response was asked and answered, by `continued`. Instructions are
not carried over.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lightning_rl_proxy.dialects.base import (
    Opening,
    Request,
    Tables,
    no_request,
    refused,
    schema_of_text,
    sse,
    strict_tools,
)
from lightning_rl_proxy.dialects.chat_completions import PING, stops
from lightning_rl_proxy.dialects.responses_input import messages_of
from lightning_rl_proxy.dialects.responses_output import ResponseEvents, response_id, response_of
from lightning_rl_proxy.dialects.responses_tools import shown_tools, tool_choice
from lightning_rl_proxy.dialects.wire.engine_fields import ENGINE_FIELDS, ENGINE_OFF, unsupported
from lightning_rl_proxy.dialects.wire.responses import INCLUDABLE, LOGPROBS, ResponsesWire
from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.rendering.base import ParsedAnswer

__all__ = [
    "NAME", "PING", "TABLES", "ResponseEvents", "continued", "error_event", "events", "instructed", "kept", "parse",
    "previous", "response_id", "serialize", "serialize_error", "unknown_previous",
]  # fmt: skip

NAME = "responses"

TABLES = Tables(
    honoured=frozenset(
        {
            "model", "input", "instructions", "previous_response_id", "tools", "tool_choice", "parallel_tool_calls",
            "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
            "logit_bias", "seed", "stop", "max_output_tokens", "text", "include", "stream",
        }
        | ENGINE_FIELDS
    ),
    hints=frozenset(
        {
            # Whether and how long a model thinks is decided by its chat format and its weights.
            "reasoning",
            "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention",
            "prompt_cache_options", "safety_identifier", "stream_options", "access_programs",
            "client_metadata",
            "background_options",  # of what `background` would need
            "image",  # how images are shrunk
        }
    ),
    off=ENGINE_OFF
    | {
        "background": (False,),
        "conversation": (),
        "max_tool_calls": (),
        "moderation": (),
        "prompt": (),
        # Names that other dialects have for what this one says otherwise.
        "n": (1,),
        "max_tokens": (),
        "max_completion_tokens": (),
        "response_format": ({"type": "text"},),
    },
    relaxed={
        "context_management": "nothing is compacted",
        "top_logprobs": "each token's list holds the sampled one alone",
        "truncation": "nothing is dropped: a prompt that is too long is a 400",
    },
)  # fmt: skip

_LAST = 2**31 - 1  # the highest number of an event


def parse(fields: dict[str, Any], responses: Mapping[str, list[dict[str, Any]]] | None = None) -> Request:
    """See `Dialect`. What is `kept` of `responses`, by their ids, is where an `item_reference` finds its item."""
    try:
        wire = msgspec.convert(fields, ResponsesWire)
    except msgspec.ValidationError as error:
        raise _no_request(error) from error
    tools, unseen = shown_tools(wire.tools or ())
    tools, choice = tool_choice(wire.tool_choice, tools)
    schema, unheld = schema_of_text("text.format", _json_schema(wire.text), choice, tools)
    ignored = TABLES.ignored(fields) + unseen + unheld + strict_tools(wire.tools)
    ignored += [f"text.{name}" for name, value in (wire.text or {}).items() if name != "format" and value is not None]
    return Request(
        model=wire.model,
        messages=messages_of(wire, responses or {}),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=wire.parallel_tool_calls is not False,
        sampling=wire.sampling(
            max_tokens=wire.max_output_tokens,
            stop=stops("stop", wire.stop),
            json_schema=schema,
        ),
        stream=bool(wire.stream),
        logprobs=LOGPROBS in _included(wire.include),
        ignored_fields=ignored,
        fields=fields,
    )


def previous(fields: Mapping[str, Any]) -> str | None:
    """The response that a request continues."""
    named = fields.get("previous_response_id")
    return named if isinstance(named, str) else None


def unknown_previous(previous_id: str) -> GatewayError:
    """A request continues a response that its attempt never gave."""
    return GatewayError(
        400,
        f"Previous response with id '{previous_id}' not found.",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def continued(request: Request, earlier: Sequence[dict[str, Any]]) -> Request:
    """The request behind the messages of the response that it continues; its own instructions stay first."""
    own = instructed(request)
    messages = [*request.messages[:own], *earlier, *request.messages[own:]]
    return msgspec.structs.replace(request, messages=messages)


def kept(request: Request, answer: ParsedAnswer) -> list[dict[str, Any]]:
    """The messages that a later request continues: all that was asked but the instructions, and the answer."""
    reasoned = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
    return [*request.messages[instructed(request) :], answer.message() | reasoned]


def instructed(request: Request) -> int:
    """How many of the messages are instructions: one or none."""
    return 1 if request.fields.get("instructions") else 0


def serialize(request: Request, opening: Opening, answers: Sequence[ParsedAnswer]) -> bytes:
    """See `Dialect`."""
    return msgspec.json.encode(response_of(request, opening, answers[0]))


def events(request: Request, opening: Opening) -> ResponseEvents:
    """See `Dialect`."""
    return ResponseEvents(request, opening)


def serialize_error(error: GatewayError) -> bytes:
    """See `Dialect`: the shape that OpenAI's SDKs read."""
    return msgspec.json.encode({"error": _error(error)})


def error_event(error: GatewayError) -> bytes:
    """See `Dialect`. OpenAI's reference has the fields in the event, its service sends them in `error`: here are both.

    Only for the second do its SDKs raise. What came before is not known here; the highest number is behind it.
    """
    fields = _error(error)
    flat = {name: fields[name] for name in ("code", "message", "param")}
    return sse({"type": "error", "sequence_number": _LAST, "error": fields} | flat, "error")


def _no_request(error: msgspec.ValidationError) -> GatewayError:
    refused = no_request("responses", error)
    refused.param = refused.param or "model"  # the one field that must be there
    return refused


def _json_schema(text: dict[str, Any] | None) -> dict[str, Any] | None:
    wanted = (text or {}).get("format")
    match wanted:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {}
        case {"type": "json_schema", "schema": dict(schema)}:
            return schema
        case {"type": "json_schema"}:
            raise refused("text.format.schema", "is missing or no object")
        case {"type": kind}:
            raise unsupported("text.format.type", kind)
    raise refused("text.format", "has no type")


def _included(include: Sequence[Any] | None) -> Sequence[Any]:
    for index, name in enumerate(include or ()):
        if name not in INCLUDABLE:
            raise refused(f"include[{index}]", f"is {name!r}; it is one of {list(INCLUDABLE)}")
    return include or ()


def _error(error: GatewayError) -> dict[str, Any]:
    """What lies at the messages' door lies at the input's: its items are counted otherwise."""
    param = "input" if error.param and error.param.startswith("messages") else error.param
    return {"type": error.kind, "code": error.code, "message": error.message, "param": param}
