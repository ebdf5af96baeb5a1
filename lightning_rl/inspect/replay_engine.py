"""The calls of a recorded attempt, each to be answered once more as it was: what a replay has in a model's place.

Invariant: an answer is given only to the request that it was recorded for: the same token ids of the prompt, or where
none are known the same messages. The first request that nothing was recorded for is kept as the `Divergence`, and
nothing is answered after it.
"""

import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import msgspec

from lightning_rl.store.contract import AttemptTrace
from lightning_rl_adapters import forest, semconv
from lightning_rl_adapters.call import Call, calls_of
from lightning_rl_adapters.forest import Node
from lightning_rl_adapters.media import Placed
from lightning_rl_adapters.triplet import media as media_of_prompt
from lightning_rl_adapters.triplet import prompt_ids
from lightning_rl_proxy.engines.base import EngineFinish, EngineRefused, EngineTokens, Load, TokenRequest
from lightning_rl_proxy.engines.chat_backend import BackendAnswer
from lightning_rl_proxy.forest import message_fingerprint
from lightning_rl_proxy.forest.fork_causes import first_difference
from lightning_rl_proxy.forest.shown_images import ShownImages
from lightning_rl_proxy.rendering.base import Markup, ParsedAnswer, Renderer
from lightning_rl_proxy.rendering.images import Vision
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from lightning_rl_proxy.sampling import SPECIFIC, Sampling

Message = dict[str, Any]
Decode = Callable[[list[int]], str]

_AROUND = 16  # tokens shown before and behind the first that differs
_ABILITIES = frozenset({*SPECIFIC, "images"})


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was not recorded.

    `call` is the number of the recorded call that it is nearest to, None where there is none. `token` is the place of
    the first token of the prompt that differs, `before` the text up to there, `recorded_text` and `text` what follows.
    `message` is the place of the first message that differs, from 0, with what was recorded there and what is asked
    now; None where there is no message. What is not known is None.
    """

    why: str
    call: int | None = None
    token: int | None = None
    before: str | None = None
    recorded_text: str | None = None
    text: str | None = None
    message: int | None = None
    recorded_message: Message | None = None
    new_message: Message | None = None


class KeptAnswer:
    """One recorded call with its whole prompt and conversation; `replayed` once it was answered again."""

    def __init__(self, number: int, node: Node, attributes: Mapping[str, Any], before: Sequence[Message]) -> None:
        self.number = number
        self.call: Call = node.call
        self.prompt = prompt_ids(node)
        self.media = media_of_prompt(node)
        self.exact = all(step.call.exact for step in node.path())
        self.sampling: dict[str, Any] = dict(attributes.get(semconv.SAMPLING_EFFECTIVE) or {})
        self.tokens: tuple[int | None, int | None] = (
            attributes.get(semconv.INPUT_TOKENS),
            attributes.get(semconv.OUTPUT_TOKENS),
        )
        self.messages = [*before, *(attributes.get(semconv.INPUT_MESSAGES) or ())]
        answered = attributes.get(semconv.OUTPUT_MESSAGES) or ()
        self.answer: Message = dict(answered[0]) if answered else {"role": "assistant", "content": ""}
        self.replayed = False


class Recording:
    """What an attempt recorded. Calls whose answer never reached the agent are not replayed.

    `stopped` is set by the first request that was not recorded.
    """

    def __init__(self, attempt: AttemptTrace, decode: Decode | None = None) -> None:
        attributes_by_id = {span.span_id: span.attributes for span in attempt.spans}
        conversations: dict[str, list[Message]] = {}
        self.calls: list[KeptAnswer] = []
        self.undelivered = 0
        self.divergence: Divergence | None = None
        self.other_sampling: dict[int, dict[str, list[Any]]] = {}
        self.stopped = threading.Event()
        self.heard: dict[tuple[int, ...], list[Message]] = {}  # conversations by prompt
        self._decode = decode
        for number, (call_id, node) in enumerate(forest.build(calls_of(attempt.spans)).nodes.items(), start=1):
            before = [] if node.parent is None else conversations[node.parent.call.call_id]
            entry = KeptAnswer(number, node, attributes_by_id[call_id], before)
            conversations[call_id] = [*entry.messages, entry.answer]
            if node.call.delivered:
                self.calls.append(entry)
            else:
                self.undelivered += 1

    @property
    def replayed(self) -> int:
        """How many calls were answered again."""
        return sum(entry.replayed for entry in self.calls)

    def by_tokens(self, model: str, prompt: list[int], sampling: Sampling, shown: Sequence[Placed] = ()) -> KeptAnswer:
        """The oldest call of `model` with this very prompt, and these images in it, that was not answered yet.

        Raises EngineRefused.
        """
        same = [k for k in self._remaining(model) if k.exact and k.prompt == prompt]
        entry = next((k for k in same if k.media == list(shown)), None)
        if entry is None and same and self.divergence is None:
            raise self.refuse(f"what the agent asks now was recorded as call {same[0].number} with other images")
        if entry is None or self.divergence is not None:
            raise self._refused(lambda: self._other_prompt(model, prompt))
        entry.replayed = True
        current = msgspec.to_builtins(sampling)
        names = ({*current, *entry.sampling} - {"seed"}) if entry.sampling else set()
        if other := {name: [entry.sampling.get(name), current.get(name)] for name in sorted(names)
                     if entry.sampling.get(name) != current.get(name)}:  # fmt: skip
            self.other_sampling[entry.number] = other
        return entry

    def by_messages(self, model: str, messages: Sequence[Message]) -> KeptAnswer:
        """The oldest call of `model` that was asked with the same messages. Raises EngineRefused."""
        heard = _heard(messages)
        entry = next((k for k in self._remaining(model) if _heard(k.messages) == heard), None)
        if entry is None or self.divergence is not None:
            raise self._refused(lambda: self._other_messages(model, messages))
        entry.replayed = True
        return entry

    def refuse(self, why: str) -> EngineRefused:
        """The error for what no replay can answer."""
        return self._refused(lambda: Divergence(why=why))

    def conversation(self, context: Sequence[int]) -> list[Message] | None:
        """The messages of a recorded call whose prompt and answer are these tokens, its answer the last."""
        for entry in self.calls:
            if entry.prompt + entry.call.response_ids == context:
                return [*entry.messages, entry.answer]
        return None

    def _remaining(self, model: str) -> list[KeptAnswer]:
        return [entry for entry in self.calls if entry.call.model == model and not entry.replayed]

    def _refused(self, diagnose: Callable[[], Divergence]) -> EngineRefused:
        if self.divergence is None:
            self.divergence = diagnose()
            self.stopped.set()
        return EngineRefused(f"this replay is over: {self.divergence.why}")

    def _other_prompt(self, model: str, prompt: list[int]) -> Divergence:
        remaining = [entry for entry in self._remaining(model) if entry.exact]
        now = self._messages_of(prompt)
        if not remaining:
            return self._one_more(model, now, lambda entry: entry.prompt == prompt)
        nearest = max(remaining, key=lambda entry: first_difference(prompt, entry.prompt))
        at = first_difference(prompt, nearest.prompt)
        return Divergence(
            why=f"what the agent asks now was not recorded; nearest is call {nearest.number}, whose prompt differs "
            f"from token {at} on",
            call=nearest.number,
            token=at,
            before=self._text(prompt[max(0, at - _AROUND) : at]),
            recorded_text=self._text(nearest.prompt[at : at + _AROUND]),
            text=self._text(prompt[at : at + _AROUND]),
            **({} if now is None else _first_other(nearest.messages, now)),
        )

    def _other_messages(self, model: str, messages: Sequence[Message]) -> Divergence:
        remaining = self._remaining(model)
        if not remaining:
            return self._one_more(model, messages, lambda entry: _heard(entry.messages) == _heard(messages))
        nearest = max(remaining, key=lambda entry: _shared(entry.messages, messages))
        return Divergence(
            why=f"what the agent asks model {model!r} now was not recorded; nearest is call {nearest.number}",
            call=nearest.number,
            **_first_other(nearest.messages, messages),
        )

    def _one_more(
        self, model: str, messages: Sequence[Message] | None, same: Callable[[KeptAnswer], bool]
    ) -> Divergence:
        """The agent asks on, although all calls of the model were answered."""
        of_model = [entry for entry in self.calls if entry.call.model == model]
        again = next((entry for entry in of_model if same(entry)), None)
        text = f"model {model!r} was asked {len(of_model)} times, and the agent asks once more"
        return Divergence(
            why=text if again is None else f"{text}: what call {again.number} was asked",
            call=None if again is None else again.number,
            message=len(messages) - 1 if messages else None,
            new_message=messages[-1] if messages else None,
        )

    def _messages_of(self, prompt: list[int]) -> list[Message] | None:
        """The messages of a prompt, which may go on with tokens that nobody wrote."""
        for ids, messages in reversed(self.heard.items()):
            if prompt[: len(ids)] == list(ids):
                return messages
        return None

    def _text(self, token_ids: list[int]) -> str | None:
        return None if self._decode is None else self._decode(token_ids)


class RecordedEngine:
    """An `Engine` that has a recording in the place of a model; its logprobs are the recorded ones."""

    abilities = _ABILITIES
    context: int | None = None

    def __init__(self, model: str, recording: Recording, stop_token_ids: Sequence[int]) -> None:
        self.model = model
        self._recording = recording
        self._stops = frozenset(stop_token_ids)
        of_model = [entry.call for entry in recording.calls if entry.call.model == model]
        self.policy_version = max((v.version for call in of_model for v in call.versions), default=0)
        self._kind = of_model[0].logprob_kind if of_model else "sampled"

    async def generate(self, request: TokenRequest) -> AsyncGenerator[EngineTokens | EngineFinish]:
        """See `Engine`."""
        call = self._recording.by_tokens(
            self.model, request.prompt, request.sampling, [one.placed for one in request.media]
        ).call
        ids, logprobs = call.response_ids, call.logprobs
        at_once = 1 if request.stream else max(1, len(ids))
        for start in range(0, len(ids), at_once):
            part = slice(start, start + at_once)
            yield EngineTokens(ids[part], None if logprobs is None else logprobs[part])
        stopped = call.finish_reason == "stop" and bool(ids) and ids[-1] in self._stops
        yield EngineFinish(call.finish_reason, ids[-1] if stopped else None, call.versions)

    async def check(self) -> int | None:
        """See `Engine`."""
        return None

    async def load(self) -> Load | None:
        """See `Engine`."""
        return None

    async def pause(self) -> None:
        """See `Engine`: nothing is ever in flight."""

    async def resume(self) -> None:
        """See `Engine`."""

    def logprob_kind(self, sampling: Sampling) -> str:
        """See `Engine`."""
        return self._kind

    async def close(self) -> None:
        """See `Engine`."""


class RecordedBackend:
    """A `ChatBackend` that has a recording in the place of a service: equal messages have the recorded answer."""

    def __init__(self, model: str, recording: Recording) -> None:
        self.model = model
        self._recording = recording

    async def complete(self, body: dict[str, Any]) -> BackendAnswer:
        """See `ChatBackend`."""
        entry = self._recording.by_messages(self.model, body.get("messages") or [])
        prompt_tokens, completion_tokens = entry.tokens
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
        if prompt_tokens is not None and completion_tokens is not None:
            usage["total_tokens"] = prompt_tokens + completion_tokens
        choice = {"index": 0, "message": entry.answer, "finish_reason": entry.call.finish_reason, "logprobs": None}
        answer = {
            "id": f"chatcmpl-{entry.call.call_id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": [choice],
            "usage": None if None in entry.tokens else usage,
        }
        if not entry.exact:
            return BackendAnswer(body=answer)
        call = entry.call
        return BackendAnswer(
            body=answer, prompt_ids=entry.prompt, response_ids=call.response_ids, logprobs=call.logprobs
        )

    async def embed(self, body: dict[str, Any]) -> bytes:
        """See `ChatBackend`: embeddings are not recorded."""
        raise self._recording.refuse(f"embeddings of model {self.model!r} are not recorded, so none can be replayed")

    async def close(self) -> None:
        """See `ChatBackend`."""


class HearingRenderer:
    """A renderer that tells the recording which messages each prompt was made of."""

    def __init__(self, renderer: Renderer, recording: Recording) -> None:
        self._renderer = renderer
        self._recording = recording
        self.stop_token_ids: list[int] = renderer.stop_token_ids
        self.tokenizer: FastTokenizer = renderer.tokenizer
        self.chat_template_kwargs: Mapping[str, Any] = renderer.chat_template_kwargs

    def is_made(self, kwargs: Mapping[str, Any]) -> bool:
        """See `Renderer`."""
        return self._renderer.is_made(kwargs)

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> "HearingRenderer":
        """See `Renderer`."""
        return HearingRenderer(self._renderer.with_kwargs(kwargs), self._recording)

    @property
    def vision(self) -> Vision | None:
        """See `Renderer`."""
        return self._renderer.vision

    @property
    def markup(self) -> Markup | None:
        """See `Renderer`."""
        return self._renderer.markup

    @property
    def append_only(self) -> Mapping[str, bool] | None:
        """See `Renderer`."""
        return self._renderer.append_only

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        """See `Renderer`."""
        ids = self._renderer.render(messages, tools)
        self._recording.heard[tuple(ids)] = list(messages)
        return ids

    def whole(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        """See `Renderer`."""
        return self._renderer.whole(messages, tools)

    def extend(
        self,
        prompt_ids: list[int],
        response_ids: list[int],
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
    ) -> list[int] | None:
        """See `Renderer`."""
        added = self._renderer.extend(prompt_ids, response_ids, messages, tools)
        if added is not None:
            context = [*prompt_ids, *response_ids]
            before = self._recording.conversation(context)
            if before is not None:
                self._recording.heard[(*context, *added)] = [*before, *messages]
        return added

    def parse(
        self,
        call_id: str,
        prompt_ids: list[int],
        response_ids: list[int],
        logprobs: list[float] | None,
        finish_reason: str,
        tools: Sequence[dict[str, Any]] | None,
    ) -> ParsedAnswer:
        """See `Renderer`."""
        return self._renderer.parse(call_id, prompt_ids, response_ids, logprobs, finish_reason, tools)

    def forced(self, prompt_ids: list[int], tools: Sequence[dict[str, Any]], name: str | None) -> list[int] | None:
        """See `Renderer`."""
        return self._renderer.forced(prompt_ids, tools, name)

    def begun(self, prompt_ids: list[int], text: str) -> list[int] | None:
        """See `Renderer`."""
        return self._renderer.begun(prompt_ids, text)

    def encode_behind(self, text: str) -> list[int]:
        """See `Renderer`."""
        return self._renderer.encode_behind(text)


def _heard(messages: Sequence[Message]) -> list[tuple[Any, ...]]:
    """The messages as what the model would see of them. Those to a service hold their images, and records do not."""
    messages = ShownImages().relayed(list(messages))
    return [one[:3] for one in message_fingerprint.read(messages, message_fingerprint.Numbering())]


def _shared(messages: Sequence[Message], others: Sequence[Message]) -> int:
    """With how many messages both begin."""
    pairs = zip(_heard(messages), _heard(others), strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(messages), len(others)))


def _first_other(recorded: Sequence[Message], now: Sequence[Message]) -> dict[str, Any]:
    """The fields of a `Divergence` that tell of messages; none where all are equal."""
    at = _shared(recorded, now)
    if at == len(recorded) == len(now):
        return {}
    return {
        "message": at,
        "recorded_message": recorded[at] if at < len(recorded) else None,
        "new_message": now[at] if at < len(now) else None,
    }
