"""How each convention writes an LLM call into a span: which spans are such, and what they say of tokens.

Pure. Invariant: no token id and no logprob is made up: each was written into a span by whoever asked the engine.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lightning_rl_adapters import semconv
from lightning_rl_adapters.instrumented.messages import (
    ending,
    first,
    from_json,
    from_literal,
    raw_answers,
    with_details,
)
from lightning_rl_adapters.span import Span

ASK_FOR_IDS = 'ask the engine for token ids: extra_body={"return_token_ids": True, "logprobs": True} (vLLM, SGLang)'
_KEEP_THE_ANSWER = "openinference-instrumentation-openai, whose spans keep the answer"
_OPERATIONS = ("chat", "text_completion", "generate_content", "completion")
_LITELLM, _RAW = "litellm_request", "raw_gen_ai_request"  # its span of a call, and within it of what it sent and got
_ENTITY = "traceloop.entity.output"  # what a decorated function returned, as JSON
_IDS = ("prompt_token_ids", "response_token_ids")


class ConventionChoice(NamedTuple):
    """One answer: its token ids and logprobs, None where the span has none."""

    ids: list[int] | None
    logprobs: list[float] | None
    finish_reason: str


class ConventionAnswer(NamedTuple):
    """What a span says of one request and its answers."""

    answer_id: str | None
    prompt_ids: list[int] | None
    choices: list[ConventionChoice]
    has_messages: bool
    model: str | None = None

    @property
    def has_ids(self) -> bool:
        """Whether the tokens of the prompt and of an answer are told."""
        return self.prompt_ids is not None and any(choice.ids for choice in self.choices)


class Convention(NamedTuple):
    """One way to tell of an LLM call: its name, which spans are such, what they say, and how to get token ids."""

    name: str
    is_call: Callable[[Span], bool]
    read: Callable[[Mapping[str, Any]], ConventionAnswer]
    advice: str


class ConventionCall(NamedTuple):
    """A span of an LLM call, with what it says."""

    span: Span
    convention: Convention
    answer: ConventionAnswer

    @property
    def name(self) -> str:
        """What it is of: its answer, or itself where the answer has no id."""
        return self.answer.answer_id or self.span.span_id

    @property
    def model(self) -> str:
        """The model that answered, or that was asked for."""
        attributes = self.span.attributes
        named = (semconv.RESPONSE_MODEL, "llm.model_name", semconv.REQUEST_MODEL, *ending(attributes, ".model"))
        return str(first(attributes, *named) or self.answer.model or "unknown")

    @property
    def temperature(self) -> float | None:
        """As the agent asked; None where it did not say."""
        attributes = self.span.attributes
        value = first(attributes, semconv.REQUEST_TEMPERATURE, *ending(attributes, ".temperature"))
        value = _object(attributes.get("llm.invocation_parameters")).get("temperature", value)
        number = None if isinstance(value, bool) else _finite(value)
        return number if number is not None and number >= 0 else None

    @property
    def server(self) -> str | None:
        """Where the agent called, as far as the span says."""
        attributes = self.span.attributes
        whole = _text(first(attributes, "gen_ai.openai.api_base", "gen_ai.request.base_url"))
        if whole is not None or "server.address" not in attributes:
            return whole
        port = attributes.get("server.port")
        return f"{attributes['server.address']}{'' if port is None else f':{port}'}"


def call_of(span: Span) -> ConventionCall | None:
    """What a span says of an LLM call, by the first convention that knows it; None where it is of none."""
    if span.name.startswith("lightning_rl."):  # the gateway's, or emitted
        return None
    convention = next((each for each in CONVENTIONS if each.is_call(span)), None)
    return None if convention is None else ConventionCall(span, convention, convention.read(span.attributes))


# The conventions, the most telling first: a span that has several is read by the first.


def _agent_lightning(attributes: Mapping[str, Any]) -> ConventionAnswer:
    """Token ids in attributes of their own, as Agent-lightning's instrumentation of AgentOps writes them."""
    logprobs = _logprobs({"content": from_json(attributes.get("logprobs.content"))})
    choice = ConventionChoice(_ids(attributes.get("response_token_ids")), logprobs, _finish_reason(attributes, 0))
    return ConventionAnswer(
        _text(attributes.get(semconv.RESPONSE_ID)),
        _ids(attributes.get("prompt_token_ids")),
        [choice],
        _has_messages(attributes),
    )


def _openinference(attributes: Mapping[str, Any]) -> ConventionAnswer:
    """The answer is there as it came, in JSON: with token ids, where the engine was asked for them."""
    return _of_answer(_object(attributes.get("output.value")), has_messages=_has_messages(attributes))


def _litellm(attributes: Mapping[str, Any]) -> ConventionAnswer:
    """Each field of the answer is an attribute, as Python writes it; other libraries took up the names of the ids."""
    fields = {name: from_literal(first(attributes, *ending(attributes, f".{name}"))) for name in (*_IDS, "choices")}
    fields["id"] = first(attributes, semconv.RESPONSE_ID, *ending(attributes, ".id"))
    return _of_answer(fields, has_messages=_has_messages(attributes) or bool(ending(attributes, ".messages")))


def _traceloop(attributes: Mapping[str, Any]) -> ConventionAnswer:
    """What a function under traceloop's `@task` returned: an answer as it came, where it returned the client's."""
    return _of_answer(_object(attributes.get(_ENTITY)), has_messages=_has_messages(attributes))


def _gen_ai(attributes: Mapping[str, Any]) -> ConventionAnswer:
    """Messages, numbered, as JSON or in events. Neither convention has a name for token ids: they stand beside an
    answer's message, as vLLM and litellm name them, or in litellm's attributes."""
    whole = with_details(attributes)
    fields = {name: from_literal(first(whole, *ending(whole, f".{name}"))) for name in _IDS}
    answers = raw_answers(whole)
    choices = [{"finish_reason": _finish_reason(whole, place), **answer} for place, answer in enumerate(answers)]
    return _of_answer(
        {**fields, "choices": choices, "id": first(whole, semconv.RESPONSE_ID, *ending(whole, ".id"))},
        has_messages=_has_messages(whole) or bool(answers),
    )


def _of_answer(answer: Mapping[str, Any], *, has_messages: bool) -> ConventionAnswer:
    """An answer of Chat Completions or Completions in vLLM's words; litellm moves those of a choice one level down."""
    raw_choices = answer.get("choices")
    choices = (
        [_with_provider_fields(each) for each in raw_choices if isinstance(each, dict)]
        if isinstance(raw_choices, list)
        else []
    )
    older = answer.get("response_token_ids")  # a list per choice, of vLLM as Agent-lightning patched it; or one list
    by_choice = [older] if _ids(older) else older if isinstance(older, list) else []
    choices = choices or [{} for _ in by_choice]
    whole = _with_provider_fields(answer)
    prompt_ids = whole.get("prompt_token_ids") or (choices[0].get("prompt_token_ids") if choices else None)
    return ConventionAnswer(
        _text(answer.get("id")),
        _ids(prompt_ids),
        [
            ConventionChoice(
                _ids(choice.get("token_ids") or (by_choice[number] if number < len(by_choice) else None)),
                _logprobs(choice.get("logprobs")),
                str(choice.get("finish_reason") or "stop"),
            )
            for number, choice in enumerate(choices)
        ],
        has_messages,
        _text(answer.get("model")),
    )


def _with_provider_fields(holder: Mapping[str, Any]) -> dict[str, Any]:
    """A choice or an answer with the fields that litellm does not know, which it keeps apart."""
    apart = from_json(holder.get("provider_specific_fields"))
    return {**(apart if isinstance(apart, dict) else {}), **holder}


def _is_agent_lightning(span: Span) -> bool:
    return bool({"prompt_token_ids", "response_token_ids"} & span.attributes.keys())


def _is_openinference(span: Span) -> bool:
    return span.attributes.get("openinference.span.kind") == "LLM"


def _is_litellm(span: Span) -> bool:
    return span.name == _LITELLM or (span.name == _RAW and bool(ending(span.attributes, ".choices")))


def _is_gen_ai(span: Span) -> bool:
    attributes = span.attributes
    return attributes.get(semconv.OPERATION) in _OPERATIONS and (
        semconv.REQUEST_MODEL in attributes or semconv.RESPONSE_MODEL in attributes
    )


def _is_openllmetry(span: Span) -> bool:
    return span.attributes.get("llm.request.type") in ("chat", "completion")


def _is_traceloop(span: Span) -> bool:
    return _ENTITY in span.attributes and _traceloop(span.attributes).has_ids


def _has_litellms_ids(span: Span) -> bool:
    """As strands-vllm writes them into its agent's span, for Agent-lightning."""
    return all(ending(span.attributes, f".{name}") for name in _IDS)


CONVENTIONS = (
    Convention("agent-lightning", _is_agent_lightning, _agent_lightning, ASK_FOR_IDS),
    Convention("openinference", _is_openinference, _openinference, ASK_FOR_IDS),
    Convention("litellm", _is_litellm, _litellm, f"{ASK_FOR_IDS}, without streaming"),
    Convention("openllmetry", _is_openllmetry, _gen_ai, f"instrument it with {_KEEP_THE_ANSWER}, and {ASK_FOR_IDS}"),
    Convention("gen_ai", _is_gen_ai, _gen_ai, f"instrument it with {_KEEP_THE_ANSWER}, and {ASK_FOR_IDS}"),
    Convention("traceloop", _is_traceloop, _traceloop, ASK_FOR_IDS),
    Convention("litellm-ids", _has_litellms_ids, _litellm, ASK_FOR_IDS),
)


def _has_messages(attributes: Mapping[str, Any]) -> bool:
    numbered = ("llm.input_messages.", "gen_ai.prompt.", "llm.prompts.")
    return (
        semconv.INPUT_MESSAGES in attributes
        or "input.value" in attributes
        or any(name.startswith(numbered) for name in attributes)
    )


def _finish_reason(attributes: Mapping[str, Any], place: int) -> str:
    reasons = attributes.get(semconv.FINISH_REASONS)
    return str(reasons[place]) if isinstance(reasons, list) and place < len(reasons) else "stop"


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _ids(value: Any) -> list[int] | None:
    """A list of token ids, as it is or as JSON; None for anything else."""
    value = from_json(value) if isinstance(value, str) else value
    if isinstance(value, list) and value and all(type(each) is int and 0 <= each < 2**31 for each in value):
        return list(value)
    return None


def _logprobs(value: Any) -> list[float] | None:
    """Of Chat Completions (`content`) or Completions (`token_logprobs`), or a list of them, one a token."""
    value = from_json(value)
    entries = value
    if isinstance(value, dict):
        entries = value["content"] if isinstance(value.get("content"), list) else value.get("token_logprobs")
    if not isinstance(entries, list) or not entries:
        return None
    entries = [each.get("logprob") if isinstance(each, dict) else each for each in entries]
    numbers = [number for each in entries if (number := _finite(each)) is not None]
    return numbers if len(numbers) == len(entries) else None


def _finite(value: Any) -> float | None:
    """A number as a double; None for another value, and for a number that is none there."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # an integer of more than 308 digits
        return None
    return number if math.isfinite(number) else None


def _object(value: Any) -> dict[str, Any]:
    """A JSON object, also one that was written as JSON twice; an empty one for anything else."""
    json_value = from_json(value)
    json_value = from_json(json_value) if isinstance(json_value, str) else json_value
    return json_value if isinstance(json_value, dict) else {}
