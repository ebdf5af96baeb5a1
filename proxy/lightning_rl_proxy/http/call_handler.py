"""From a request to its answer: place, tokens, text; what is to be recorded waits in the exchange.

Two ways lead there. The policy's requests are sampled token by token; requests for a frozen model go on to its service.
Nothing here knows HTTP. What an engine handed over is recorded, whatever becomes of the request.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import Call, to_span
from lightning_rl_adapters.ids import new_call_id
from lightning_rl_adapters.media import media_span
from lightning_rl_adapters.span import Span
from lightning_rl_adapters.tool_schemas import tools_span
from lightning_rl_proxy.dialects import chat_completions, responses
from lightning_rl_proxy.dialects.base import Dialect, Events, NamedTool, Opening, Request, must_call
from lightning_rl_proxy.engines.base import Engine, EngineTokens, TokenRequest
from lightning_rl_proxy.engines.chat_backend import BackendAnswer
from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.forest import message_fingerprint, relayed_calls
from lightning_rl_proxy.forest.incremental_decode import DecodedBody
from lightning_rl_proxy.forest.joined_answers import joined
from lightning_rl_proxy.forest.nodes import Answered, Place, RecordedAnswer
from lightning_rl_proxy.forest.raw_prompts import RawPromptReader
from lightning_rl_proxy.forest.restated_answers import is_cut
from lightning_rl_proxy.http.attempt import LiveAttempt
from lightning_rl_proxy.http.housekeeping import Housekeeping
from lightning_rl_proxy.http.inflight_request import InflightRequest
from lightning_rl_proxy.http.tokenizing import Tokenizing
from lightning_rl_proxy.recording.clock import Clock
from lightning_rl_proxy.rendering import images
from lightning_rl_proxy.rendering.base import (
    Delta,
    ParsedAnswer,
    Renderer,
    written,
)
from lightning_rl_proxy.rendering.image_fetcher import ImageFetcher
from lightning_rl_proxy.rendering.images import Image
from lightning_rl_proxy.rendering.parsing import AnswerEnd, AnswerParser, Reader
from lightning_rl_proxy.routing.router import Generation, Router, no_engine
from lightning_rl_proxy.sampling import effective

T = TypeVar("T")

_KWARGS = "chat_template_kwargs"
_WAYS = 8  # so many ways to render may one attempt ask for: each is made and proven anew
_THINKS = "enable_thinking"  # by its own name, or among the kwargs of the chat template
# What formats look for in an answer: one that its client has begun in the middle of it cannot be told apart.
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
# The fields, over all dialects, by which a client asks for what an engine may lack.
_ASKED_BY = {
    "json_schema": (
        "response_format", "text", "output_config", "output_format", "guided_json", "guided_json_object",
        "structured_outputs",
    ),
    "regex": ("guided_regex", "structured_outputs"),
    "choice": ("guided_choice", "structured_outputs"),
    "grammar": ("guided_grammar", "ebnf", "structured_outputs"),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class CallContext:
    """One request, whose it is, and where its answer goes."""

    attempt: LiveAttempt
    agent: str | None
    dialect: Dialect
    request: Request
    inflight: InflightRequest
    model: str


class CallHandler:
    """Works requests of any dialect. `record` takes what was sampled for an answer that never came."""

    def __init__(
        self,
        router: Router,
        tokenizing: Tokenizing | None,
        counters: Counter[str],
        record: Callable[[Span], None],
        clock: Clock,
        image_fetcher: ImageFetcher,
        housekeeping: Housekeeping,
    ) -> None:
        self._housekeeping = housekeeping
        self._image_fetcher = image_fetcher
        self._clock = clock
        self._router = router
        self._tokenizing = tokenizing
        self._counters = counters
        self._record = record

    def work(
        self, attempt: LiveAttempt, agent: str | None, dialect: Dialect, body: DecodedBody, inflight: InflightRequest
    ) -> Coroutine[Any, Any, bytes]:
        """What answers a request; it gives the answer's last bytes. Raises GatewayError for what cannot be answered."""
        requested = body.fields.get("model")
        model = self.model_of(attempt, agent, requested if isinstance(requested, str) else "")
        backend = self._router.is_backend(model)
        if backend and dialect is chat_completions:
            request = chat_completions.parse_relayed(body.whole())
        else:
            request = _parsed(dialect, body, attempt)
            if (messages := joined(request.messages, request.known)) is not None:
                request = replace(request, messages=messages)
        inflight.model, inflight.stream = model, request.stream
        agent = self._housekeeping.tagged(agent, request.messages[request.known :])
        if backend:
            if request.prompt is not None:
                raise GatewayError(400, f"model {model!r} is a chat service: it completes no prompts", param="model")
            return self._relay(CallContext(attempt, agent, dialect, request, inflight, model))
        if self._tokenizing is None:
            raise no_engine(model)
        renderer = self._tokenizing.renderer
        self._check_images(request, renderer, attempt)
        _check_ways(request, attempt, renderer)
        if renderer.vision is not None:
            request = replace(request, messages=attempt.forest.images.named(request.messages, request.known))
        attempt.history.keep(body, request.messages)
        long = self._tokenizing.is_long(request, body)
        context = CallContext(attempt, agent, dialect, request, inflight, model)
        return self._sample_all(context, self._tokenizing, long=long)

    async def count_tokens(self, attempt: LiveAttempt, request: Request, tokenizing: Tokenizing, size: int) -> int:
        """How many tokens the prompt of a request has, whose body is `size` bytes long. Raises GatewayError as a call
        with it would, but for one that is too long: that is what its client may want to know."""
        renderer, shown = tokenizing.renderer, attempt.forest.images
        self._check_images(request, renderer, attempt)
        choose = partial(_renderer_for, request, renderer)
        chosen, _ = choose() if _is_known(request, renderer) else await tokenizing.in_thread(choose)

        def count() -> int:
            with renderer.tokenizer.long_texts.of_any_length():
                prompt_ids = chosen.render(request.prompt_messages, request.tools)
                try:
                    return len(prompt_ids) + len(_forced(request, prompt_ids, chosen))
                except GatewayError:  # no answer can begin so: what stands there is counted
                    return len(chosen.render(request.messages, request.tools))

        counted = await tokenizing.of_body(count, size)
        if renderer.vision is None:
            return counted
        seen = replace(request, messages=shown.named(request.messages))
        await self._fetch_images(attempt, seen)
        return counted + sum(renderer.vision.features(image) - 1 for image in shown.of(seen.messages))

    def model_of(self, attempt: LiveAttempt, agent: str | None, requested: str) -> str:
        """The model that answers a call of `agent` (its tag) that names `requested`.

        Of several policies the tag decides; where it says nothing, the name; else it is the first. Raises UnknownModel
        where unknown names are refused.
        """
        info = attempt.info
        named = info.policy_named(requested)
        model = self._router.resolve(requested, info.policy) if named is None else named.model
        if info.policies and info.policy_named(model) is not None:
            policy = info.policy_of_agent(agent)
            return model if policy is None else policy.model
        return model

    async def _placed(self, context: CallContext, tokenizing: Tokenizing, *, long: bool) -> tuple[Renderer, Place]:
        """What renders a request, and its place. A format that is told something new is made in another thread, and a
        long request tokenised there; what else the attempt asks meanwhile finds its place after it, so that nobody
        looks while the attempt changes."""
        attempt, request, renderer = context.attempt, context.request, tokenizing.renderer
        choose = partial(_renderer_for, request, renderer)
        if not long and not attempt.unplaced and _is_known(request, renderer):
            return _find(context, *choose())
        attempt.unplaced += 1
        try:
            async with attempt.placing:
                renderer, kwargs = choose() if _is_known(request, renderer) else await tokenizing.in_thread(choose)
                find = partial(_find, context, renderer, kwargs)
                if not long:
                    return find()
                placement = await tokenizing.of_one_prompt(find)
                tokenizing.remember(request)
                return placement
        finally:
            attempt.unplaced -= 1

    async def _sample_all(self, context: CallContext, tokenizing: Tokenizing, *, long: bool) -> bytes:
        """Sample every choice of a request."""
        attempt, request, model = context.attempt, context.request, context.model
        earlier = [one.live for one in _earlier(context)]
        first = 0 if earlier else attempt.take_numbers(request.n)
        if tokenizing.renderer.vision is not None:
            await self._fetch_images(attempt, request)
        renderer, place = await self._placed(context, tokenizing, long=long)
        forced = _forced(request, place.prompt_ids, renderer)
        if earlier:  # told again where it was asked, though equal calls may have been answered since
            whole = earlier[0].prompt_ids()
            place = replace(place, prompt_ids=whole[: len(whole) - len(forced)], prompt=None)
        else:
            self._count_fork(place)
            self._record_images(attempt, [one.image for one in place.media])
            self._record_tools(context, place)
        sampled_from = _SampledFrom(
            place,
            forced,
            renderer if request.prompt is None else RawPromptReader(renderer),
            _room(request, len(place.prompt_ids) + len(forced)),
        )
        choices = [
            _SampledChoice(context, sampled_from, self._clock, index=index, number=first + index, call_id=call_id)
            for index, call_id in enumerate(
                [e.call.call_id for e in earlier] or [new_call_id() for _ in range(request.n)]
            )
        ]
        self._check_abilities(request, model, choices[0])
        opening = Opening(
            call_id=choices[0].call_id,
            model=model,
            created=choices[0].start_ns // 10**9,
            prompt_tokens=len(place.prompt_ids) + len(forced),
            prompt_ids=place.prompt_ids + forced if request.token_ids else None,
        )
        stream = _AnswerStream(context, opening)
        if earlier:
            answers = [_tell_again(choice, live.call, stream) for choice, live in zip(choices, earlier, strict=True)]
        else:
            answers = await _each(self._sample(choice, stream) for choice in choices)
        if context.dialect is responses:
            context.inflight.responses[responses.response_id(choices[0].call_id)] = responses.kept(request, answers[0])
        return stream.end(answers)

    def _check_images(self, request: Request, renderer: Renderer, attempt: LiveAttempt) -> None:
        """Raises GatewayError(400) for images that no prompt can hold: of a model that reads text, or that are neither
        in the request nor known nor at a host that they are fetched from."""
        if renderer.vision is not None:
            for where, url in images.urls(request.messages[request.known :], request.known):
                if not images.is_data(url) and not attempt.forest.images.knows(url):
                    self._image_fetcher.check(where, url)
            return
        for index, message in enumerate(request.messages[request.known :], start=request.known):
            if isinstance(message.get("content"), list):
                raise GatewayError(
                    400,
                    f"message {index} holds an image; this model takes text",
                    param=f"messages[{index}].content",
                    kind="unsupported_parameter",
                )

    async def _fetch_images(self, attempt: LiveAttempt, request: Request) -> None:
        """Fetch what the attempt has not fetched yet: in all its calls a URL means the same image."""
        shown = attempt.forest.images
        missing = {url: where for where, url in images.urls(request.messages) if not shown.knows(url)}
        fetched = await asyncio.gather(*(self._image_fetcher.fetch(where, url) for url, where in missing.items()))
        for url, image in zip(missing, fetched, strict=True):
            shown.add(image, url)

    def _record_images(self, attempt: LiveAttempt, shown: Iterable[Image]) -> None:
        """Each image once, before the first call that shows it."""
        recorded = attempt.forest.images.recorded
        for image in (image for image in shown if image.sha256 not in recorded):
            recorded.add(image.sha256)
            rollout_id, attempt_id = attempt.address.rollout_id, attempt.address.attempt_id
            self._record(
                media_span(
                    rollout_id,
                    attempt_id,
                    image.sha256,
                    data=image.data,
                    media_type=image.media_type,
                    at_ns=self._clock(),
                )
            )

    def _record_tools(self, context: CallContext, place: Place) -> None:
        """Tools once, before the first call that shows them."""
        tools, digest = context.request.tools, place.request.tools.hex()
        recorded = context.attempt.forest.tools_recorded
        if tools and digest not in recorded:
            recorded.add(digest)
            address = context.attempt.address
            self._record(tools_span(address.rollout_id, address.attempt_id, digest, tools, at_ns=self._clock()))

    async def _sample(self, choice: "_SampledChoice", stream: "_AnswerStream") -> ParsedAnswer:
        context, generation = choice.context, choice.generation

        def take(tokens: EngineTokens) -> bool:
            context.attempt.tokens_received[context.model] += len(tokens.token_ids)
            stream.add(choice.index, choice.push(tokens))
            return not choice.ended

        ended = False
        token_request = TokenRequest(
            choice.place.prompt_ids,
            choice.sampling,
            choice.call_id,
            stream=choice.watched,
            media=choice.place.media,
            encoded=None if choice.place.prompt is None else choice.place.prompt.encoded,
        )
        context.inflight.asks_engine()
        try:
            await self._router.generate(context.model, token_request, generation, home=choice.home, take=take)
            # From here to the end nothing waits, so what an engine handed over is never lost to a cancellation.
            answer, deltas = choice.finish()
            answered = choice.end(stream, answer, deltas)
            ended = True
        finally:
            if not ended and generation.token_ids:
                self._record(choice.lost())
                self._counters["undelivered"] += 1
        self._count_ignored(context.request.ignored_fields)
        call = choice.call()
        context.inflight.calls.append((call, choice.attributes() | {semconv.OUTPUT_MESSAGES: [answer.message()]}))
        prompt = context.request.prompt
        text = None if prompt is None else (context.model, prompt)
        thought = partial(message_fingerprint.thought_of, answer.reasoning)
        context.inflight.commits.append(
            Answered(
                choice.place,
                call,
                answer.message(),
                bool(answer.reasoning),
                generation.served_by,
                text,
                thought,
                cut=is_cut(call, None if self._tokenizing is None else self._tokenizing.renderer),
            )
        )
        return answered

    async def _relay(self, context: CallContext) -> bytes:
        """Ask a chat backend for each choice. Its answers come whole, and are streamed as such."""
        attempt, request, model = context.attempt, context.request, context.model
        # A service reads what the client wrote, so that is what is recorded, but for the bytes of images.
        messages = attempt.forest.images.relayed(request.messages)
        place = attempt.forest.find_turn(model, messages, request.tools, as_written=True)
        if earlier := _earlier(context):
            call_ids = [one.live.call.call_id for one in earlier]
            chat_answers = [relayed_calls.repeated_answer(one.live.call, one.said) for one in earlier]
        else:
            first = attempt.take_numbers(request.n)
            self._count_fork(place)
            call_ids = [new_call_id() for _ in range(request.n)]
            chat_answers = await _each(
                self._ask(context, place, first + index, index, call_id) for index, call_id in enumerate(call_ids)
            )
        if context.dialect is chat_completions and not request.stream:
            return chat_completions.merge([answer.body for answer in chat_answers])
        answers = [relayed_calls.answer_of(answer) for answer in chat_answers]
        if context.dialect is responses:
            context.inflight.responses[responses.response_id(call_ids[0])] = responses.kept(request, answers[0])
        opening = Opening(
            call_id=call_ids[0],
            model=model,
            created=int(time.time()),
            prompt_tokens=relayed_calls.prompt_tokens(chat_answers[0]),
            prompt_ids=chat_answers[0].prompt_ids if request.token_ids else None,
        )
        stream = _AnswerStream(context, opening)
        for index, answer in enumerate(answers):
            stream.add(index, relayed_calls.deltas(answer, tokens=request.token_ids))
            stream.stop(index, answer)
        return stream.end(answers)

    async def _ask(
        self, context: CallContext, by_messages: Place, number: int, index: int, call_id: str
    ) -> BackendAnswer:
        attempt, request, model = context.attempt, context.request, context.model
        fields = request.fields if context.dialect is chat_completions else relayed_calls.fields_of(request)
        # What an attempt publishes is about its policy: a judge beside it keeps the temperature that it was given.
        policy = model == (attempt.info.policy or self._router.policy)
        sampling, defaults = attempt.info.sampling_of(model) if policy else ({}, {})
        sent = relayed_calls.body_of({**defaults, **fields}, sampling, index)
        start_ns = self._clock()
        context.inflight.asks_engine()
        answer = await self._router.complete(model, sent)
        # As in `_sample`, nothing waits from here to the end.
        place = relayed_calls.placed(by_messages, answer)
        if by_messages.fork is None:
            self._count_fork(place)
        identity = relayed_calls.CallIdentity(attempt.address, context.agent, model, number, call_id)
        call = relayed_calls.call_of(answer, place, sent, identity, start_ns, self._clock())
        self._count_ignored([*request.ignored_fields, *answer.ignored_fields])
        self._record_images(attempt, attempt.forest.images.referred_to(place.new_messages))
        self._record_tools(context, place)
        more = relayed_calls.attributes(answer, place, request, context.dialect.NAME, sent) | recovery_attributes(
            context
        )
        context.inflight.calls.append((call, more))
        context.inflight.commits.append(
            Answered(place, call, relayed_calls.message_of(answer), relayed_calls.reasoned(answer))
        )
        return answer

    def _check_abilities(self, request: Request, model: str, choice: "_SampledChoice") -> None:
        for name in self._router.lacking(model, choice.sampling, choice.place.media):
            field = next((field for field in _ASKED_BY.get(name, ()) if field in request.fields), name)
            raise GatewayError(
                400,
                f"{field} is not supported by the engine of model {model!r}; leave it out, or take an engine that "
                "supports it (docs/gateway.md has a table)",
                param=field,
                kind="unsupported_parameter",
            )

    def _count_fork(self, place: Place) -> None:
        if place.fork is not None:
            self._counters[f"fork_{place.fork.cause}"] += 1

    def _count_ignored(self, fields: list[str]) -> None:
        if fields:
            self._counters["ignored_fields"] += len(fields)


class _SampledFrom(NamedTuple):
    """What all choices of a request are sampled from: a place and the tokens `forced`, with which each answer begins
    and which nobody samples. `room` is how many tokens an answer may have; None: no limit but the engine's."""

    place: Place
    forced: list[int]
    reader: Reader
    room: int | None


class _SampledChoice:
    """One answer while it is sampled."""

    def __init__(
        self,
        context: CallContext,
        sampled_from: _SampledFrom,
        clock: Clock,
        *,
        index: int,
        number: int,
        call_id: str,
    ) -> None:
        request, info = context.request, context.attempt.info
        place, forced, reader, room = sampled_from
        sampling, defaults = info.sampling_of(context.model)
        self.context = context
        self.index = index
        self.call_id = call_id
        self.sampling = effective(
            request.sampling,
            sampling,
            defaults=defaults,
            room=room,
            seed_key=info.seed_key,
            number=number,
        )
        self.generation = Generation()
        one_tool_call = bool(request.callable_tools) and not request.parallel_tool_calls
        # An engine that nobody watches answers whole, which costs it and us less.
        self.watched = request.stream or bool(self.sampling.stop) or one_tool_call
        self._reader = reader
        self._parser: AnswerParser | None = None
        stop_token_ids = self.sampling.stop_token_ids or ()
        if self.watched or forced or stop_token_ids:
            self._parser = AnswerParser(
                reader,
                self.call_id,
                place.prompt_ids,
                request.callable_tools,
                AnswerEnd(self.sampling.stop or (), stop_token_ids, one_tool_call),
                prefix_ids=forced,
                tokens=request.logprobs or request.token_ids,
            )
        self._begun = request.begun  # which the client has, and is not told again
        self._text = ""
        self.place = place
        if forced:
            added_ids, prompt_ids = place.added_ids + forced, place.prompt_ids + forced
            self.place = replace(place, added_ids=added_ids, prompt_ids=prompt_ids, prompt=None)
        self._number = number
        self._clock = clock
        self.start_ns = clock()
        self._started_ns = time.monotonic_ns()

    def push(self, tokens: EngineTokens) -> list[Delta]:
        """What some more tokens add; one by one, so that the recorded tokens give the same events again."""
        deltas: list[Delta] = []
        if self.watched and self._parser is not None:
            for index, token in enumerate(tokens.token_ids):
                logprobs = None if tokens.logprobs is None else [tokens.logprobs[index]]
                deltas += self._parser.push([token], logprobs)
        return self._new(deltas)

    @property
    def home(self) -> Engine | None:
        """The engine that has the conversation so far in its cache; samples of one prompt begin a new one each."""
        before = self.place.continued
        return None if before is None or self.context.request.n > 1 else before.served_by

    @property
    def ended(self) -> bool:
        """Whether a stop string has matched, or the one tool call that is wanted is complete."""
        return self._parser is not None and self._parser.ended

    @property
    def overshoot(self) -> int:
        """How many tokens were sampled past that."""
        return 0 if self._parser is None else self._parser.overshoot

    def finish(self) -> tuple[ParsedAnswer, list[Delta]]:
        """The answer, now that all is sampled, and what of it was not streamed yet."""
        generation, parser = self.generation, self._parser
        finish_reason = generation.finish_reason or "stop"
        if parser is None:
            answer = self._reader.parse(
                self.call_id,
                self.place.prompt_ids,
                generation.token_ids,
                generation.logprobs,
                finish_reason,
                self.context.request.callable_tools,
            )
            return answer, []
        if not self.watched:
            parser.push(generation.token_ids, generation.logprobs)
        answer, deltas = parser.finish(finish_reason)
        generation.keep(len(generation.token_ids) - parser.overshoot)
        generation.finish_reason = answer.finish_reason
        return answer, deltas

    def end(self, stream: "_AnswerStream", answer: ParsedAnswer, deltas: list[Delta]) -> ParsedAnswer:
        """Tell the end of the answer, and give what of it the client hears: all but what it has begun itself."""
        stream.add(self.index, self._new(deltas))
        new = replace(answer, content=answer.content[self._begun_in(answer.content) :])
        stream.stop(self.index, new)
        return new

    def _new(self, deltas: list[Delta]) -> list[Delta]:
        """The deltas without what the client has begun itself."""
        if not self._begun:
            return deltas
        new: list[Delta] = []
        for delta in deltas:
            if delta.kind == "content":
                self._text += delta.text
                start = min(len(delta.text), max(0, self._begun_in(self._text) - len(self._text) + len(delta.text)))
                new.append(replace(delta, text=delta.text[start:]))
            else:
                new.append(delta)
        return [delta for delta in new if delta.text or delta.kind == "tool_call" or delta.tokens]

    def _begun_in(self, content: str) -> int:
        """How long the beginning is of a content that stands in it, or begins with it; formats strip its front."""
        for begun in (self._begun, self._begun.lstrip()):
            if content.startswith(begun) or begun.startswith(content):
                return len(begun)
        return 0

    def call(self, *, delivered: bool = True) -> Call:
        """The record of what was sampled."""
        attempt, generation, parent = self.context.attempt, self.generation, self.place.parent
        return Call(
            call_id=self.call_id,
            rollout_id=attempt.address.rollout_id,
            attempt_id=attempt.address.attempt_id,
            number=self._number,
            parent_id=None if parent is None else parent.call.call_id,
            agent=self.context.agent,
            model=self.context.model,
            prompt_ids=self.place.added_ids,
            media=self.place.added_media,
            response_ids=generation.token_ids,
            logprobs=generation.logprobs,
            logprob_kind=generation.logprob_kind,
            versions=generation.versions,
            temperature=self.sampling.temperature if self.sampling.temperature is not None else 1.0,
            finish_reason=generation.finish_reason or "abort",
            delivered=delivered,
            overshoot=self.overshoot,
            start_ns=self.start_ns,
            end_ns=self._clock(),
        )

    def attributes(self) -> dict[str, Any]:
        """The attributes of the span beside the call's, but for the answer."""
        request = self.context.request
        more: dict[str, Any] = {
            semconv.REQUEST_MODEL: request.model,
            semconv.DIALECT: self.context.dialect.NAME,
            semconv.INPUT_TOKENS: len(self.place.prompt_ids),
            semconv.OUTPUT_TOKENS: len(self.generation.token_ids),
            semconv.INPUT_MESSAGES: self.place.new_messages,
            semconv.SAMPLING_REQUESTED: msgspec.to_builtins(request.sampling),
            semconv.SAMPLING_EFFECTIVE: msgspec.to_builtins(self.sampling),
        }
        if self.generation.ended_ns:
            times = (self.generation.asked_ns, self.generation.ended_ns)
            more[semconv.ENGINE_US] = [(at - self._started_ns) // 1000 for at in times]
        if request.ignored_fields:
            more[semconv.IGNORED_FIELDS] = request.ignored_fields
        return more | recovery_attributes(self.context) | self.place.attributes()

    def lost(self) -> Span:
        """The record of what was sampled for an answer that is never given."""
        return to_span(self.call(delivered=False), **self.attributes())


class _AnswerStream:
    """An answer on its way out: event by event into the exchange where the client streams, else whole at its end.

    The first token that comes brings the answer's beginning, so that what is refused before is an error of its own. How
    the choices ended is said in the last bytes, after the calls were recorded: many clients read no further than that.
    """

    def __init__(self, context: CallContext, opening: Opening) -> None:
        self._context = context
        self._opening = opening
        self._events = context.dialect.events(context.request, opening) if context.request.stream else None
        self._begun = False
        self._stops: list[bytes] = []

    def add(self, index: int, deltas: Iterable[Delta]) -> None:
        """More of choice `index`."""
        if self._events is not None:
            self._begin(self._events)
            for delta in deltas:
                self._context.inflight.write(self._events.delta(index, delta))

    def stop(self, index: int, answer: ParsedAnswer) -> None:
        """Choice `index` is complete."""
        if self._events is not None:
            self._begin(self._events)
            self._stops.append(self._events.stop(index, answer))

    def end(self, answers: list[ParsedAnswer]) -> bytes:
        """The last bytes of the answer."""
        if self._events is None:
            return self._context.dialect.serialize(self._context.request, self._opening, answers)
        return b"".join(self._stops) + self._events.end(answers)

    def _begin(self, events: Events) -> None:
        if not self._begun:
            self._begun = True
            self._context.inflight.write(events.start())


def _room(request: Request, prompt_tokens: int) -> int | None:
    """How many tokens `max_context_tokens` leaves for the answer. Raises GatewayError where it leaves none."""
    limit = request.max_context_tokens
    if limit is not None and limit <= prompt_tokens:
        raise GatewayError(
            400,
            f"max_context_tokens is {limit}, and the messages are {prompt_tokens} tokens: there is no room to answer",
            param="max_context_tokens",
            code="context_length_exceeded",
        )
    return None if limit is None else limit - prompt_tokens


def recovery_attributes(context: CallContext) -> dict[str, Any]:
    """What a span says so that another gateway, or this one started again, can go on behind its call, and answer a
    retry of it."""
    more: dict[str, Any] = {semconv.REQUEST: context.inflight.body_key.hex()}
    if isinstance(context.request.prompt, list):
        more[semconv.PROMPT_AS_IDS] = True
    if context.dialect is responses and (instructed := responses.instructed(context.request)):
        more[semconv.INSTRUCTIONS] = instructed
    return more


def _parsed(dialect: Dialect, body: DecodedBody, attempt: LiveAttempt) -> Request:
    """The request, with the conversation that it goes on with by an earlier response's id."""
    if body.read:
        with suppress(GatewayError):  # which names places among the new messages
            return chat_completions.parse(body.fields, body.read)
    if dialect is not responses:
        return dialect.parse(body.whole())
    request = responses.parse(body.fields, attempt.responses)
    previous = responses.previous(body.fields)
    if previous is None:
        return request
    if previous not in attempt.responses:
        raise responses.unknown_previous(previous)
    return responses.continued(request, attempt.responses[previous])


def _find(context: CallContext, renderer: Renderer, kwargs: dict[str, Any]) -> tuple[Renderer, Place]:
    """What renders a request, with these kwargs of its own, and the request's place."""
    attempt, request, model = context.attempt, context.request, context.model
    if request.prompt is None:
        return renderer, attempt.forest.find_place(model, request.prompt_messages, request.tools, renderer, kwargs)
    place = attempt.forest.find_raw_prompt(model, request.prompt, RawPromptReader(renderer))
    if renderer.vision is not None and renderer.vision.token_id in place.added_ids:
        raise GatewayError(
            400,
            f"the prompt holds the token {renderer.vision.token_id}, which stands for an image, and a prompt of "
            "Completions shows none: ask Chat Completions, with the image in a message",
            param="prompt",
        )
    return renderer, place


def _other_kwargs(request: Request, renderer: Renderer) -> tuple[dict[str, Any], str]:
    """What a request's prompt is to be rendered with that others are not, and the field that says so. Raises
    GatewayError(400) for what says nothing."""
    kwargs, field = request.fields.get(_KWARGS) or {}, _KWARGS
    if not isinstance(kwargs, dict):
        raise GatewayError(400, f"{field} is no object", param=field)
    if isinstance(thinks := request.fields.get(_THINKS), bool):
        kwargs, field = {_THINKS: thinks, **kwargs}, field if kwargs else _THINKS
    defaults = renderer.chat_template_kwargs
    other = {name: value for name, value in kwargs.items() if name not in defaults or defaults[name] != value}
    return ({} if request.prompt is not None else other), field


def _is_known(request: Request, renderer: Renderer) -> bool:
    """Whether what renders a request's prompt is made already."""
    other, _ = _other_kwargs(request, renderer)
    return not other or renderer.is_made(other)


def _check_ways(request: Request, attempt: LiveAttempt, renderer: Renderer) -> None:
    """Raises GatewayError(400) for a request whose attempt has its prompts rendered in too many ways."""
    other, field = _other_kwargs(request, renderer)
    if not other:
        return
    way = written(other)
    if way not in attempt.ways and len(attempt.ways) >= _WAYS:
        raise GatewayError(
            400,
            f"{field}: this attempt has asked for {_WAYS} other ways to render its prompts, which is the most; "
            "it may use those again",
            param=field,
            kind="unsupported_parameter",
        )
    attempt.ways.add(way)


def _renderer_for(request: Request, renderer: Renderer) -> tuple[Renderer, dict[str, Any]]:
    """What renders a request's prompt, and what it is told for it alone. Raises GatewayError(400) for what it cannot
    be told."""
    other, field = _other_kwargs(request, renderer)
    if not other:
        return renderer, {}
    try:
        return renderer.with_kwargs(other), other
    except (ValueError, TypeError) as error:
        if other == {_THINKS: False}:  # which a format that never thinks cannot be told
            return renderer, {}
        defaults = renderer.chat_template_kwargs
        raise GatewayError(
            400,
            f"{field}: {' '.join(str(error).split())[:300]}; prompts are rendered with {dict(defaults)} here: "
            "actor_rollout_ref.rollout.multi_turn.chat_template_kwargs, `serve --chat-template-kwargs`",
            param=field,
            kind="unsupported_parameter",
        ) from error


def _forced(request: Request, prompt_ids: list[int], renderer: Renderer) -> list[int]:
    """The tokens behind the prompt with which an answer begins that must be a tool call, or that its client has begun.

    Raises GatewayError(400) where the format has no such tokens.
    """
    choice = request.tool_choice
    forces = must_call(choice, request.tools)
    if request.prefill:
        begun = renderer.begun(prompt_ids, request.begun)
        if begun is None or forces or any(mark in request.begun for mark in _MARKS):
            why = "in this model's chat format" if begun is None else "into a call" if forces else "from chat markup"
            where = f"messages[{len(request.messages) - 1}]"
            raise GatewayError(400, f"{where}: an answer cannot be continued {why}", param=where)
        return begun
    if not forces:
        return []
    name = choice.name if isinstance(choice, NamedTool) else None
    forced = renderer.forced(prompt_ids, request.tools or [], name)
    if forced is None:
        raise GatewayError(
            400,
            "tool_choice cannot be forced in this model's chat format; use auto or none",
            param="tool_choice",
            kind="unsupported_parameter",
        )
    return forced


def _earlier(context: CallContext) -> list[RecordedAnswer]:
    """What was answered to a retried request before its attempt came here, choice by choice; empty if nothing was."""
    earlier = context.inflight.earlier[-context.request.n :]
    return earlier if len(earlier) == context.request.n else []


def _tell_again(choice: _SampledChoice, call: Call, stream: _AnswerStream) -> ParsedAnswer:
    """An answer that was recorded already, for a retry of its request: nothing is sampled, nothing recorded twice."""
    generation = choice.generation
    generation.token_ids, generation.logprobs = list(call.response_ids), call.logprobs
    generation.finish_reason = call.finish_reason
    stream.add(choice.index, choice.push(EngineTokens(call.response_ids, call.logprobs)))
    answer, deltas = choice.finish()
    return choice.end(stream, answer, deltas)


async def _each(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Every result, in order; the first failure is raised only when all have ended, so that none is lost."""
    first, *others = work
    if not others:
        return [await first]
    results = await asyncio.gather(first, *others, return_exceptions=True)
    for failed in (result for result in results if isinstance(result, BaseException)):
        raise failed
    return [result for result in results if not isinstance(result, BaseException)]
