"""A chat backend's answer as a call: its place by messages, corrected by token ids where the service told them.

Pure. A call is exact where the service told all ids of prompt and answer; it is never trainable.
"""

from typing import Any

from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import Call, VersionRange
from lightning_rl_proxy.attempt import Attempt, Place
from lightning_rl_proxy.dialects.chat_completions import Relayed
from lightning_rl_proxy.engines.chat_backend import ChatAnswer

_SAMPLING = (
    "temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "seed", "stop", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip


def placed(place: Place, answer: ChatAnswer, request: Relayed) -> Place:
    """Where the answer's call is, now that its prompt may be known."""
    return place if answer.prompt_ids is None else place.with_prompt(answer.prompt_ids, request.messages)


def call_of(
    answer: ChatAnswer,
    place: Place,
    attempt: Attempt,
    sent: dict[str, Any],
    *,
    call_id: str,
    number: int,
    agent: str | None,
    model: str,
    start_ns: int,
    end_ns: int,
) -> Call:
    """The call of an answer to the body `sent`."""
    response_ids = answer.response_ids or []
    return Call(
        call_id=call_id,
        rollout_id=attempt.address.rollout_id,
        attempt_id=attempt.address.attempt_id,
        number=number,
        parent_id=None if place.parent is None else place.parent.call.call_id,
        agent=agent,
        model=model,
        prompt_ids=place.added_ids,
        response_ids=response_ids,
        logprobs=answer.logprobs,
        logprob_kind="raw",
        versions=[VersionRange(0, 0, len(response_ids))] if response_ids else [],
        temperature=_temperature(sent),
        finish_reason=str(answer.body["choices"][0].get("finish_reason") or "unknown"),
        exact=answer.response_ids is not None,
        trainable=False,
        start_ns=start_ns,
        end_ns=end_ns,
    )


def attributes(answer: ChatAnswer, place: Place, request: Relayed, sent: dict[str, Any]) -> dict[str, Any]:
    """What the span says beside the call."""
    usage = answer.body.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    more: dict[str, Any] = {
        semconv.REQUEST_MODEL: request.model,
        semconv.DIALECT: "chat_completions",
        semconv.INPUT_MESSAGES: place.new_messages,
        semconv.OUTPUT_MESSAGES: [message_of(answer)],
        semconv.SAMPLING_REQUESTED: _sampling(request.fields),
        semconv.SAMPLING_EFFECTIVE: _sampling(sent) | {"temperature": _temperature(sent)},
    }
    for name, count in ((semconv.INPUT_TOKENS, "prompt_tokens"), (semconv.OUTPUT_TOKENS, "completion_tokens")):
        if counts.get(count) is not None:
            more[name] = counts[count]
    if answer.ignored_fields:
        more[semconv.IGNORED_FIELDS] = answer.ignored_fields
    return more | place.attributes()


def message_of(answer: ChatAnswer) -> dict[str, Any]:
    """The assistant's message."""
    message: dict[str, Any] = answer.body["choices"][0]["message"]
    return {"role": "assistant"} | message


def reasoned(answer: ChatAnswer) -> bool:
    """Whether the service told of reasoning before the answer."""
    message = message_of(answer)
    return bool(message.get("reasoning_content") or message.get("reasoning"))


def _sampling(body: dict[str, Any]) -> dict[str, Any]:
    return {name: body[name] for name in _SAMPLING if body.get(name) is not None}


def _temperature(body: dict[str, Any]) -> float:
    """What was asked for; services sample at 1 where nothing was."""
    value = body.get("temperature")
    return float(value) if isinstance(value, int | float) else 1.0
