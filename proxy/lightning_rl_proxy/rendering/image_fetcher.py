"""Images that a message names by an http(s) URL: fetched from the hosts that the operator allows, and from no other.

Invariant: no request leaves for a host that is not on the list, neither by a redirect (none is followed) nor by how a
URL is written: what is checked is the parsed URL that the request is made with. With an empty list nothing is fetched.
"""

import re
from collections.abc import Sequence

import aiohttp
from yarl import URL

from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.rendering.images import Image, image_of

MOST_BYTES = 20 * 2**20  # of one image
_SECONDS = 30.0
_ENTRY = re.compile(r"(?P<host>[a-z0-9_.-]+|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?")
_PORTS = {"http": 80, "https": 443}
_HEADERS = {"accept": "image/png, image/jpeg, image/gif, image/webp", "user-agent": "lightning_rl"}


class ImageFetcher:
    """Fetches images from `allowed` hosts: each `host`, which means its usual ports, or `host:port`.

    Raises ValueError for what is neither: `images.example.com`, `127.0.0.1:8000`.
    """

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        self._allowed = {_entry(one) for one in allowed}
        self._session: aiohttp.ClientSession | None = None

    def check(self, where: str, url: str) -> None:
        """Raises GatewayError(400) for a URL that is not fetched here."""
        if url.startswith("sha256:"):
            raise _refused(
                f"{where} is {url[:80]!r}, which was not shown in this attempt: send its bytes the first time"
            )
        parsed = _parsed(url)
        if parsed is None:
            raise _refused(f"{where} is at {url[:60]!r}; images come as data:image/png;base64,... or at http(s) URLs")
        if parsed.user is not None or parsed.password is not None:
            raise _refused(f"{where} is at a URL with a user or a password; leave them out")
        host, port = parsed.host or "", parsed.port
        if not {(host, None if port == _PORTS[parsed.scheme] else port), (host, port)} & self._allowed:
            raise _refused(
                f"{where} is at {host!r}, port {port}, and images are not fetched from there: send it as "
                "data:image/png;base64,..., or allow the host with gateway.allowed_media_domains "
                "(`serve --allowed-media-domain`)"
            )

    async def fetch(self, where: str, url: str) -> Image:
        """The image at an allowed URL. Raises GatewayError: 503 where another try may help, 400 for what is no image,
        or is refused there."""
        self.check(where, url)
        parsed = _parsed(url)
        assert parsed is not None
        at = f"{where}: {parsed.with_query(None)}"
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=_SECONDS), headers=_HEADERS, cookie_jar=aiohttp.DummyCookieJar()
            )
        try:
            async with self._session.get(parsed, allow_redirects=False) as response:
                if response.status in (408, 425, 429) or response.status >= 500:
                    raise _failed(f"{at} answered {response.status}")
                if 300 <= response.status < 400:
                    raise _refused(f"{at} sends on to another URL, which is not followed: name that one")
                if response.status != 200:
                    raise _refused(f"{at} answered {response.status}")
                data = await _bounded(response, at)
        except (aiohttp.ClientError, TimeoutError) as error:
            why = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else type(error).__name__
            raise _failed(f"{at} cannot be fetched: {why}") from error  # others name the URL, with what signs it
        return image_of(at, data)

    async def close(self) -> None:
        """Free the connections."""
        if self._session is not None:
            await self._session.close()


def _entry(word: str) -> tuple[str, int | None]:
    match = _ENTRY.fullmatch(word.lower())
    if match is None or int(match["port"] or 0) > 65535:
        raise ValueError(
            f"{word!r} is no host that images are fetched from; write images.example.com or 127.0.0.1:8000, without "
            "https:// and without a path"
        )
    return match["host"].strip("[]"), None if match["port"] is None else int(match["port"])


def _parsed(url: str) -> URL | None:
    try:
        parsed = URL(url)
        return parsed if parsed.scheme in _PORTS and parsed.host and parsed.port else None
    except ValueError:
        return None


async def _bounded(response: aiohttp.ClientResponse, at: str) -> bytes:
    data = bytearray()
    async for part in response.content.iter_chunked(2**16):
        data += part
        if len(data) > MOST_BYTES:
            raise _refused(f"{at} has more than {MOST_BYTES} bytes: make it smaller")
    return bytes(data)


def _refused(message: str) -> GatewayError:
    return GatewayError(400, message, param="messages", code="invalid_image_url")


def _failed(message: str) -> GatewayError:
    return GatewayError(503, message, param="messages", code="invalid_image_url", retry=True)
