"""An attempt's live forest from what is recorded of it, by another gateway or before a restart: its agent goes on here.

Invariant: what is continued are the recorded token ids, none is made anew; a request finds the place that it would have
found at the gateway that is gone. Calls that were not delivered count as numbers alone. A call of which something is
missing, its parent or an image, is not continued: what goes on behind it begins a tree of its own.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import Call, from_span
from lightning_rl_adapters.span import Span
from lightning_rl_proxy.dialects import completions, responses
from lightning_rl_proxy.forest import message_fingerprint
from lightning_rl_proxy.forest.live_forest import LiveForest
from lightning_rl_proxy.forest.nodes import Answered, LiveCall, Place, RecordedAnswer, RequestKey
from lightning_rl_proxy.forest.raw_prompts import RawPromptReader
from lightning_rl_proxy.forest.restated_answers import is_cut
from lightning_rl_proxy.rendering import images
from lightning_rl_proxy.rendering.base import Renderer
from lightning_rl_proxy.rendering.images import Image

_NO_TOOLS = message_fingerprint.digest_tools(None)
_ANYTHING = {"type": "object", "properties": {}}


def recovered(spans: Sequence[Span], renderer: Renderer | None) -> "Recovery":
    """The live side of an attempt of which `spans` are recorded; an empty one where there are none."""
    recovery = Recovery(renderer)
    if spans:
        recovery.take(spans)
    return recovery


class Recovery:
    """What recorded spans make of an attempt.

    `recorded` are the answers by their requests, `responses` the conversations that a client may continue by a
    response's id, `next_number` the number of the next call.
    """

    def __init__(self, renderer: Renderer | None) -> None:
        self.forest = LiveForest()
        self.recorded: dict[bytes, list[RecordedAnswer]] = {}
        self.responses: dict[str, list[dict[str, Any]]] = {}
        self.next_number = 0
        self._renderer = renderer
        self._reader = None if renderer is None else RawPromptReader(renderer)
        # By call id: the live calls, their conversations to the answer, and the digests of their tools.
        self._lives: dict[str, LiveCall] = {}
        self._conversations: dict[str, list[dict[str, Any]]] = {}
        self._tools: dict[str, bytes] = {}
        self._prompts: dict[str, str] = {}  # of completions

    def take(self, spans: Sequence[Span]) -> None:
        """Commit the recorded calls as they were committed: in the order in which they were answered."""
        for span in spans:
            if span.name == semconv.MEDIA_SPAN:
                image = _image(span.attributes)
                self.forest.images.add(image)
                self.forest.images.recorded.add(image.sha256)
            elif span.name == semconv.TOOLS_SPAN:
                self.forest.tools_recorded.add(span.attributes[semconv.TOOLS])
        for call, attributes in _as_answered(spans):
            self.next_number = max(self.next_number, call.number + 1)
            if call.delivered and semconv.OUTPUT_MESSAGES in attributes and self._is_whole(call):
                if attributes[semconv.DIALECT] == completions.NAME:
                    self._take_text(call, attributes)
                else:
                    self._take_chat(call, attributes)
        for equal in self.recorded.values():  # the choices of one request stand together, in their order
            equal.sort(key=lambda one: one.live.call.number)

    def _is_whole(self, call: Call) -> bool:
        return (call.parent_id is None or call.parent_id in self._lives) and all(
            image.sha256 in self.forest.images for image in call.media
        )

    def _take_chat(self, call: Call, attributes: dict[str, Any]) -> None:
        parent = self._parent(call)
        before = [] if parent is None else self._conversations[parent.call.call_id]
        messages = [*before, *attributes[semconv.INPUT_MESSAGES]]
        digest = attributes.get(semconv.TOOLS)
        tools = _NO_TOOLS if digest is None else bytes.fromhex(digest)
        tools = tools if parent is None else self._tools[parent.call.call_id]
        request = RequestKey(message_fingerprint.seed(call.model), messages, tools)
        trail = self.forest.follow(request)
        if trail is not None and parent is not None:
            trail.continued = parent  # which of equal ones it was is recorded
        message = attributes[semconv.OUTPUT_MESSAGES][0]
        new = attributes[semconv.INPUT_MESSAGES]
        place = Place(parent, call.prompt_ids, [], new, None, request, trail)
        reasoned = bool(message.get("reasoning_content") or message.get("reasoning"))
        # A service's reasoning tells no answers apart, here as there.
        thought = lru_cache(1)(partial(_thought, self._renderer, call, message)) if call.trainable else None
        cut = is_cut(call, self._renderer)
        [live] = self.forest.remember([Answered(place, call, message, reasoned, thought=thought, cut=cut)])
        instructed = attributes.get(semconv.INSTRUCTIONS, 0)
        conversation = [*messages, message]
        if attributes[semconv.DIALECT] == responses.NAME:
            self.responses[responses.response_id(call.call_id)] = conversation[instructed:]
        self._remember(call, live, attributes)
        self._conversations[call.call_id] = conversation
        self._tools[call.call_id] = tools

    def _take_text(self, call: Call, attributes: dict[str, Any]) -> None:
        """A prompt that its client wrote, as text or as ids: so it goes on."""
        parent, reader = self._parent(call), self._reader
        if reader is None:
            return
        [written] = attributes[semconv.INPUT_MESSAGES]
        prompt: str | list[int]
        if attributes.get(semconv.PROMPT_AS_IDS):
            prompt = call.prompt_ids if parent is None else parent.context() + call.prompt_ids
        else:
            before = "" if parent is None else self._prompts[parent.call.call_id]
            answered = "" if parent is None else reader.tokenizer.decode(parent.call.response_ids)
            prompt = self._prompts[call.call_id] = f"{before}{answered}{written['content']}"
        request = RequestKey(message_fingerprint.seed(f"{call.model}\n{completions.NAME}"), [written], _NO_TOOLS)
        place = Place(parent, call.prompt_ids, [], [written], None, request, self.forest.follow(request))
        message = attributes[semconv.OUTPUT_MESSAGES][0]
        [live] = self.forest.remember([Answered(place, call, message, reasoned=False, text=(call.model, prompt))])
        self._remember(call, live, attributes)

    def _parent(self, call: Call) -> LiveCall | None:
        return None if call.parent_id is None else self._lives[call.parent_id]

    def _remember(self, call: Call, live: LiveCall, attributes: dict[str, Any]) -> None:
        self._lives[call.call_id] = live
        if (request := attributes.get(semconv.REQUEST)) is not None:
            self.recorded.setdefault(bytes.fromhex(request), []).append(RecordedAnswer(live, attributes))


def _thought(renderer: Renderer | None, call: Call, message: dict[str, Any]) -> bytes | None:
    """What identifies the reasoning that was sampled, which is read from its tokens again; None where they are not read
    as they were then."""
    if renderer is None:
        return None
    names = [made["function"]["name"] for made in message.get("tool_calls") or ()]
    tools = [{"type": "function", "function": {"name": name, "parameters": _ANYTHING}} for name in names]
    answer = renderer.parse(call.call_id, call.prompt_ids, call.response_ids, None, call.finish_reason, tools)
    return (
        message_fingerprint.thought_of(answer.reasoning)
        if answer.content.strip() == message["content"].strip()
        else None
    )


def _as_answered(spans: Iterable[Span]) -> list[tuple[Call, dict[str, Any]]]:
    """The calls and what else their spans say, in the order of their answers; each behind its parent, whatever the
    clocks of the gateways that recorded them said."""
    calls = [(from_span(span), span.attributes) for span in spans if span.name == semconv.CALL_SPAN]
    calls.sort(key=lambda one: one[0].number)
    at: dict[str | None, int] = {}
    for call, _ in calls:
        at[call.call_id] = max(call.end_ns, at.get(call.parent_id, 0))
    return sorted(calls, key=lambda one: at[one[0].call_id])


def _image(attributes: dict[str, Any]) -> Image:
    data = attributes[semconv.MEDIA_DATA]
    size = images.size_of(data)
    assert size is not None, "it was read before it was recorded"
    return Image(attributes[semconv.MEDIA_SHA256], attributes[semconv.MEDIA_TYPE], data, size)
