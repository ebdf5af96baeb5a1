"""What agents' own instrumentation tells of their LLM calls: calls where it has token ids, else what it lacks.

Pure. Invariant: no token id and no logprob is made up: each was written into a span by whoever asked the engine. But
nobody here saw the engine sample it, so these calls are never `trainable`, and none is of a model's call that the
gateway recorded itself.
"""

import ast
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from lightning_rl_adapters import forest, semconv
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.call_names import names_of
from lightning_rl_adapters.span import Span
from lightning_rl_adapters.triplet import Triplet, triplets

ASK_FOR_IDS = 'ask the engine for token ids: extra_body={"return_token_ids": True, "logprobs": True} (vLLM, SGLang)'
USE_THE_GATEWAY = "point the agent's client at the gateway (llm.base_url, llm.api_key), which records the token ids"
_READABLE = 2**20  # characters of a text that is parsed: a longer one is no answer of a model
_OPERATIONS = ("chat", "text_completion", "generate_content", "completion")
_LITELLM, _RAW = "litellm_request", "raw_gen_ai_request"  # its span of a call, and within it of what it sent and got


class ConventionDiagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """An LLM call that is told of without its tokens.

    `told` names what there is of it, `missing` what a triplet lacks; `advice` says how to get it. `server` is where the
    agent called, as far as the span says.
    """

    span_id: str
    name: str
    convention: str
    model: str
    told: tuple[str, ...]
    missing: tuple[str, ...]
    advice: str
    server: str | None = None


class Told(msgspec.Struct, frozen=True):
    """The LLM calls of an attempt beside the gateway's: those with token ids, and those without; each by start time.

    `conventions` has, for each of `calls`, the convention that told of it.
    """

    calls: list[Call]
    conventions: list[str]
    diagnoses: list[ConventionDiagnosis]


class OtelTriplet(Triplet, kw_only=True):
    """A triplet of what an agent's instrumentation said. No engine of ours sampled it: it is not `verified`."""

    convention: str
    verified: bool = False


class _ConventionChoice(NamedTuple):
    ids: list[int] | None
    logprobs: list[float] | None
    finish_reason: str


class _ConventionAnswer(NamedTuple):
    """What a span says of one request and its answers."""

    answer_id: str | None
    prompt_ids: list[int] | None
    choices: list[_ConventionChoice]
    has_messages: bool


class _Convention(NamedTuple):
    """One way to tell of an LLM call: its name, which spans are such, what they say, and how to get token ids."""

    name: str
    is_call: Callable[[Span], bool]
    read: Callable[[Mapping[str, Any]], _ConventionAnswer]
    advice: str


class _ConventionCall(NamedTuple):
    span: Span
    convention: _Convention
    answer: _ConventionAnswer

    @property
    def name(self) -> str:
        """What it is of: its answer, or itself where the answer has no id."""
        return self.answer.answer_id or self.span.span_id

    @property
    def has_ids(self) -> bool:
        return self.answer.prompt_ids is not None and any(choice.ids for choice in self.answer.choices)


def read(span: Span) -> list[Call] | ConventionDiagnosis | None:
    """A span's calls, one per choice; what it lacks; None for a span that is no LLM call."""
    said = _said(span)
    if said is None:
        return None
    return _calls(said) if said.has_ids else _diagnosis(said)


def told_of(spans: Sequence[Span]) -> Told:
    """The LLM calls that an attempt's spans tell of, each once, however many layers were instrumented.

    What the gateway answered itself is left out: it has these calls, with all their tokens.
    """
    with_ids, without = _sorted(spans)
    told = [(call, said.convention.name) for said in with_ids for call in _calls(said)]
    return Told([call for call, _ in told], [name for _, name in told], [_diagnosis(said) for said in without])


def triplets_of_otel(told: Told, rewards: Mapping[str, float] | None = None) -> list[OtelTriplet]:
    """The triplets of an attempt by its agent's own spans, in order of start; `rewards` are by call id."""
    found = triplets(forest.build(told.calls), rewards or {})
    return [
        OtelTriplet(**msgspec.structs.asdict(triplet), convention=name)
        for name, triplet in zip(told.conventions, found, strict=True)
    ]


def _said(span: Span) -> _ConventionCall | None:
    if span.name.startswith("lightning_rl."):  # the gateway's, or emitted
        return None
    convention = next((each for each in CONVENTIONS if each.is_call(span)), None)
    return None if convention is None else _ConventionCall(span, convention, convention.read(span.attributes))


def _sorted(spans: Sequence[Span]) -> tuple[list[_ConventionCall], list[_ConventionCall]]:
    """The answers with token ids and those without, by start time, each answer once."""
    recorded = names_of(spans)
    found = [said for span in spans if (said := _said(span)) is not None and said.answer.answer_id not in recorded]
    found.sort(key=lambda said: (said.span.start_ns, said.span.span_id))
    with_ids: dict[str, _ConventionCall] = {}
    for said in found:
        if said.has_ids:
            with_ids.setdefault(said.name, said)
    around = _around(spans, with_ids.values())
    without: dict[str, _ConventionCall] = {}
    for said in found:
        if not said.has_ids and said.name not in with_ids and said.span.span_id not in around:
            without.setdefault(said.name, said)
    return list(with_ids.values()), list(without.values())


def _around(spans: Iterable[Span], found: Iterable[_ConventionCall]) -> set[str]:
    """The ids of the spans that these are within: another layer's of the same calls."""
    parents: dict[str, str | None] = {span.span_id: span.attributes.get(semconv.PARENT_SPAN) for span in spans}
    around: set[str] = set()
    for said in found:
        above = parents[said.span.span_id]
        while above is not None and above not in around:
            around.add(above)
            above = parents.get(above)
    return around


def _calls(said: _ConventionCall) -> list[Call]:
    prompt_ids = said.answer.prompt_ids or []
    choices = [choice for choice in said.answer.choices if choice.ids]
    return [_call(said.span, number, prompt_ids, choice) for number, choice in enumerate(choices)]


def _call(span: Span, number: int, prompt_ids: list[int], choice: _ConventionChoice) -> Call:
    assert choice.ids is not None
    said = span.attributes
    fits = choice.logprobs is not None and len(choice.logprobs) == len(choice.ids)
    return Call(
        call_id=f"{span.span_id}#{number}" if number else span.span_id,
        rollout_id=span.rollout_id,
        attempt_id=span.attempt_id,
        number=span.number,
        model=_model(said),
        prompt_ids=prompt_ids,
        response_ids=choice.ids,
        logprobs=choice.logprobs if fits else None,
        logprob_kind="raw",  # what engines give unless they are told otherwise
        versions=[],
        temperature=_temperature(said),
        finish_reason=choice.finish_reason,
        trainable=False,
        start_ns=span.start_ns,
        end_ns=span.end_ns,
    )


def _diagnosis(said: _ConventionCall) -> ConventionDiagnosis:
    span, convention, answer = said
    has = {
        "messages": answer.has_messages,
        "prompt token ids": bool(answer.prompt_ids),
        "response token ids": any(choice.ids for choice in answer.choices),
        "logprobs": any(choice.logprobs for choice in answer.choices),
    }
    return ConventionDiagnosis(
        span_id=span.span_id,
        name=span.name,
        convention=convention.name,
        model=_model(span.attributes),
        told=tuple(what for what, there in has.items() if there),
        missing=tuple(what for what, there in has.items() if not there and what != "messages"),
        advice=f"{USE_THE_GATEWAY}; or {convention.advice}",
        server=_server(span.attributes),
    )


# The conventions, the most telling first: a span that has several is read by the first.


def _agent_lightning(said: Mapping[str, Any]) -> _ConventionAnswer:
    """Token ids in attributes of their own, as Agent-lightning's instrumentation of AgentOps writes them."""
    logprobs = _logprobs({"content": _json(said.get("logprobs.content"))})
    choice = _ConventionChoice(_ids(said.get("response_token_ids")), logprobs, _finish_reason(said))
    return _ConventionAnswer(
        _text(said.get(semconv.RESPONSE_ID)), _ids(said.get("prompt_token_ids")), [choice], _messages(said)
    )


def _openinference(said: Mapping[str, Any]) -> _ConventionAnswer:
    """The answer is there as it came, in JSON: with token ids, where the engine was asked for them."""
    return _of_answer(_parsed(said.get("output.value")), has_messages=_messages(said))


def _litellm(said: Mapping[str, Any]) -> _ConventionAnswer:
    """Each field of the answer is an attribute, as Python writes it."""
    names = ("prompt_token_ids", "choices", "response_token_ids")
    fields = {name: _literal(_first(said, *_ending(said, f".{name}"))) for name in names}
    fields["id"] = _first(said, semconv.RESPONSE_ID, *_ending(said, ".id"))
    return _of_answer(fields, has_messages=_messages(said) or bool(_ending(said, ".messages")))


def _messages_alone(said: Mapping[str, Any]) -> _ConventionAnswer:
    """Messages, numbered or as JSON, and no token ids: neither convention has a name for them."""
    return _ConventionAnswer(_text(said.get(semconv.RESPONSE_ID)), None, [], _messages(said))


def _of_answer(answer: Mapping[str, Any], *, has_messages: bool) -> _ConventionAnswer:
    """An answer of Chat Completions or Completions in vLLM's words."""
    told = answer.get("choices")
    choices = [choice for choice in told if isinstance(choice, dict)] if isinstance(told, list) else []
    prompt_ids = answer.get("prompt_token_ids") or (choices[0].get("prompt_token_ids") if choices else None)
    older = answer.get("response_token_ids")  # a list per choice, of vLLM as Agent-lightning patched it
    by_choice = older if isinstance(older, list) else []
    return _ConventionAnswer(
        _text(answer.get("id")),
        _ids(prompt_ids),
        [
            _ConventionChoice(
                _ids(choice.get("token_ids") or (by_choice[number] if number < len(by_choice) else None)),
                _logprobs(choice.get("logprobs")),
                str(choice.get("finish_reason") or "stop"),
            )
            for number, choice in enumerate(choices)
        ],
        has_messages,
    )


def _is_openinference(span: Span) -> bool:
    return span.attributes.get("openinference.span.kind") == "LLM"


def _is_litellm(span: Span) -> bool:
    return span.name == _LITELLM or (span.name == _RAW and bool(_ending(span.attributes, ".choices")))


def _is_gen_ai(span: Span) -> bool:
    said = span.attributes
    return said.get(semconv.OPERATION) in _OPERATIONS and (
        semconv.REQUEST_MODEL in said or semconv.RESPONSE_MODEL in said
    )


def _is_openllmetry(span: Span) -> bool:
    return span.attributes.get("llm.request.type") in ("chat", "completion")


CONVENTIONS = (
    _Convention(
        "agent-lightning",
        lambda span: bool({"prompt_token_ids", "response_token_ids"} & span.attributes.keys()),
        _agent_lightning,
        ASK_FOR_IDS,
    ),
    _Convention("openinference", _is_openinference, _openinference, ASK_FOR_IDS),
    _Convention("litellm", _is_litellm, _litellm, f"{ASK_FOR_IDS}, without streaming"),
    _Convention(
        "openllmetry", _is_openllmetry, _messages_alone,
        f"instrument it with openinference-instrumentation-openai, whose spans keep the answer, and {ASK_FOR_IDS}",
    ),
    _Convention(
        "gen_ai", _is_gen_ai, _messages_alone,
        f"instrument it with openinference-instrumentation-openai, whose spans keep the answer, and {ASK_FOR_IDS}",
    ),
)  # fmt: skip


def _messages(said: Mapping[str, Any]) -> bool:
    numbered = ("llm.input_messages.", "gen_ai.prompt.")
    return semconv.INPUT_MESSAGES in said or "input.value" in said or any(name.startswith(numbered) for name in said)


def _model(said: Mapping[str, Any]) -> str:
    named = (semconv.RESPONSE_MODEL, "llm.model_name", semconv.REQUEST_MODEL, *_ending(said, ".model"))
    return str(_first(said, *named) or "unknown")


def _temperature(said: Mapping[str, Any]) -> float:
    """As the agent asked; 1, as the APIs have it, where it did not say."""
    asked = _first(said, semconv.REQUEST_TEMPERATURE, *_ending(said, ".temperature"))
    asked = _parsed(said.get("llm.invocation_parameters")).get("temperature", asked)
    return float(asked) if isinstance(asked, int | float) and math.isfinite(asked) else 1.0


def _server(said: Mapping[str, Any]) -> str | None:
    whole = _text(_first(said, "gen_ai.openai.api_base", "gen_ai.request.base_url"))
    if whole is not None or "server.address" not in said:
        return whole
    port = said.get("server.port")
    return f"{said['server.address']}{'' if port is None else f':{port}'}"


def _finish_reason(said: Mapping[str, Any]) -> str:
    reasons = said.get(semconv.FINISH_REASONS)
    return str(reasons[0]) if isinstance(reasons, list) and reasons else "stop"


def _ending(said: Mapping[str, Any], end: str) -> list[str]:
    """litellm's names of a field: `llm.PROVIDER.FIELD`."""
    return [name for name in said if name.startswith("llm.") and name.endswith(end) and name.count(".") == 2]


def _first(said: Mapping[str, Any], *names: str) -> Any:
    return next((said[name] for name in names if said.get(name) not in (None, "")), None)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _ids(value: Any) -> list[int] | None:
    """A list of token ids, as it is or as JSON; None for anything else."""
    value = _json(value) if isinstance(value, str) else value
    if isinstance(value, list) and value and all(type(each) is int and 0 <= each < 2**31 for each in value):
        return list(value)
    return None


def _logprobs(value: Any) -> list[float] | None:
    """Of Chat Completions (`content`) or Completions (`token_logprobs`)."""
    if not isinstance(value, dict):
        return None
    content = value.get("content")
    found = value.get("token_logprobs")
    if isinstance(content, list) and all(isinstance(each, dict) for each in content):
        found = [each.get("logprob") for each in content]
    if not isinstance(found, list) or not found:
        return None
    numbers = [float(each) for each in found if isinstance(each, int | float) and math.isfinite(each)]
    return numbers if len(numbers) == len(found) else None


def _json(value: Any) -> Any:
    if not isinstance(value, str) or len(value) > _READABLE:
        return None if isinstance(value, str) else value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _parsed(value: Any) -> dict[str, Any]:
    """A JSON object; an empty one for anything else."""
    told = _json(value)
    return told if isinstance(told, dict) else {}


def _literal(value: Any) -> Any:
    """What a text of JSON or of Python's literals says; any other as it is."""
    if not isinstance(value, str) or len(value) > _READABLE:
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return _json(value) or value
