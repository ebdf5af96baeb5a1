"""Images in what a model was asked: where each stands among the tokens, and its bytes, kept once per content.

A call knows its images by the SHA-256 of their bytes; an attempt has one span for each content, whose id is made of the
attempt and that digest, so that recording it again changes nothing. The tokens at an image's place stand for nothing by
themselves: equal tokens with another image are another prompt.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from lightning_rl_adapters import semconv
from lightning_rl_adapters.span import Span


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """An image that stands at the tokens [start, start + length) of some list of tokens."""

    start: int
    length: int
    sha256: str

    def moved(self, by: int) -> "Placed":
        """The same `by` tokens further on."""
        return msgspec.structs.replace(self, start=self.start + by)


def media_span(
    rollout_id: str, attempt_id: str, sha256: str, *, data: bytes, media_type: str, at_ns: int
) -> Span:  # fmt: skip
    """The span that holds an image's bytes, as the client sent them; `at_ns` since the epoch."""
    return Span(
        span_id=f"{attempt_id}-{sha256}",
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        name=semconv.MEDIA_SPAN,
        number=at_ns,
        start_ns=at_ns,
        end_ns=at_ns,
        attributes={semconv.MEDIA_SHA256: sha256, semconv.MEDIA_TYPE: media_type, semconv.MEDIA_DATA: data},
    )


def media_of(spans: Iterable[Span]) -> dict[str, bytes]:
    """The images of an attempt by their SHA-256."""
    held = (span.attributes for span in spans if span.name == semconv.MEDIA_SPAN)
    return {attributes[semconv.MEDIA_SHA256]: attributes[semconv.MEDIA_DATA] for attributes in held}


def url_of(sha256: str) -> str:
    """What stands in recorded messages in the place of an image's bytes."""
    return f"sha256:{sha256}"


def with_urls(messages: Iterable[dict[str, Any]], new: Callable[[str], str]) -> list[dict[str, Any]]:
    """The messages with what `new` gives for the URL of each image."""
    return [
        message | {"content": [_with_url(part, new) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def urls_of(messages: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The URL of each image in messages, in their order."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if (url := _url(part)) is not None:
                yield url


def _with_url(part: Any, new: Callable[[str], str]) -> Any:
    url = _url(part)
    return part if url is None else part | {"image_url": part["image_url"] | {"url": new(url)}}


def _url(part: Any) -> str | None:
    image = part.get("image_url") if isinstance(part, dict) else None
    url = image.get("url") if isinstance(image, dict) else None
    return url if isinstance(url, str) else None
