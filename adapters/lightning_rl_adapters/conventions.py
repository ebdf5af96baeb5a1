"""The LLM calls that an agent's own instrumentation tells of: with token ids, with messages alone, or what is missing.

Pure. Invariants: no token id and no logprob is made up: each was written into a span by whoever asked the engine. None
of these calls is one that the gateway recorded itself, and none is there twice. Nobody here saw an engine sample them,
so they are not `trainable`, unless a run says that it trusts its agents' spans (`calls_with_otel`).
"""

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from lightning_rl_adapters import forest, semconv
from lightning_rl_adapters.call import Call, calls_of, to_span
from lightning_rl_adapters.call_names import names_of
from lightning_rl_adapters.instrumented.call_spans import ASK_FOR_IDS as ASK_FOR_IDS
from lightning_rl_adapters.instrumented.call_spans import ConventionCall, ConventionChoice, call_of
from lightning_rl_adapters.instrumented.messages import SpanMessages, messages_of
from lightning_rl_adapters.span import Span
from lightning_rl_adapters.triplet import Triplet, prompt_ids, triplets

USE_THE_GATEWAY = "point the agent's client at the gateway (llm.base_url, llm.api_key), which records the token ids"


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


class MessageCall(msgspec.Struct, frozen=True, kw_only=True):
    """An LLM call of which messages alone are told, in the form of Chat Completions: what was asked, and the answers,
    one a choice."""

    call: Call
    convention: str
    messages: list[dict[str, Any]]
    answers: list[dict[str, Any]]
    tools: list[dict[str, Any]]


class OtelCalls(msgspec.Struct, frozen=True):
    """The LLM calls of an attempt beside the gateway's: those with token ids, and those without; each by start time.

    `conventions` has, for each of `calls`, the convention that told of it. `messages` are those without token ids that
    have messages; the call of each is not `exact`. `answer_ids` leads from the ids of answers to calls, of both.
    """

    calls: list[Call]
    conventions: list[str]
    diagnoses: list[ConventionDiagnosis]
    messages: list[MessageCall] = []
    answer_ids: dict[str, str] = {}


class OtelTriplet(Triplet, kw_only=True):
    """A triplet of what an agent's instrumentation said. No engine of ours sampled it: it is not `verified`.

    Where it is not `exact`, it has no token ids: `prompt_messages` and `response_messages` (one a choice) are what
    there is of the call, with the `tools` that the model was shown.
    """

    convention: str
    verified: bool = False
    prompt_messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    response_messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)


class _LlmCalls(NamedTuple):
    """The calls of an attempt's spans, by start time: those with token ids and those without."""

    with_ids: list[ConventionCall]
    without: list[ConventionCall]


def read(span: Span) -> list[Call] | ConventionDiagnosis | None:
    """A span's calls, one per choice; what it lacks; None for a span that is no LLM call."""
    llm_call = call_of(span)
    if llm_call is None:
        return None
    return _calls(llm_call) if llm_call.answer.has_ids else _diagnosis(llm_call)


def told_of(spans: Sequence[Span]) -> OtelCalls:
    """The LLM calls that an attempt's spans tell of, each once, however many layers were instrumented.

    What the gateway answered itself is left out: it has these calls, with all their tokens.

    Raises ForestError where the gateway's own calls do not fit together.
    """
    llm_calls = _find(spans)
    pairs = [(call, llm_call.convention.name) for llm_call in llm_calls.with_ids for call in _calls(llm_call)]
    both = (*llm_calls.with_ids, *llm_calls.without)
    return OtelCalls(
        [call for call, _ in pairs],
        [name for _, name in pairs],
        [_diagnosis(llm_call) for llm_call in llm_calls.without],
        [_with_messages(llm_call) for llm_call in llm_calls.without if llm_call.answer.has_messages],
        {
            llm_call.answer.answer_id: llm_call.span.span_id
            for llm_call in both
            if llm_call.answer.answer_id is not None
        },
    )


def calls_with_otel(recorded: Sequence[Call], otel_calls: Sequence[Call]) -> list[Call]:
    """The calls of an attempt for a run that trains on agents' own spans: those that the gateway `recorded`, and those
    that spans tell of, which become trainable; numbered by when they began.

    A told call whose prompt begins with all the tokens of an earlier one of its model continues it; its prompt ids are
    then what it adds.
    """
    merged = heapq.merge(recorded, otel_calls, key=lambda call: call.start_ns)  # leaves the gateway's order as it is
    names = {call.call_id for call in otel_calls}
    placed: list[Call] = []
    whole: dict[str, list[int]] = {}
    for number, call in enumerate(merged):
        if call.call_id in names:
            call = _continued(msgspec.structs.replace(call, number=number, trainable=True), placed, whole)
        else:
            call = msgspec.structs.replace(call, number=number)
        before = whole.get(call.parent_id, []) if call.parent_id is not None else []
        whole[call.call_id] = before + call.prompt_ids + call.response_ids
        placed.append(call)
    return placed


def spans_with_otel(spans: Sequence[Span]) -> list[Span]:
    """An attempt's spans as a run trains on them that trusts its agent's: what these tell of calls with token ids are
    spans of calls, as the gateway writes them."""
    llm_calls = _find(spans)
    otel_calls = [call for llm_call in llm_calls.with_ids for call in _calls(llm_call)]
    if not otel_calls:
        return list(spans)
    messages = {
        call.call_id: (conversation.prompt, conversation.answers[place : place + 1])
        for llm_call in llm_calls.with_ids
        if (conversation := messages_of(llm_call.span.attributes))
        for place, call in zip(_places(llm_call), _calls(llm_call), strict=True)
    }
    recorded = {span.span_id: span for span in spans if span.name == semconv.CALL_SPAN}
    calls: list[Span] = []
    for call in calls_with_otel(calls_of(spans), otel_calls):
        if call.call_id in messages:
            prompt, answers = messages[call.call_id]
            calls.append(to_span(call, **{semconv.INPUT_MESSAGES: prompt, semconv.OUTPUT_MESSAGES: answers}))
        else:
            calls.append(msgspec.structs.replace(recorded[call.call_id], number=call.number))
    replaced = {span.span_id for span in calls}
    return calls + [span for span in spans if span.span_id not in replaced]


def conversations(spans: Sequence[Span], model: str | None = None) -> list[SpanMessages]:
    """What was said in the calls of `model` (None: of any) that spans tell of, by start time, in the form of Chat
    Completions."""
    llm_calls = _find(spans)
    calls = [
        llm_call for llm_call in (*llm_calls.with_ids, *llm_calls.without) if model is None or llm_call.model == model
    ]
    return [
        messages_of(llm_call.span.attributes) for llm_call in sorted(calls, key=lambda llm_call: llm_call.span.start_ns)
    ]


def triplets_of_otel(otel: OtelCalls, rewards: Mapping[str, float] | None = None) -> list[OtelTriplet]:
    """The triplets of an attempt by its agent's own spans, in order of start; `rewards` are by call id. Those of calls
    without token ids have messages, and are not exact."""
    conventions = dict(zip((call.call_id for call in otel.calls), otel.conventions, strict=True))
    messages = {each.call.call_id: each for each in otel.messages}
    grown = forest.build([*otel.calls, *(each.call for each in otel.messages)])
    return [_of_otel(each, conventions, messages.get(each.call_id)) for each in triplets(grown, rewards or {})]


def _of_otel(triplet: Triplet, conventions: Mapping[str, str], message_call: MessageCall | None) -> OtelTriplet:
    fields = msgspec.structs.asdict(triplet)
    if message_call is None:
        return OtelTriplet(**fields, convention=conventions[triplet.call_id])
    return OtelTriplet(
        **fields, convention=message_call.convention, prompt_messages=message_call.messages,
        response_messages=message_call.answers, tools=message_call.tools,
    )  # fmt: skip


def _find(spans: Sequence[Span]) -> _LlmCalls:
    recorded = names_of(spans)
    llm_calls = [
        llm_call
        for span in spans
        if (llm_call := call_of(span)) is not None and llm_call.answer.answer_id not in recorded
    ]
    llm_calls.sort(key=lambda llm_call: (llm_call.span.start_ns, llm_call.span.span_id))
    parents: dict[str, str | None] = {span.span_id: span.attributes.get(semconv.PARENT_SPAN) for span in spans}
    all_with_ids = [llm_call for llm_call in llm_calls if llm_call.answer.has_ids]
    with_ids = _each_once(all_with_ids, parents, _recorded_tokens(spans) if all_with_ids else set())
    around = {above for llm_call in all_with_ids for above in _above(llm_call.span.span_id, parents)}
    names = {llm_call.name for llm_call in all_with_ids}
    without: dict[str, ConventionCall] = {}
    for llm_call in llm_calls:
        if not llm_call.answer.has_ids and llm_call.name not in names and llm_call.span.span_id not in around:
            without.setdefault(llm_call.name, llm_call)
    return _LlmCalls(with_ids, list(without.values()))


_Tokens = tuple[tuple[int, ...], tuple[int, ...]]  # of a prompt, and of an answer


def _each_once(
    llm_calls: Sequence[ConventionCall], parents: Mapping[str, str | None], recorded: set[_Tokens]
) -> list[ConventionCall]:
    """Those that are not the gateway's, each once.

    A call with the very tokens of one of the gateway's is that one, whatever id its answer has: a proxy between may
    have given it its own. Of spans with the same tokens, those are two calls that have answers of different ids and
    are not within each other.
    """
    by_tokens: dict[tuple[_Tokens, ...], list[ConventionCall]] = defaultdict(list)
    ids: set[str] = set()
    for llm_call in sorted(llm_calls, key=lambda llm_call: llm_call.answer.answer_id is None):
        tokens = _tokens(llm_call)
        same = by_tokens[tokens]
        if llm_call.name in ids or not recorded.isdisjoint(tokens):
            continue
        if not any(_is_same(llm_call, other, parents) for other in same):
            same.append(llm_call)
            ids.add(llm_call.name)
    once = [llm_call for same in by_tokens.values() for llm_call in same]
    return sorted(once, key=lambda llm_call: (llm_call.span.start_ns, llm_call.span.span_id))


def _is_same(one: ConventionCall, other: ConventionCall, parents: Mapping[str, str | None]) -> bool:
    """Whether two spans with the same tokens tell of one call."""
    if one.answer.answer_id is None or other.answer.answer_id is None:
        return True
    first, second = one.span.span_id, other.span.span_id
    return first in _above(second, parents) or second in _above(first, parents)


def _above(span_id: str, parents: Mapping[str, str | None]) -> set[str]:
    """The ids of the spans that this one is within."""
    above: set[str] = set()
    parent = parents.get(span_id)
    while parent is not None and parent not in above:
        above.add(parent)
        parent = parents.get(parent)
    return above


def _tokens(llm_call: ConventionCall) -> tuple[_Tokens, ...]:
    prompt = tuple(llm_call.answer.prompt_ids or ())
    return tuple((prompt, tuple(choice.ids)) for choice in llm_call.answer.choices if choice.ids)


def _recorded_tokens(spans: Sequence[Span]) -> set[_Tokens]:
    """Prompt and answer of each of the gateway's calls."""
    nodes = forest.build(calls_of(spans)).nodes.values()
    return {(tuple(prompt_ids(node)), tuple(node.call.response_ids)) for node in nodes if node.call.exact}


def _continued(call: Call, earlier: Sequence[Call], whole: Mapping[str, list[int]]) -> Call:
    """The call behind the earlier one of its model that has the longest beginning of its prompt, if any has."""
    parent, length = None, 0
    for each in earlier:
        before = whole[each.call_id]
        comparable = each.exact and each.model == call.model and len(before) >= max(length, 1)
        if comparable and before == call.prompt_ids[: len(before)]:
            parent, length = each.call_id, len(before)
    return msgspec.structs.replace(call, parent_id=parent, prompt_ids=call.prompt_ids[length:])


def _calls(llm_call: ConventionCall) -> list[Call]:
    choices = llm_call.answer.choices
    return [_call(llm_call, number, choices[place]) for number, place in enumerate(_places(llm_call))]


def _places(llm_call: ConventionCall) -> list[int]:
    """Which of its answers have token ids."""
    return [place for place, choice in enumerate(llm_call.answer.choices) if choice.ids]


def _call(llm_call: ConventionCall, number: int, choice: ConventionChoice | None) -> Call:
    """The call of a choice; without one the call that is not exact."""
    span, temperature = llm_call.span, llm_call.temperature
    ids = choice.ids or [] if choice is not None else []
    logprobs = choice.logprobs if choice is not None and len(choice.logprobs or ()) == len(ids) else None
    return Call(
        call_id=f"{span.span_id}#{number}" if number else span.span_id,
        rollout_id=span.rollout_id,
        attempt_id=span.attempt_id,
        number=span.number,
        model=llm_call.model,
        prompt_ids=llm_call.answer.prompt_ids or [] if choice is not None else [],
        response_ids=ids,
        logprobs=logprobs,
        logprob_kind=_logprob_kind(temperature),
        versions=[],
        temperature=1.0 if temperature is None else temperature,  # as the APIs have it
        finish_reason="stop" if choice is None else choice.finish_reason,
        exact=choice is not None,
        trainable=False,
        start_ns=span.start_ns,
        end_ns=span.end_ns,
    )


def _logprob_kind(temperature: float | None) -> str:
    """Engines give the logprobs of temperature 1 unless they are told otherwise: those of the sampler at 1 alone."""
    if temperature is None:
        return "raw"
    return {1.0: "sampled", 0.0: "greedy"}.get(temperature, "raw")


def _with_messages(llm_call: ConventionCall) -> MessageCall:
    messages = messages_of(llm_call.span.attributes)
    return MessageCall(
        call=_call(llm_call, 0, None), convention=llm_call.convention.name, messages=messages.prompt,
        answers=messages.answers, tools=messages.tools,
    )  # fmt: skip


def _diagnosis(llm_call: ConventionCall) -> ConventionDiagnosis:
    span, convention, answer = llm_call
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
        model=llm_call.model,
        told=tuple(part for part, there in has.items() if there),
        missing=tuple(part for part, there in has.items() if not there and part != "messages"),
        advice=f"{USE_THE_GATEWAY}; or {convention.advice}",
        server=llm_call.server,
    )
