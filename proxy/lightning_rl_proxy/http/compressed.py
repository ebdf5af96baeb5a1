"""Bodies that a client has compressed, unpacked as far as the limit allows: a small one may unfold to much. Pure."""

import zlib
from collections.abc import Callable

from lightning_rl_proxy.errors import GatewayError

_EITHER = 47  # zlib's word for: gzip or zlib, by the header
_KNOWN = ("gzip", "x-gzip", "deflate")


def unpacked(body: bytes, encoding: str, limit: int, check: Callable[[int], None]) -> bytes:
    """The body behind a `content-encoding`. At most `limit` bytes and one are unpacked, of which `check` is told.

    Raises GatewayError(415) for an encoding that is not known, and (400) for a body that is not of it.
    """
    name = encoding.strip().lower()
    if name not in _KNOWN:
        raise GatewayError(
            415, f"content-encoding {encoding[:40]!r} is not read here; send gzip, deflate, or the body as it is"
        )
    pieces: list[bytes] = []
    size = 0
    try:
        while body:  # of gzip there may be several, one after the other
            member = zlib.decompressobj(_EITHER)
            pieces.append(member.decompress(body, limit + 1 - size))
            size += len(pieces[-1])
            check(size)
            if not member.eof:
                raise GatewayError(400, f"the request body breaks off: it is not all of its {name}")
            body = member.unused_data
    except zlib.error as error:
        raise GatewayError(400, f"the request body is not {name}, as its content-encoding says: {error}") from error
    return b"".join(pieces)
