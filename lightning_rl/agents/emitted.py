"""What one rollout has emitted, and how the code that it runs finds the place to emit to.

Invariant: the place is in OpenTelemetry's context, nowhere else. So it goes where that goes, into tasks and into the
threads that carry it, and many rollouts at once share nothing. The spans are ordinary ones, of a provider of our own.
"""

import functools
import hashlib
import logging
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opentelemetry import context, trace
from opentelemetry.util.types import AttributeValue

from lightning_rl.store.contract import ErrorInfo, Reward
from lightning_rl_adapters import semconv
from lightning_rl_adapters.text import encodable

if TYPE_CHECKING:  # nothing of the SDK is loaded before a rollout emits something
    from opentelemetry.sdk.trace import ReadableSpan

_KEY = context.create_key("lightning_rl.agents.emitted")
_log = logging.getLogger(__name__)


class Emitted:
    """What the attempt has emitted so far; safe to share between threads.

    `rewards` are the attempt's own, by name, the last of a name. `call_rewards` are those of single calls; their ids
    are the same however often they are posted. `spans` have ended. `trouble` is why the attempt's reward may say
    nothing of its agent, where something went wrong and it was judged all the same.
    """

    def __init__(self, rollout_id: str, attempt_id: str) -> None:
        self.rewards: dict[str, float] = {}
        self.call_rewards: list[Reward] = []
        self.spans: list[ReadableSpan] = []
        self.trouble: ErrorInfo | None = None
        # All that is emitted outside of anybody's span is one trace, whatever thread it is in.
        self.trace_id = int.from_bytes(hashlib.blake2b(attempt_id.encode(), digest_size=16).digest())
        self._rollout_id = rollout_id
        self._ids: dict[str, AttributeValue] = {semconv.ROLLOUT_ID: rollout_id, semconv.ATTEMPT_ID: attempt_id}
        self._attempt_id = attempt_id
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Inside the block, and in what it starts, this is `running`. What is emitted after it is left out."""
        token = context.attach(context.set_value(_KEY, self, trace.set_span_in_context(trace.INVALID_SPAN)))
        try:
            yield
        finally:
            context.detach(token)
            with self._lock:
                self._closed = True

    def reward(
        self, value: float, name: str, call_id: str | None, attributes: Mapping[str, AttributeValue] | None = None
    ) -> None:
        """A reward, of the attempt or of one call; `attributes` are its span's, beside ours."""
        with self._lock:
            if self._closed:
                _log.warning("rollout %s: the reward %r came after its agent had ended", self._rollout_id, name)
            elif call_id is None:
                self.rewards[name] = value
            else:
                reward_id = f"{self._attempt_id}-call-{len(self.call_rewards)}"
                self.call_rewards.append(Reward(value=value, name=name, call_id=call_id, reward_id=reward_id))
        of_call = {} if call_id is None else {semconv.REWARD_CALL: call_id}
        own_attributes: dict[str, AttributeValue] = {semconv.REWARD_NAME: name, semconv.REWARD_VALUE: value, **of_call}
        self._end(self._begin(semconv.REWARD_SPAN, {**(attributes or {}), **own_attributes}))

    def message(self, text: str, attributes: Mapping[str, AttributeValue] | None = None) -> None:
        """A remark; `attributes` as of `reward`."""
        self._end(self._begin(semconv.MESSAGE_SPAN, {**(attributes or {}), semconv.MESSAGE: text}))

    def object(self, text: str, attributes: Mapping[str, AttributeValue] | None = None) -> None:
        """A value as JSON; `attributes` as of `reward`."""
        self._end(self._begin(semconv.OBJECT_SPAN, {**(attributes or {}), semconv.OBJECT: text}))

    def exception(self, error: BaseException, attributes: Mapping[str, AttributeValue] | None = None) -> None:
        """An exception; `attributes` as of `reward`."""
        span = self._begin(semconv.EXCEPTION_SPAN, dict(attributes or {}))
        _tell_exception(span, error)
        self._end(span)

    @contextmanager
    def operation(self, name: str, inputs: str | None) -> Iterator[Callable[[str], None]]:
        """A span around the block, parent of what is emitted in there; the block may tell its output."""
        attributes = {} if inputs is None else {semconv.OPERATION_INPUTS: inputs}
        span = self._begin(semconv.OPERATION_SPAN, {semconv.OPERATION_NAME: name, **attributes})
        token = context.attach(trace.set_span_in_context(span))
        try:
            yield functools.partial(span.set_attribute, semconv.OPERATION_OUTPUT)
        except BaseException as error:
            _tell_exception(span, error)
            raise
        finally:
            context.detach(token)
            self._end(span)

    def _begin(self, name: str, attributes: dict[str, AttributeValue]) -> trace.Span:
        return _tracer().start_span(name, attributes={**attributes, **self._ids})

    def _end(self, span: trace.Span) -> None:
        from opentelemetry.sdk.trace import ReadableSpan

        span.end()
        with self._lock:
            if isinstance(span, ReadableSpan) and not self._closed:  # it is another where OTEL_SDK_DISABLED is set
                self.spans.append(span)


def running() -> Emitted | None:
    """Where this code's rollout emits to; None outside of any."""
    emitted = context.get_value(_KEY)
    return emitted if isinstance(emitted, Emitted) else None


def _tell_exception(span: trace.Span, error: BaseException) -> None:
    from opentelemetry.semconv.attributes import exception_attributes as names

    # By the standard library, which comes through exceptions that cannot be shown.
    exception = traceback.TracebackException.from_exception(error)
    kind, message = type(error), encodable(str(exception))
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    attributes = {
        names.EXCEPTION_TYPE: module + kind.__qualname__,
        names.EXCEPTION_MESSAGE: message,
        names.EXCEPTION_STACKTRACE: encodable("".join(exception.format())),
    }
    span.add_event("exception", attributes)
    span.set_status(trace.Status(trace.StatusCode.ERROR, message))


@functools.cache
def _tracer() -> trace.Tracer:
    """The tracer of all rollouts of this process. No setting of the agent's own telemetry changes what it records."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    class TraceOfTheAttempt(RandomIdGenerator):
        def generate_trace_id(self) -> int:
            emitted = running()
            return super().generate_trace_id() if emitted is None else emitted.trace_id

    unset = SpanLimits.UNSET
    limits: Any = dict.fromkeys(
        (
            "max_attributes", "max_events", "max_links", "max_span_attributes", "max_event_attributes",
            "max_link_attributes", "max_attribute_length", "max_span_attribute_length",
        ),
        unset,
    )  # fmt: skip
    provider = TracerProvider(
        sampler=ALWAYS_ON,
        resource=Resource({"service.name": "lightning_rl"}),
        shutdown_on_exit=False,
        id_generator=TraceOfTheAttempt(),
        span_limits=SpanLimits(**limits),
    )
    return provider.get_tracer("lightning_rl")
