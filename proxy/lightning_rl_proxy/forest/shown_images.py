"""The images that an attempt's requests have shown, each held once, however often its clients send it.

Invariant: in all calls of an attempt a URL means the same image; and a message that is kept names its images by the
digests of their bytes, in the place of the bytes.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import xxhash

from lightning_rl_adapters.media import url_of, urls_of, with_urls
from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.rendering import images
from lightning_rl_proxy.rendering.images import Image


class ShownImages:
    """The images of one attempt by the SHA-256 of their bytes; those of `recorded` have a span."""

    def __init__(self) -> None:
        self.recorded: set[str] = set()
        self._images: dict[str, Image] = {}
        # The SHA-256 of what each URL or reference holds, by a digest of it: a URL may hold the bytes themselves. No
        # secret: who makes two of them collide confuses an attempt of its own.
        self._named: dict[bytes, str] = {}

    def __bool__(self) -> bool:
        return bool(self._images)

    def __getitem__(self, sha256: str) -> Image:
        return self._images[sha256]

    def __contains__(self, sha256: str) -> bool:
        return sha256 in self._images

    def add(self, image: Image, url: str | None = None) -> None:
        """Know an image, and that the URL means it, if it means no other one already."""
        self._images.setdefault(image.sha256, image)
        self._named[_digest(url_of(image.sha256))] = image.sha256
        if url is not None:
            self._named.setdefault(_digest(url), image.sha256)

    def knows(self, url: str) -> bool:
        """Whether it is known what the URL or reference means."""
        return _digest(url) in self._named

    def at(self, url: str) -> Image:
        """What a known URL or reference means."""
        return self._images[self._named[_digest(url)]]

    def named(self, messages: list[dict[str, Any]], count: int = 0) -> list[dict[str, Any]]:
        """The messages with references to their images in the place of URLs that hold them, or are known; the first
        `count` messages as they are, and all where there are references alone. Raises GatewayError(400) for a URL that
        says it holds an image, and holds none."""
        urls = [(where, url) for where, url in images.urls(messages[count:], count) if not url.startswith(url_of(""))]
        if not urls:
            return messages
        for where, url in urls:
            if images.is_data(url) and not self.knows(url):
                self.add(images.read(where, url), url)
        return [*messages[:count], *with_urls(messages[count:], self._reference)]

    def relayed(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages as `named` has them, of a request that goes on to a service: what holds no image that is read
        here stays as it is, since only the service knows what it takes."""

        def reference(url: str) -> str:
            if images.is_data(url) and not self.knows(url):
                with suppress(GatewayError):
                    self.add(images.read("", url), url)
            return self._reference(url) if images.is_data(url) else url

        return with_urls(messages, reference)

    def referred_to(self, messages: Sequence[dict[str, Any]]) -> list[Image]:
        """The images whose references stand in messages, in their order."""
        references = (url for url in urls_of(messages) if url.startswith(url_of("")))
        return [self.at(url) for url in references if self.knows(url)]

    def of(self, messages: Sequence[dict[str, Any]]) -> list[Image]:
        """The images that messages show, in their order. Raises GatewayError(400) for one that is not known."""
        return [self.at(url) if self.knows(url) else images.read(where, url) for where, url in images.urls(messages)]

    def _reference(self, url: str) -> str:
        sha256 = self._named.get(_digest(url))
        return url if sha256 is None else url_of(sha256)


def _digest(url: str) -> bytes:
    return xxhash.xxh3_128_digest(url.encode("utf-8", "surrogatepass"))
