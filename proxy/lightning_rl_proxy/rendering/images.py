"""Images in prompts: what a client sends becomes bytes with a digest, and one placeholder becomes one per feature.

Invariant: the tokens [start, start + length) of a prompt that an image is said to stand at are placeholders, exactly as
many as the model has features of that image; no other tokens of the rendered text are placeholders. How many that is
follows from the image's size alone, so no pixel is decoded here.
"""

import hashlib
import io
import json
import math
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lightning_rl_adapters.media import Placed
from lightning_rl_proxy.errors import GatewayError

_HEAD = re.compile(r"data:image/[a-z0-9.+-]+;base64,", re.IGNORECASE)
_MAX_PIXELS = 2**26  # of an image as it is sent: a small file may unfold to very many
_MAX_ASPECT = 200  # the families' own bound
_ROLES = ("user", "tool", "system")
_BEGINNINGS = {b"\x89PNG": "image/png", b"GIF8": "image/gif", b"RIFF": "image/webp", b"\xff\xd8": "image/jpeg"}


class _Defaults(NamedTuple):
    """What a family has where a model's folder does not say: the placeholder's id, the bounds of pixels, and whether
    these count the pixels of a patch's frames, too."""

    token_id: int
    min_pixels: int
    max_pixels: int
    counts_frames: bool


_QWEN = _Defaults(151655, 56 * 56, 28 * 28 * 1280, False)
# Families whose images are patches in a grid, merged `merge_size` x `merge_size`, in one run of placeholders.
FAMILIES = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "glm4v": _Defaults(151343, 112 * 112, 28 * 28 * 15000, True),
}


class Image(NamedTuple):
    """An image as its client sent it. `size` is (width, height) in pixels."""

    sha256: str
    media_type: str
    data: bytes
    size: tuple[int, int]


class Shown(NamedTuple):
    """An image, and the tokens [start, start + length) of the prompt that stand for it."""

    start: int
    length: int
    image: Image

    @property
    def placed(self) -> Placed:
        """The same without the bytes."""
        return Placed(self.start, self.length, self.image.sha256)


class Vision(NamedTuple):
    """How a model's prompts hold images: the placeholder's id, and the rule from size to features.

    `frames` of a patch's are counted in the bounds of pixels, of the families that do that (GLM-4V), which also enlarge
    an image until its short side is a unit; None: neither.
    """

    token_id: int
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    frames: int | None = None

    def features(self, image: Image) -> int:
        """How many features the model has of an image. Raises GatewayError(400) for one it cannot take."""
        width, height = image.size
        unit = self.patch_size * self.merge_size
        if self.frames is not None and min(width, height) < unit:
            scale = max(unit / height, unit / width)
            width, height = int(width * scale), int(height * scale)
        if max(width, height) / min(width, height) > _MAX_ASPECT:
            raise _refused(
                f"an image of {image.size[0]} x {image.size[1]} pixels is too narrow: at most {_MAX_ASPECT} to 1 can "
                "be read"
            )
        frames = self.frames or 1
        rows, columns = round(height / unit) * unit, round(width / unit) * unit
        if frames * rows * columns > self.max_pixels:
            shrunk = math.sqrt(frames * height * width / self.max_pixels)
            rows, columns = (max(unit, math.floor(side / shrunk / unit) * unit) for side in (height, width))
        elif frames * rows * columns < self.min_pixels:
            grown = math.sqrt(self.min_pixels / (frames * height * width))
            rows, columns = (math.ceil(side * grown / unit) * unit for side in (height, width))
        return (rows // unit) * (columns // unit)

    def expand(self, ids: list[int], images: Sequence[Image], behind: int = 0) -> tuple[list[int], list[Shown]]:
        """Rendered `ids`, in which each image is one placeholder, as the model takes them, and where the images stand.

        `behind` tokens stand before the ids. Raises GatewayError(400) where there are more or fewer placeholders than
        images: some text spells the placeholder, or the chat format does not show an image.
        """
        written = ids.count(self.token_id)
        if written != len(images):
            raise _refused(
                f"the prompt has {written} image placeholders for {len(images)} images: "
                + (
                    "a text spells the placeholder; leave it out"
                    if written > len(images)
                    else "the chat template does not show images of such messages"
                )
            )
        expanded: list[int] = []
        shown: list[Shown] = []
        waiting = iter(images)
        for token in ids:
            if token == self.token_id:
                image = next(waiting)
                shown.append(Shown(behind + len(expanded), self.features(image), image))
                expanded += [token] * shown[-1].length
            else:
                expanded.append(token)
        return expanded, shown


def vision_of(folder: Path) -> Vision | None:
    """How the model in `folder` takes images; None for one that reads text alone.

    Raises ValueError for a model with images that is of no family known here, or whose folder does not say enough.
    """
    config = _json(folder / "config.json")
    if "vision_config" not in config:
        return None
    name = config.get("model_type")
    family = FAMILIES.get(str(name))
    if family is None:
        raise ValueError(f"{folder}: images of {name!r} models are not known here; known are {', '.join(FAMILIES)}")
    processor = _json(folder / "preprocessor_config.json") or _json(folder / "processor_config.json").get(
        "image_processor"
    )
    if not isinstance(processor, dict):
        raise ValueError(
            f"{folder} has a model that sees, but no preprocessor_config.json: copy it from the model's hub"
        )
    size = processor.get("size") or {}
    return Vision(
        token_id=config.get("image_token_id", family.token_id),
        patch_size=processor.get("patch_size", 14),
        merge_size=processor.get("merge_size", 2),
        min_pixels=processor.get("min_pixels") or size.get("shortest_edge", family.min_pixels),
        max_pixels=processor.get("max_pixels") or size.get("longest_edge", family.max_pixels),
        frames=processor.get("temporal_patch_size", 2) if family.counts_frames else None,
    )


def urls(messages: Sequence[dict[str, Any]], first: int = 0) -> Iterator[tuple[str, str]]:
    """Of each image in the messages, which are counted from `first` on, where it stands and its URL, in their order.

    Raises GatewayError(400) for one in a message of a role that shows none, or of no URL.
    """
    for number, message in enumerate(messages, first):
        content = message.get("content")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if part.get("type") != "image_url":
                continue
            where = f"messages[{number}].content[{index}]"
            if message.get("role") not in _ROLES:
                raise _refused(
                    f"{where} is an image in a message of role {message.get('role')!r}; a user or a tool shows it"
                )
            url = part["image_url"].get("url")
            if not isinstance(url, str):
                raise _refused(f"{where}.image_url.url is no text")
            yield where, url


def is_data(url: str) -> bool:
    """Whether the URL holds the image itself."""
    return _HEAD.match(url) is not None


def read(where: str, url: str) -> Image:
    """The image of a data URL. Raises GatewayError(400) for any other URL, and for what is no image."""
    if not is_data(url):
        raise _refused(f"{where} is at {url[:60]!r}; send it as data:image/png;base64,...")
    head, _, text = url.partition(",")
    try:
        data = msgspec.convert(text, bytes)  # five times as fast as `base64`
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise _refused(f"{where} is not base64") from error
    return image_of(where, data, head.lower().removeprefix("data:").partition(";")[0])


def image_of(where: str, data: bytes, media_type: str | None = None) -> Image:
    """The image that these bytes are, by default of the type that they begin like. Raises GatewayError(400) for what is
    no image, or a too large one."""
    size = size_of(data)
    if size is None or min(size) < 1:
        raise _refused(f"{where} is no PNG, JPEG, GIF or WebP image")
    if size[0] * size[1] > _MAX_PIXELS:
        raise _refused(f"{where} has {size[0]} x {size[1]} pixels; at most {_MAX_PIXELS} are read: send it smaller")
    return Image(hashlib.sha256(data).hexdigest(), media_type or media_type_of(data), data, size)


def media_type_of(data: bytes) -> str:
    """The media type of a PNG, JPEG, GIF or WebP file (`size_of` tells whether it is one), by how it begins."""
    return next(name for begin, name in _BEGINNINGS.items() if data.startswith(begin))


def size_of(data: bytes) -> tuple[int, int] | None:
    """Width and height that the header of a PNG, JPEG, GIF or WebP file says; None for any other file."""
    try:
        if data[:8] == b"\x89PNG\r\n\x1a\n":
            width, height = struct.unpack_from(">II", data, 16)
            return width, height
        if data[:6] in (b"GIF87a", b"GIF89a"):
            width, height = struct.unpack_from("<HH", data, 6)
            return width, height
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return _webp_size(data)
        return _jpeg_size(data) if data[:2] == b"\xff\xd8" else None
    except (struct.error, IndexError):
        return None


def _webp_size(data: bytes) -> tuple[int, int] | None:
    kind = data[12:16]
    if kind == b"VP8X" and len(data) >= 30:
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L" and len(data) >= 25:
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    return None


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    stream = io.BytesIO(data[2:])
    while True:
        mark = stream.read(1)
        while mark == b"\xff":
            mark = stream.read(1)
        if not mark:
            return None
        if mark[0] == 0 or 0xD0 <= mark[0] <= 0xD9:  # those that stand alone
            continue
        (length,) = struct.unpack(">H", stream.read(2))
        if 0xC0 <= mark[0] <= 0xCF and mark[0] not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack(">xHH", stream.read(5))
            return width, height
        stream.seek(length - 2, io.SEEK_CUR)


def _refused(message: str) -> GatewayError:
    return GatewayError(400, message, param="messages")


def _json(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return content if isinstance(content, dict) else {}
