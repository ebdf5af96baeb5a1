"""OpenAI Chat Completions. Pure.

Its messages are nearly the internal ones: a developer is a system, and parts that are texts alone become one text.
What goes on to a chat backend is taken as it came (`parse_relayed`): there the fields are the service's business.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lightning_rl_proxy.dialects.base import (
    NamedTool,
    Opening,
    Request,
    Tables,
    ToolChoice,
    allowed,
    check_prefill,
    no_request,
    refused,
    schema_of_text,
    sse,
    strict_tools,
)
from lightning_rl_proxy.dialects.wire.chat_completions import (
    ChatCompletionsWire,
    ChatToolChoice,
    RelayedWire,
    ResponseFormat,
)
from lightning_rl_proxy.dialects.wire.engine_fields import ENGINE_FIELDS, ENGINE_OFF, unsupported
from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.rendering.base import Delta, ParsedAnswer, SampledToken

NAME = "chat_completions"
PING = b": ping\n\n"

_WHERE = frozenset({"continue_final_message", "add_generation_prompt"})  # the answer begins
TABLES = Tables(
    honoured=frozenset(
        {
            "model", "messages", "tools", "tool_choice", "parallel_tool_calls", "n", "temperature", "top_p", "top_k",
            "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "seed", "stop",
            "max_tokens", "max_completion_tokens", "logprobs", "response_format", "stream", "stream_options",
            "functions", "function_call",  # what tools were called before
            "return_token_ids", "return_tokens_as_token_ids",  # vLLM's
            "max_context_tokens",  # ours: of prompt and answer together, in the policy's own tokens
        }
        | ENGINE_FIELDS
        | _WHERE
    ),
    hints=frozenset(
        {
            "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention",
            "safety_identifier", "prediction",
        }
    ),
    off={name: off for name, off in ENGINE_OFF.items() if name not in _WHERE}
    | {
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
    },
    relaxed={"top_logprobs": "each token's list holds the sampled one alone"},
)  # fmt: skip

_ROLES = ("system", "developer", "user", "assistant", "tool")
_PLAIN = ("system", "user", "assistant", "tool")


def parse(fields: dict[str, Any], read: Sequence[dict[str, Any]] = ()) -> Request:
    """See `Dialect`. `read` are the messages before those in the fields, in internal form."""
    current_fields = _with_functions_as_tools(fields, read)
    try:
        wire = msgspec.convert(current_fields, ChatCompletionsWire)
    except msgspec.ValidationError as error:
        raise no_request("chat completion", error) from error
    tools, choice = _tool_choice(wire.tool_choice, function_tools(wire.tools))
    schema, unheld = schema_of_text("response_format", _json_schema(wire.response_format), choice, tools)
    limit = wire.max_completion_tokens if wire.max_completion_tokens is not None else wire.max_tokens
    messages = [*read, *(_message(i, m) for i, m in enumerate(wire.messages))]
    return Request(
        model=wire.model,
        messages=messages,
        known=len(read),
        prefill=_goes_on(wire, messages),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=wire.parallel_tool_calls is not False,
        sampling=wire.sampling(
            max_tokens=limit,
            stop=stops("stop", wire.stop),
            json_schema=schema,
        ),
        max_context_tokens=wire.max_context_tokens,
        n=wire.n or 1,
        stream=bool(wire.stream),
        logprobs=bool(wire.logprobs),
        token_ids=bool(wire.return_token_ids),
        ignored_fields=TABLES.ignored(fields) + unheld + strict_tools(wire.tools, "function.strict"),
        fields=fields,
    )


def parse_relayed(fields: dict[str, Any]) -> Request:
    """A request that goes on to a service, its messages and tools untouched.

    Raises GatewayError(400) for what no service could be asked.
    """
    try:
        wire = msgspec.convert(fields, RelayedWire)
    except msgspec.ValidationError as error:
        raise no_request("chat completion", error) from error
    model, tools = fields.get("model"), fields.get("tools")
    return Request(
        model=model if isinstance(model, str) else "",
        messages=wire.messages,
        tools=tools if isinstance(tools, list) else None,
        n=wire.n or 1,
        stream=bool(wire.stream),
        logprobs=fields.get("logprobs") is True,
        token_ids=fields.get("return_token_ids") is True,
        fields=fields,
    )


def merge(answers: Sequence[dict[str, Any]]) -> bytes:
    """One response body of services' answers with one choice each; alone, an answer stays as the service gave it."""
    if len(answers) == 1:
        return msgspec.json.encode(answers[0])
    merged = dict(answers[0])
    merged["choices"] = [answer["choices"][0] | {"index": i} for i, answer in enumerate(answers)]
    if isinstance(merged.get("usage"), dict):
        merged["usage"] = _merged_usage([answer.get("usage") for answer in answers])
    return msgspec.json.encode(merged)


def serialize(request: Request, opening: Opening, answers: Sequence[ParsedAnswer]) -> bytes:
    """See `Dialect`."""
    choices = [
        {
            "index": index,
            "message": _message_of(answer, legacy=_is_legacy(request)),
            "finish_reason": _finish_reason(answer, legacy=_is_legacy(request)),
            "logprobs": _logprobs(answer.tokens() if request.logprobs else None, request),
        }
        | ({"token_ids": answer.token_ids} if request.token_ids else {})
        for index, answer in enumerate(answers)
    ]
    body = _opened(opening, "chat.completion") | {"choices": choices, "usage": usage(opening, answers)}
    return msgspec.json.encode(body | ({"prompt_token_ids": opening.prompt_ids} if request.token_ids else {}))


def events(request: Request, opening: Opening) -> "ChunkEvents":
    """See `Dialect`."""
    return ChunkEvents(request, opening)


class ChunkEvents:
    """See `Events`: `chat.completion.chunk` objects, one per delta."""

    def __init__(self, request: Request, opening: Opening) -> None:
        self._n = request.n
        self._request = request
        self._legacy = _is_legacy(request)
        self._opening = opening
        self._usage = includes_usage(request)
        self._chunk = _opened(opening, "chat.completion.chunk") | ({"usage": None} if self._usage else {})

    def start(self) -> bytes:
        begun: dict[str, Any] = {"role": "assistant", "content": ""}
        first = self._choice(0, begun, prompt_ids=self._opening.prompt_ids)
        return first + b"".join(self._choice(index, begun) for index in range(1, self._n))

    def delta(self, index: int, delta: Delta) -> bytes:
        if delta.kind == "tool_call" and self._legacy:
            return self._choice(index, {"function_call": (delta.tool_call or {})["function"]}, delta.tokens)
        if delta.kind == "tool_call":
            call = {"index": delta.tool_index} | (delta.tool_call or {})
            return self._choice(index, {"tool_calls": [call]}, delta.tokens)
        name = "content" if delta.kind == "content" else "reasoning_content"
        return self._choice(index, {name: delta.text}, delta.tokens)

    def stop(self, index: int, answer: ParsedAnswer) -> bytes:
        return self._choice(index, {}, finish_reason=_finish_reason(answer, legacy=self._legacy))

    def end(self, answers: Sequence[ParsedAnswer]) -> bytes:
        counts = sse(self._chunk | {"choices": [], "usage": usage(self._opening, answers)}) if self._usage else b""
        return counts + b"data: [DONE]\n\n"

    def _choice(
        self,
        index: int,
        delta: dict[str, Any],
        tokens: Sequence[SampledToken] | None = None,
        finish_reason: str | None = None,
        prompt_ids: list[int] | None = None,
    ) -> bytes:
        logprobs = _logprobs(tokens, self._request)
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        if self._request.token_ids:
            choice["token_ids"] = [token.id for token in tokens or ()]
        prompt = {} if prompt_ids is None else {"prompt_token_ids": prompt_ids}
        return sse(self._chunk | {"choices": [choice]} | prompt)


def serialize_error(error: GatewayError) -> bytes:
    """See `Dialect`: the shape that OpenAI's SDKs read."""
    return msgspec.json.encode(_error(error))


def error_event(error: GatewayError) -> bytes:
    """See `Dialect`."""
    return sse(_error(error))


def stops(name: str, value: str | list[str] | None) -> list[str] | None:
    """Stop strings as a list. Raises GatewayError(400) for an empty one, which would end every answer at once."""
    listed = [value] if isinstance(value, str) else value
    if listed and not all(listed):
        raise GatewayError(400, f"{name} holds an empty text; leave it out", param=name)
    return listed or None


def includes_usage(request: Request) -> bool:
    """Whether the client wants the token counts at the end of its stream."""
    options = request.fields.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def function_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools, if all are functions with a name. Raises GatewayError(400) naming one that is not."""
    for index, tool in enumerate(tools or ()):
        kind, function = tool.get("type"), tool.get("function")
        if kind != "function":
            raise GatewayError(
                400,
                f"tools[{index}] is of type {kind!r}; this model calls tools of type 'function'",
                param=f"tools[{index}].type",
                kind="unsupported_parameter",
            )
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise GatewayError(400, f"tools[{index}].function has no name", param=f"tools[{index}].function")
    return [dict(tool) for tool in tools] if tools else None


def _goes_on(wire: ChatCompletionsWire, messages: Sequence[dict[str, Any]]) -> bool:
    """Whether the last message is the beginning of the answer. Raises GatewayError(400) where it cannot be one."""
    if not wire.continue_final_message:
        if wire.add_generation_prompt is False:
            raise unsupported("add_generation_prompt", False)
        return False
    if wire.add_generation_prompt:
        raise GatewayError(
            400,
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    where = f"messages[{len(messages) - 1}]"
    if messages[-1].get("role") != "assistant" or len(messages) == 1:
        raise GatewayError(
            400, f"continue_final_message needs a last message of the assistant behind others, not {where}", param=where
        )
    check_prefill(where, messages[-1])
    return True


def _tool_choice(
    choice: str | ChatToolChoice | None, tools: list[dict[str, Any]] | None
) -> tuple[list[dict[str, Any]] | None, ToolChoice]:
    """The tools that the model is shown, and the choice among them."""
    names = [tool["function"]["name"] for tool in tools or ()]
    if isinstance(choice, ChatToolChoice):
        if choice.allowed_tools is not None:
            tools, choice = allowed("tool_choice", choice.allowed_tools.mode, choice.allowed_tools.tools, tools)
            return tools, "required" if choice == "required" else "auto"
        if choice.function is None or choice.function.name not in names:
            named = None if choice.function is None else choice.function.name
            raise GatewayError(400, f"tool_choice names {named!r}, but tools are {names}", param="tool_choice")
        return tools, NamedTool(choice.function.name)
    if choice == "required":
        if not tools:
            raise GatewayError(400, "tool_choice is 'required', but there are no tools", param="tool_choice")
        return tools, "required"
    return tools, "none" if choice == "none" else "auto"


def _with_functions_as_tools(fields: dict[str, Any], read: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The request in today's words, where it has those that came before tools: functions, called one at a time."""
    messages = fields.get("messages")
    if isinstance(messages, list) and any(_speaks_of_functions(message) for message in messages):
        fields = fields | {"messages": _messages_with_tools(messages, read)}
    functions, call = fields.get("functions"), fields.get("function_call")
    if not functions:
        if call not in (None, "auto", "none"):
            raise GatewayError(400, "function_call names a function, but there are no functions", param="function_call")
        return fields
    if fields.get("tools"):
        raise GatewayError(400, "functions and tools say the same; leave functions out", param="functions")
    if not isinstance(functions, list):
        raise GatewayError(400, "functions is no list", param="functions")
    choice = {"type": "function", "function": call} if isinstance(call, dict) else call
    tools = [{"type": "function", "function": function} for function in functions]
    return fields | {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}


def _speaks_of_functions(message: Any) -> bool:
    return isinstance(message, dict) and (message.get("role") == "function" or bool(message.get("function_call")))


def _messages_with_tools(messages: Sequence[Any], read: Sequence[dict[str, Any]]) -> list[Any]:
    """Messages whose calls have ids, as those of tools have; a function's result is that of the call before it."""
    with_ids: list[Any] = []
    calls = [call for message in reversed(read) for call in message.get("tool_calls") or ()][:1]
    latest = str(calls[0].get("id")) if calls else ""
    for number, message in enumerate(messages, start=len(read)):
        if not _speaks_of_functions(message):
            with_ids.append(message)
        elif message.get("role") == "function":
            with_ids.append(message | {"role": "tool", "tool_call_id": latest})
        else:
            latest = f"function_{number}"
            rest = {name: value for name, value in message.items() if name != "function_call"}
            call = {"id": latest, "type": "function", "function": message["function_call"]}
            with_ids.append(rest | {"tool_calls": [call]})
    return with_ids


def _json_schema(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {}
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise GatewayError(400, "response_format.json_schema has no schema", param="response_format")
    return wanted.json_schema.schema


def _message(number: int, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if message.get("reasoning") and not message.get("reasoning_content"):  # by its newer name
        message = message | {"reasoning_content": message["reasoning"]}
    if role in _PLAIN and type(message.get("content")) is str and "tool_calls" not in message:
        return message
    where = f"messages[{number}]"
    if role not in _ROLES:
        raise GatewayError(400, f"{where}.role is {role!r}; it is one of {list(_ROLES)}", param=f"{where}.role")
    content = message.get("content")
    if isinstance(content, list):
        content = _content(where, content)
    elif content is not None and not isinstance(content, str):
        raise GatewayError(400, f"{where}.content is neither text nor parts", param=f"{where}.content")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise GatewayError(400, f"{where}.tool_calls is no list of tool calls", param=f"{where}.tool_calls")
    for index, call in enumerate(calls or ()):
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise refused(f"{where}.tool_calls[{index}].function", "has no name; this model's calls are of functions")
    return message | {"role": "system" if role == "developer" else role, "content": content or ""}


def _content(where: str, parts: list[Any]) -> str | list[dict[str, Any]]:
    read = [_part(f"{where}.content[{i}]", part) for i, part in enumerate(parts)]
    if all(part["type"] == "text" for part in read):
        return "".join(part["text"] for part in read)
    return read


def _part(where: str, part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    for name, held in (("text", "text"), ("refusal", "refusal")):
        if kind == name and isinstance(part.get(held), str):
            return {"type": "text", "text": part[held]}
    if kind == "image_url" and isinstance(part.get("image_url"), dict):
        return dict(part)
    if kind == "image_url":
        raise GatewayError(400, f"{where}.image_url is no object with a `url`", param=where)
    raise GatewayError(
        400, f"{where} is a part of type {kind!r}; this model takes 'text' and 'image_url' parts", param=where
    )


def _opened(opening: Opening, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{opening.call_id}",
        "object": kind,
        "created": opening.created,
        "model": opening.model,
    }


def _is_legacy(request: Request) -> bool:
    """Whether the client knows functions, and no tools."""
    return bool(request.fields.get("functions"))


def _message_of(answer: ParsedAnswer, *, legacy: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message |= {"function_call": answer.tool_calls[0]["function"]} if legacy else {"tool_calls": answer.tool_calls}
        message["content"] = answer.content or None
    return message


def _finish_reason(answer: ParsedAnswer, *, legacy: bool) -> str:
    called = answer.tool_calls and answer.finish_reason == "stop"
    return answer.finish_reason if not called else "function_call" if legacy else "tool_calls"


def _logprobs(tokens: Sequence[SampledToken] | None, request: Request) -> dict[str, Any] | None:
    content = token_logprobs(tokens, request)
    return None if content is None else {"content": content, "refusal": None}


def token_logprobs(tokens: Sequence[SampledToken] | None, request: Request) -> list[dict[str, Any]] | None:
    """The tokens with their logprobs, if these are asked for and known; of the top ones each is the only known one."""
    if not tokens or not request.logprobs or tokens[0].logprob is None:
        return None
    wants_top, as_ids = bool(request.fields.get("top_logprobs")), names_tokens_by_id(request)
    entries = []
    for token in tokens:
        name = f"token_id:{token.id}" if as_ids else token.text
        part = "\ufffd" in token.text  # of a character: its own bytes are not known here
        one = {"token": name, "logprob": token.logprob, "bytes": None if part else list(token.text.encode())}
        entries.append(one | {"top_logprobs": [one] if wants_top else []})
    return entries


def names_tokens_by_id(request: Request) -> bool:
    """Whether logprobs name a token `token_id:N`, as vLLM does when asked; its text may be a part of a character."""
    return request.fields.get("return_tokens_as_token_ids") is True


def usage(opening: Opening, answers: Sequence[ParsedAnswer]) -> dict[str, int]:
    """The prompt once, and all that was sampled."""
    sampled = sum(answer.output_tokens for answer in answers)
    return {
        "prompt_tokens": opening.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": opening.prompt_tokens + sampled,
    }


def _merged_usage(usages: Sequence[Any]) -> dict[str, int]:
    """The prompt once, all that was sampled; the finer details of single answers cannot be added up."""
    counts = [usage if isinstance(usage, dict) else {} for usage in usages]
    prompt = counts[0].get("prompt_tokens") or 0
    sampled = sum(count.get("completion_tokens") or 0 for count in counts)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _error(error: GatewayError) -> dict[str, Any]:
    code = error.code if error.code is not None else error.status
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": code}}
