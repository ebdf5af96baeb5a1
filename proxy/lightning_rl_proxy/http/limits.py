"""What one client may ask of a server: every limit by name, with its default and the error that refuses more.

Invariant: a limit refuses, it never cuts; and what is too large is not read to its end.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec

from lightning_rl_proxy.errors import GatewayError

_Limit = Annotated[int, msgspec.Meta(ge=1)]
_BODY_BYTES = 2**20  # beside those of a prompt's tokens
_TOKEN_BYTES = 64
_LISTS = ("messages", "input")  # of a request, by its dialect


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of one server.

    `body_bytes` are those of a request at a model door, fewer where no prompt can need as many (`for_context`);
    `control_body_bytes` at the control plane, where tasks come in by the thousand; `header_bytes` those of a
    request's path and headers; `messages` those of one request; `calls_in_flight` those of one attempt;
    `open_attempts` those of the server, at which nothing more is handed out. A connection has `head_seconds` for
    the head of a request, and is closed where `body_seconds` bring nothing of its body.
    """

    body_bytes: _Limit = 64 * 2**20
    control_body_bytes: _Limit = 256 * 2**20
    header_bytes: _Limit = 64 * 2**10
    messages: _Limit = 10_000
    calls_in_flight: _Limit = 1024
    open_attempts: _Limit = 10_000
    head_seconds: _Limit = 30
    body_seconds: _Limit = 60

    def for_context(self, tokens: int) -> "RequestLimits":
        """The limits of a server whose prompts have so many tokens at most.

        A token is some 4 bytes of text, and JSON writes one byte as 6 at worst. What is left is for tools, and for what
        a chat format leaves out of a conversation.
        """
        return msgspec.structs.replace(self, body_bytes=min(self.body_bytes, _BODY_BYTES + _TOKEN_BYTES * tokens))

    def check_head(self, scope: Mapping[str, Any]) -> None:
        """Raises GatewayError(431) for a path and headers that are too long."""
        if head_bytes(scope) > self.header_bytes:
            raise GatewayError(431, f"the request's path and headers are over {self.header_bytes} bytes")

    def check_body(self, size: int) -> None:
        """Raises GatewayError(413) for a body of that many bytes."""
        if size > self.body_bytes:
            raise GatewayError(413, f"the request body is over {self.body_bytes} bytes")

    def check_messages(self, fields: Mapping[str, Any], before: int = 0) -> None:
        """Raises GatewayError(400) for a request of too many messages: those in the fields, and so many before them."""
        for name in _LISTS:
            value = fields.get(name)
            if isinstance(value, list) and before + len(value) > self.messages:
                raise GatewayError(
                    400, f"{name}: {before + len(value)} of them, at most {self.messages} are taken", param=name
                )

    def check_calls(self, in_flight: int, attempt_id: str) -> None:
        """Raises GatewayError(429) for one more call than the attempt may have in flight."""
        if in_flight >= self.calls_in_flight:
            raise GatewayError(
                429,
                f"attempt {attempt_id} has {in_flight} calls in flight, and may have no more: wait for an answer",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry=True,
            )


def head_bytes(scope: Mapping[str, Any]) -> int:
    """How long a request's path and headers are."""
    lines: Iterable[tuple[bytes, bytes]] = scope["headers"]
    size = len(scope["path"]) + len(scope.get("query_string", b""))
    for name, value in lines:
        size += len(name) + len(value)
    return size


def announced_bytes(headers: Mapping[bytes, bytes]) -> int:
    """How long a request says that its body is; 0 where it does not."""
    announced = headers.get(b"content-length", b"")
    return int(announced) if announced.isdigit() else 0
