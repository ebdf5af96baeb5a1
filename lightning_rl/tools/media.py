"""Images and video frames of a tool's answer, as the parts of an OpenAI message.

Invariant: an image file goes as the bytes that it has, and pixels as PNG, which loses none. A video goes as its frames,
in order, after a line that says so.
"""

import base64
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageSequence, UnidentifiedImageError

from lightning_rl.tools.schemas import ToolResponse

Content = str | list[dict[str, Any]]


def content_of(response: ToolResponse, text: str) -> Content:
    """The content of a `role: tool` message; `text` is the response's, already cut.

    Raises:
        TypeError, ValueError, OSError: an image or a video is nothing of the kind.
    """
    if not response.image and not response.video:
        return text
    parts = [_text(text)] if text else []
    parts += [_image(one) for one in response.image or []]
    for frames in _videos(response.video or []):
        parts += [_text(f"[video: {len(frames)} frames follow as images]"), *map(_image, frames)]
    return parts


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _image(image: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": image_url(image)}}


def image_url(image: Any) -> str:
    """The URL of an image: its own, else a data URL of its file, or of a PNG of its pixels."""
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("image") or image.get("path")
    if isinstance(image, str) and image.startswith(("data:", "http://", "https://")):
        return image
    if isinstance(image, str | os.PathLike):
        image = Path(image).expanduser().read_bytes()
    if isinstance(image, bytes | bytearray):
        return _data_url(bytes(image), _media_type(bytes(image)))
    written = io.BytesIO()
    (image if isinstance(image, Image.Image) else _from_array(image)).save(written, format="PNG")
    return _data_url(written.getvalue(), "image/png")


def _data_url(data: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def _media_type(data: bytes) -> str:
    try:
        with Image.open(io.BytesIO(data)) as opened:
            return opened.get_format_mimetype() or "image/png"
    except UnidentifiedImageError as error:
        raise ValueError("a tool's image is bytes that are no image file") from error


def _from_array(pixels: Any) -> Image.Image:
    if not _is_array(pixels):
        raise TypeError(
            f"a tool's image is of type {type(pixels).__name__}; give a Pillow image, an array, bytes, a path or a URL"
        )
    array = np.asarray(pixels)
    if array.dtype != np.uint8:
        raise TypeError(f"a tool's image is an array of {array.dtype}; give bytes from 0 to 255 (uint8)")
    if array.ndim == 3 and array.shape[-1] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = array.transpose(1, 2, 0)  # channels first, as torch has them
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[:, :, 0]
    return Image.fromarray(np.ascontiguousarray(array))


def _is_array(thing: Any) -> bool:
    return hasattr(thing, "__array__") and not isinstance(thing, Image.Image)


def _videos(videos: list[Any]) -> Iterator[list[Any]]:
    """The frames of each video; a list that holds images is one video."""
    whole = [
        isinstance(one, list | tuple) or (_is_array(one) and np.ndim(one) == 4) or _is_animated(one) for one in videos
    ]
    if videos and not any(whole):
        yield list(videos)
        return
    for one, is_whole in zip(videos, whole, strict=True):
        if not is_whole:
            raise TypeError(
                f"a tool's video is of type {type(one).__name__} beside whole ones; give a list of its frames"
            )
        yield [frame.copy() for frame in ImageSequence.Iterator(one)] if isinstance(one, Image.Image) else list(one)


def _is_animated(thing: Any) -> bool:
    return isinstance(thing, Image.Image) and getattr(thing, "is_animated", False)
