"""A chat backend's answer as a call: its place by messages, corrected by token ids where the service told them.

Pure. A call is exact where the service told all ids of prompt and answer; it is never trainable, of no policy version.
Services speak Chat Completions: a request of that dialect goes on as it came and its answer comes back as it was given,
others are translated.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.ids import new_id
from lightning_rl_proxy.address import Address
from lightning_rl_proxy.dialects.base import NamedTool, Request
from lightning_rl_proxy.engines.chat_backend import BackendAnswer
from lightning_rl_proxy.forest.nodes import Place
from lightning_rl_proxy.rendering.base import Delta, ParsedAnswer, tool_call
from lightning_rl_proxy.sampling import REPLACED

_SAMPLING = (
    "temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "seed", "stop", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip
_REASONING = ("thinking", "reasoning", "reasoning_text")  # types of a content's parts
_TEXTS = ("text", "thinking", "reasoning", "summary")  # what parts have their texts in


def fields_of(request: Request) -> dict[str, Any]:
    """The fields of a chat completion request that says what `request` says in another dialect."""
    sampling = msgspec.to_builtins(request.sampling)
    wanted = sampling.pop("json_schema", None)
    constraints = {name: sampling.pop(name) for name in ("regex", "choice", "grammar") if name in sampling}
    fields: dict[str, Any] = {"model": request.model, "messages": request.messages, **sampling}
    if wanted is not None:
        schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted}}
        fields["response_format"] = schema if wanted else {"type": "json_object"}
    if constraints:
        fields["structured_outputs"] = constraints
    if request.tools:
        fields["tools"] = request.tools
        named = request.tool_choice
        fields["tool_choice"] = (
            {"type": "function", "function": {"name": named.name}} if isinstance(named, NamedTool) else named
        )
        if not request.parallel_tool_calls:
            fields["parallel_tool_calls"] = False
    if request.logprobs:
        fields["logprobs"] = True
    return fields


def body_of(fields: Mapping[str, Any], algorithm: Mapping[str, float | int], index: int) -> dict[str, Any]:
    """The request for choice `index`, under the parameters that the algorithm gives; the others stay the agent's.

    The seeds of choices differ: equal requests with one seed get one answer n times.
    """
    body = {name: value for name, value in fields.items() if name not in ("n", "stream", "stream_options")}
    body |= {name: algorithm[name] for name in REPLACED if algorithm.get(name) is not None}
    if body.get("top_k") == -1:
        del body["top_k"]  # all tokens: what services do by themselves, and many know no such field
    limit = algorithm.get("max_tokens")
    if limit is not None:
        names = [name for name in ("max_tokens", "max_completion_tokens") if isinstance(body.get(name), int)]
        body |= {name: min(body[name], int(limit)) for name in names or ()}
        if not names:
            body["max_tokens"] = int(limit)
    if index and isinstance(body.get("seed"), int):
        body["seed"] += index
    return body


def answer_of(answer: BackendAnswer) -> ParsedAnswer:
    """A service's answer in internal form.

    Services differ in it: content may be a list of parts, some of them reasoning; a tool call may have no id, and its
    arguments may be an object. What is no call of a function is left out.
    """
    choice = answer.body["choices"][0]
    message = choice["message"]
    finish_reason = str(choice.get("finish_reason") or "stop")
    content = message.get("content")
    thought = message.get("reasoning_content") or message.get("reasoning")
    if thought is None and isinstance(content, list):
        thought = [part for part in content if isinstance(part, dict) and part.get("type") in _REASONING]
    calls = message.get("tool_calls")
    tool_calls = [_tool_call(call, new_id("call_")) for call in (calls if isinstance(calls, list) else [])]
    return ParsedAnswer(
        content=_text(content, left_out=_REASONING),
        reasoning=_text(thought) or None,
        tool_calls=[call for call in tool_calls if call is not None],
        finish_reason="stop" if finish_reason in ("tool_calls", "function_call") else finish_reason,
        token_ids=answer.response_ids or [],
        logprobs=None,
        decode=lambda _: "",
        output_tokens=_counts(answer).get("completion_tokens") or len(answer.response_ids or ()),
    )


def _text(content: Any, *, left_out: Collection[str] = ()) -> str:
    """The text of a content, without its parts of these types; of what is neither text nor parts its JSON."""
    if isinstance(content, str) or content is None:
        return content or ""
    if isinstance(content, list):
        return "".join(_text(part, left_out=left_out) for part in content)
    if not isinstance(content, dict) or "type" not in content:
        return msgspec.json.encode(content).decode()
    texts = () if content["type"] in left_out else (content[name] for name in _TEXTS if name in content)
    return "".join(map(_text, texts))


def _tool_call(call: Any, its_id: str) -> dict[str, Any] | None:
    """A call of a function in OpenAI's form; `its_id` is for one that has none. None for what is no such call."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode({} if arguments is None else arguments).decode()
    return tool_call(str(call.get("id") or its_id), function["name"], arguments)


def _counts(answer: BackendAnswer) -> dict[str, int]:
    """The counts of tokens that the service tells."""
    usage = answer.body.get("usage")
    items = usage.items() if isinstance(usage, dict) else ()
    return {name: count for name, count in items if isinstance(count, int)}


def prompt_tokens(answer: BackendAnswer) -> int:
    """How long the prompt was, as far as the service tells."""
    return _counts(answer).get("prompt_tokens") or len(answer.prompt_ids or ())


def deltas(answer: ParsedAnswer, *, tokens: bool = False) -> Iterator[Delta]:
    """An answer that is there already, as the parts of a stream; with `tokens` the first one holds the tokens."""
    if tokens and answer.token_ids:
        yield Delta(kind="content", tokens=answer.tokens())
    if answer.reasoning:
        yield Delta(kind="reasoning", text=answer.reasoning)
    if answer.content:
        yield Delta(kind="content", text=answer.content)
    for index, call in enumerate(answer.tool_calls):
        yield Delta(kind="tool_call", tool_call=call, tool_index=index)


def placed(place: Place, answer: BackendAnswer) -> Place:
    """Where the answer's call is, now that its prompt may be known."""
    return place if answer.prompt_ids is None else place.with_prompt(answer.prompt_ids, place.request.messages)


class CallIdentity(NamedTuple):
    """Whose call it is, what it asks for, and which one it is."""

    address: Address
    agent: str | None
    model: str
    number: int
    call_id: str


def call_of(
    answer: BackendAnswer,
    place: Place,
    sent: dict[str, Any],
    identity: CallIdentity,
    start_ns: int,
    end_ns: int,
) -> Call:
    """The call of an answer to the body `sent`."""
    response_ids = answer.response_ids or []
    return Call(
        call_id=identity.call_id,
        rollout_id=identity.address.rollout_id,
        attempt_id=identity.address.attempt_id,
        number=identity.number,
        parent_id=None if place.parent is None else place.parent.call.call_id,
        agent=identity.agent,
        model=identity.model,
        prompt_ids=place.added_ids,
        response_ids=response_ids,
        logprobs=answer.logprobs,
        logprob_kind="raw",
        versions=[],  # frozen: of no policy
        temperature=_temperature(sent),
        finish_reason=str(answer.body["choices"][0].get("finish_reason") or "unknown"),
        exact=answer.response_ids is not None,
        trainable=False,
        start_ns=start_ns,
        end_ns=end_ns,
    )


def repeated_answer(call: Call, said: Mapping[str, Any]) -> BackendAnswer:
    """The answer of a recorded call, `said` the attributes of its span: what the service said, under an id of ours."""
    message = said[semconv.OUTPUT_MESSAGES][0]
    counts = {"prompt_tokens": said.get(semconv.INPUT_TOKENS), "completion_tokens": said.get(semconv.OUTPUT_TOKENS)}
    usage = {name: count for name, count in counts.items() if count is not None}
    body: dict[str, Any] = {
        "id": f"chatcmpl-{call.call_id}",
        "object": "chat.completion",
        "created": call.start_ns // 10**9,
        "model": call.model,
        "choices": [{"index": 0, "message": message, "finish_reason": call.finish_reason}],
    }
    if usage:
        body["usage"] = usage | {"total_tokens": sum(usage.values())}
    return BackendAnswer(body=body)


def attributes(
    answer: BackendAnswer, place: Place, request: Request, dialect: str, sent: dict[str, Any]
) -> dict[str, Any]:
    """What the span says beside the call."""
    counts = _counts(answer)
    more: dict[str, Any] = {
        semconv.REQUEST_MODEL: request.model,
        semconv.DIALECT: dialect,
        semconv.INPUT_MESSAGES: place.new_messages,
        semconv.OUTPUT_MESSAGES: [message_of(answer)],
        semconv.SAMPLING_REQUESTED: _sampling(request.fields) | msgspec.to_builtins(request.sampling),
        semconv.SAMPLING_EFFECTIVE: _sampling(sent) | {"temperature": _temperature(sent)},
    }
    for name, count in ((semconv.INPUT_TOKENS, "prompt_tokens"), (semconv.OUTPUT_TOKENS, "completion_tokens")):
        if count in counts:
            more[name] = counts[count]
    if ignored := [*request.ignored_fields, *answer.ignored_fields]:
        more[semconv.IGNORED_FIELDS] = ignored
    return more | place.attributes()


def message_of(answer: BackendAnswer) -> dict[str, Any]:
    """The assistant's message."""
    message: dict[str, Any] = answer.body["choices"][0]["message"]
    return {"role": "assistant"} | message


def reasoned(answer: BackendAnswer) -> bool:
    """Whether the service told of reasoning before the answer."""
    message = message_of(answer)
    return bool(message.get("reasoning_content") or message.get("reasoning"))


def _sampling(body: dict[str, Any]) -> dict[str, Any]:
    return {name: body[name] for name in _SAMPLING if body.get(name) is not None}


def _temperature(body: dict[str, Any]) -> float:
    """What was asked for; services sample at 1 where nothing was."""
    value = body.get("temperature")
    return float(value) if isinstance(value, int | float) else 1.0
