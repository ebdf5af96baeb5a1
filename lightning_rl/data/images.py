"""Images of tasks as text that travels: a data URL, as an agent sends it.

A task is JSON, so the bytes of an image, as Parquet files hold them, become its data URL; a path and a URL are text
already.
"""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.request import url2pathname

_URLS = ("data:", "http://", "https://")
_STORED = {"bytes", "path"}  # an image, as `datasets` stores it


def as_text(stored: Mapping[str, Any]) -> str | None:
    """The data URL of an image as `datasets` stores it, with its bytes; None for anything else."""
    content = stored.get("bytes") if stored.keys() == _STORED else None
    return data_url(content) if isinstance(content, bytes) else None


def data_url(content: bytes) -> str | None:
    """The data URL of a PNG, JPEG, GIF or WebP file; None for any other."""
    from lightning_rl_proxy.rendering.images import media_type_of, size_of  # few tasks show any

    if size_of(content) is None:
        return None
    return f"data:{media_type_of(content)};base64,{base64.b64encode(content).decode()}"


def url_of(image: Any) -> str:
    """The URL by which a model is shown an image of a task: a URL, the path of a file, or a dict with either as
    `image`, `url` or `path`. Raises ValueError for any other, OSError for a file that cannot be read."""
    if isinstance(image, Mapping):
        image = next((image[name] for name in ("image", "url", "path") if isinstance(image.get(name), str)), None)
    if not isinstance(image, str):
        raise ValueError("it is no URL and no path")
    if image.startswith(_URLS):
        return image
    path = url2pathname(image.removeprefix("file://")) if image.startswith("file://") else image
    url = data_url(Path(path).read_bytes())
    if url is None:
        raise ValueError(f"{image} is no PNG, JPEG, GIF or WebP file")
    return url
