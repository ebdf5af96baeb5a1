"""Where spans are sent: an OTLP endpoint as configurations and command lines name it.

Invariant: no secret stands in it. What a collector wants as a key comes from OpenTelemetry's own variable of the
environment, OTEL_EXPORTER_OTLP_HEADERS.
"""

import re

from lightning_rl.errors import Explained

_URL = re.compile(r"https?://[^/?#@\s]+(/[^?#@\s]*)?")
_PATH = "/v1/traces"


class EndpointRefused(Explained):
    """No endpoint; the message does not repeat it, since somebody may have put a key there."""


def traces_url(endpoint: str, name: str) -> str:
    """The URL that spans are posted to: OTLP's path is added where the endpoint does not end in it.

    `name` is what the endpoint was given as, for the error. Raises EndpointRefused.
    """
    if not _URL.fullmatch(endpoint):
        raise EndpointRefused(
            f"{name} is no http://... or https://... of an OTLP endpoint, such as http://127.0.0.1:4318, without a "
            "user, a key or a query; a key goes into the environment: "
            "OTEL_EXPORTER_OTLP_HEADERS='authorization=Bearer%20KEY'"
        )
    base = endpoint.rstrip("/")
    return base if base.endswith(_PATH) else base + _PATH
