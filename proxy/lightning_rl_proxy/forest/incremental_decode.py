"""Long chat requests read from where the attempt's earlier ones end: what a client sends again is not decoded again.

A client that sends its whole history with every turn sends the same bytes up to its last message. Of an attempt's
latest long requests the digests of those bytes are kept, with what their messages were read as; a body that begins with
such bytes is decoded from there on. That is a shortcut alone: where it is not sure to be the same, all is read.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import xxhash

from lightning_rl_proxy.dialects.base import decode

_LONG = 16_384  # bytes; a shorter body is decoded in less time than it takes to look
_KEPT = 32  # beginnings, those used last: so many branches of an attempt may take turns
# A body to where its messages open, with nothing nested before them: so these are its own, and no field's.
_SCALAR = rb'(?:"[^"\\]*"|[-+.0-9eE]+|true|false|null)'
_HEAD = re.compile(rb'\s*\{\s*(?:"[^"\\]*"\s*:\s*' + _SCALAR + rb'\s*,\s*)*"messages"\s*:\s*(?=\[)')
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_values = msgspec.json.Decoder(dict[str, Any])
_messages = msgspec.json.Decoder(list[Any])


class DecodedBody(NamedTuple):
    """A request's fields. Its messages are `read`, as they were read before, and then those in the fields."""

    body: bytes
    fields: dict[str, Any]
    read: Sequence[dict[str, Any]] = ()
    opens: int = 0  # where in the body the messages begin, 0 where that is not known
    ends: int = 0  # where the last one ends

    def whole(self) -> dict[str, Any]:
        """All its fields, as the client wrote them."""
        return decode(self.body) if self.read else self.fields


@dataclass(eq=False, slots=True)
class _Beginning:
    """Bytes of an earlier body, to the end of its last message: where its messages open, and what they are."""

    opens: int
    ends: int
    digest: bytes
    messages: Sequence[dict[str, Any]]


class IncrementalDecode:
    """The long requests of one attempt."""

    def __init__(self) -> None:
        self._beginnings: list[_Beginning] = []  # the last used one at the end

    def read(self, body: bytes) -> DecodedBody:
        """A request. Raises GatewayError(400) for a body that is no JSON object."""
        if len(body) < _LONG or (head := _HEAD.match(body)) is None:
            return DecodedBody(body, decode(body))
        return self._behind(body) or _opened(body, body, head.end(), 0) or DecodedBody(body, decode(body))

    def keep(self, said: DecodedBody, messages: Sequence[dict[str, Any]]) -> None:
        """Remember what all the messages of a request were read as."""
        if said.opens:
            digest = xxhash.xxh3_128_digest(memoryview(said.body)[: said.ends])
            self._beginnings = [beginning for beginning in self._beginnings if beginning.digest != digest][1 - _KEPT :]
            self._beginnings.append(_Beginning(said.opens, said.ends, digest, messages))

    def _behind(self, body: bytes) -> DecodedBody | None:
        """The request, read behind the longest beginning that it shares with an earlier one and goes on from."""
        # No secret: who makes two beginnings collide confuses an attempt of its own.
        digest, at, longest = xxhash.xxh3_128(), 0, None
        view = memoryview(body)
        for beginning in sorted(self._beginnings, key=lambda beginning: beginning.ends):
            if beginning.ends >= len(body):
                break
            digest.update(view[at : beginning.ends])
            at = beginning.ends
            if body[at : at + 1] == b"," and digest.digest() == beginning.digest:
                longest = beginning
        if longest is None:
            return None
        rest = body[: longest.opens + 1] + body[longest.ends + 1 :]
        request = _opened(body, rest, longest.opens, longest.ends - longest.opens)
        if request is None:
            return None
        self._beginnings.remove(longest)
        self._beginnings.append(longest)
        return request._replace(read=longest.messages)


def _opened(body: bytes, rest: bytes, opens: int, left_out: int) -> DecodedBody | None:
    """The fields of `rest`, which is the body without the first `left_out` bytes of the messages that open at `opens`.

    None where that is no such object, where it holds none of them, or where it holds them twice.
    """
    try:
        written = bytes(_fields.decode(rest)["messages"])
        messages = _messages.decode(written)
        fields = _values.decode(rest[:opens] + b"0" + rest[opens + len(written) :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if fields["messages"] != 0 or not messages:  # others come later, and every reader takes the last ones
        return None
    fields["messages"] = messages
    return DecodedBody(body, fields, (), opens, opens + len(written[:-1].rstrip()) + left_out)
