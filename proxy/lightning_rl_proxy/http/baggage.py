"""Who calls, as OpenTelemetry's context tells it: an entry of the `baggage` header that instrumented clients send."""

import re
from collections.abc import Iterable

from opentelemetry.baggage import get_baggage
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context

from lightning_rl_adapters import semconv
from lightning_rl_proxy.address import as_tag

_PROPERTIES = re.compile(";[^,]*")  # of an entry; the propagator takes them for a part of its value
_PROPAGATOR = W3CBaggagePropagator()


def agent_of(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The calling agent, the entry `lightning_rl.agent`, as a tag; None where there is none."""
    sent = b",".join(value for name, value in headers if name == b"baggage").decode("latin-1")
    if not sent:
        return None
    carried = _PROPAGATOR.extract({"baggage": _PROPERTIES.sub("", sent)}, Context())
    return as_tag(str(get_baggage(semconv.AGENT, carried) or "")) or None
