"""An attempt's live forest from what another gateway recorded of it, so that its agent goes on here.

Invariant: what is continued are the recorded token ids, none is made anew; a request finds the place that it would have
found at the gateway that is gone. Calls that were not delivered count as numbers alone.
"""

from collections.abc import Iterable
from typing import Any

from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import Call, from_span
from lightning_rl_adapters.span import Span
from lightning_rl_proxy import echo
from lightning_rl_proxy.address import Address
from lightning_rl_proxy.attempt import Attempt, LiveCall, Place
from lightning_rl_proxy.dialects import completions, responses
from lightning_rl_proxy.exchange import Exchange
from lightning_rl_proxy.ledger import AttemptInfo
from lightning_rl_proxy.rendering import Renderer
from lightning_rl_proxy.texts import PlainText

_NO_TOOLS = echo.digest_tools(None)


def attempt_of(address: Address, info: AttemptInfo, now: float, renderer: Renderer | None) -> Attempt:
    """The live side of an attempt, with all that is recorded of it."""
    attempt = Attempt(address, info, now)
    if info.spans:
        _Rebuilding(attempt, renderer).take(info.spans)
    return attempt


class _Rebuilding:
    def __init__(self, attempt: Attempt, renderer: Renderer | None) -> None:
        self._attempt = attempt
        self._reader = None if renderer is None else PlainText(renderer)
        # By call id: the live calls, their conversations to the answer, and the digests of their tools.
        self._lives: dict[str, LiveCall] = {}
        self._conversations: dict[str, list[dict[str, Any]]] = {}
        self._tools: dict[str, bytes] = {}
        self._prompts: dict[str, str] = {}  # of completions

    def take(self, spans: Iterable[Span]) -> None:
        """Commit the recorded calls as they were committed: in the order in which they were answered."""
        calls = [(from_span(span), span.attributes) for span in spans if span.name == semconv.CALL_SPAN]
        for call, attributes in sorted(calls, key=lambda one: (one[0].end_ns, one[0].number)):
            self._attempt.number_after(call.number)
            if not call.delivered or semconv.OUTPUT_MESSAGES not in attributes:
                continue
            if attributes[semconv.DIALECT] == completions.NAME:
                self._take_text(call, attributes)
            else:
                self._take_chat(call, attributes)
            if (request := attributes.get(semconv.REQUEST)) is not None:
                self._attempt.recorded.setdefault(bytes.fromhex(request), []).append(self._lives[call.call_id])

    def _take_chat(self, call: Call, attributes: dict[str, Any]) -> None:
        attempt, parent = self._attempt, self._parent(call)
        before = [] if parent is None else self._conversations[parent.call.call_id]
        messages = [*before, *attributes[semconv.INPUT_MESSAGES]]
        told = attributes.get(semconv.TOOLS)
        tools = _NO_TOOLS if told is None else bytes.fromhex(told)
        tools = tools if parent is None else self._tools[parent.call.call_id]
        trail = attempt.follow(call.model, messages, tools)
        if parent is not None:
            trail.continued = parent  # which of equal ones it was is recorded
        said = attributes[semconv.OUTPUT_MESSAGES][0]
        new = attributes[semconv.INPUT_MESSAGES]
        exchange = Exchange(b"")
        exchange.commits.append(attempt.answered(Place(parent, call.prompt_ids, [], new, None, trail), call, said))
        instructed = attributes.get(semconv.INSTRUCTIONS, 0)
        conversation = [*messages, said]
        if attributes[semconv.DIALECT] == responses.NAME:
            exchange.responses[responses.response_id(call.call_id)] = conversation[instructed:]
        self._remember(call, exchange.commits[0][1])
        self._conversations[call.call_id] = conversation
        self._tools[call.call_id] = tools
        attempt.commit(exchange)

    def _take_text(self, call: Call, attributes: dict[str, Any]) -> None:
        """A prompt that its client wrote goes on as text and, since nobody recorded which it was, as ids."""
        attempt, parent, reader = self._attempt, self._parent(call), self._reader
        if reader is None:
            return
        [written] = attributes[semconv.INPUT_MESSAGES]
        prompt = written["content"]
        if parent is not None:
            prompt = self._prompts[parent.call.call_id] + reader.tokenizer.decode(parent.call.response_ids) + prompt
        trail = attempt.follow(f"{call.model}\n{completions.NAME}", [written], _NO_TOOLS)
        place = Place(parent, call.prompt_ids, [], [written], None, trail)
        _, live = attempt.answered(place, call, attributes[semconv.OUTPUT_MESSAGES][0])
        self._remember(call, live)
        self._prompts[call.call_id] = prompt
        attempt.texts.add(call.model, prompt, live)
        attempt.texts.add(call.model, live.prompt_ids(), live)

    def _parent(self, call: Call) -> LiveCall | None:
        return None if call.parent_id is None else self._lives[call.parent_id]

    def _remember(self, call: Call, live: LiveCall) -> None:
        self._lives[call.call_id] = live
