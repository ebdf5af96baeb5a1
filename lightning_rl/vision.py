"""Images as a model sees them: pixels in patches, features in the places of tokens, positions in three dimensions.

Invariant: an image stands at the tokens that it was recorded at, and nowhere else. The features are put there by place,
never by looking for the placeholder's id: a policy may sample that id like any other, and then it is a token. What
engine and trainer compute of an image is the same, since both ask here.
"""

import contextlib
import hashlib
import io
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageOps
from torch import Tensor, nn
from transformers import AutoImageProcessor

Ints = NDArray[np.int64]

# Whose images are one run of features each, in positions of three dimensions; Qwen3-VL adds features to the states
# behind its first layers too (DeepStack, arXiv 2406.04334).
FAMILIES = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"}
_KEPT_BYTES = 2**28  # of patches


class PlacedImage(NamedTuple):
    """An image as its client sent it, and the tokens [start, start + length) of a sequence that stand for it."""

    start: int
    length: int
    sha256: str
    data: bytes

    @property
    def end(self) -> int:
        """The first token behind it."""
        return self.start + self.length


class Patches(NamedTuple):
    """An image's patches, float32 [N, D], and its grid: (1, rows, columns), rows x columns = N."""

    pixels: Tensor
    grid: tuple[int, int, int]


class PlacedFeatures(NamedTuple):
    """Features [first, first + length) of an image, which stand in row `row` from `column` on."""

    row: int
    column: int
    patches: Patches
    first: int
    length: int

    def within(self, columns: slice) -> "PlacedFeatures | None":
        """What of them stands in these columns, counted from the first of these; None where nothing does."""
        start, end = max(self.column, columns.start), min(self.column + self.length, columns.stop)
        if start >= end:
            return None
        return self._replace(column=start - columns.start, first=self.first + start - self.column, length=end - start)


class ModelVision:
    """The images of the model in `folder`, whose family is one of `FAMILIES`.

    Patches of the latest images are kept, up to a bound. Usable from several threads.
    """

    def __init__(self, folder: Path, config: Any) -> None:
        self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        tower = config.vision_config
        self.merge_size: int = tower.spatial_merge_size
        self._patch_values: int = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
        self._kept: OrderedDict[str, Patches] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def patches(self, image: PlacedImage) -> Patches:
        """What the model's tower is given of an image.

        Raises ValueError for bytes that are no image, and where its features are not as many as its tokens.
        """
        with self._lock:
            found = self._kept.pop(image.sha256, None)
            if found is None:
                found = self._read(image)
                self._kept_bytes += found.pixels.nbytes
            self._kept[image.sha256] = found
            while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= self._kept.popitem(last=False)[1].pixels.nbytes
        features = self.features(found.grid)
        if features != image.length:
            raise ValueError(
                f"image {image.sha256} has {features} features, and {image.length} tokens from {image.start} on stand "
                "for it: gateway and model do not read it alike; give both the same preprocessor_config.json"
            )
        return found

    def features(self, grid: tuple[int, int, int]) -> int:
        """How many features the model has of an image with that grid."""
        return grid[0] * grid[1] * grid[2] // self.merge_size**2

    def positions(self, length: int, images: Sequence[PlacedImage]) -> tuple[Ints, int]:
        """The places of `length` tokens in time, height and width, int64 [3, length], and how far the token that comes
        next stands before or behind its index: its place in each is `length` + that.

        Text goes on by one in all three; an image's features have the place of the token before + 1 in time, their rows
        and columns counted from there; behind it text goes on from the largest (Qwen2-VL's M-RoPE).
        """
        found = np.empty((3, length), np.int64)
        at, place = 0, 0
        for image in images:
            _, rows, columns = (side // self._merge(axis) for axis, side in enumerate(self.patches(image).grid))
            text = np.arange(image.start - at)
            found[:, at : image.start] = place + text
            place += len(text)
            grid = np.stack([np.zeros((rows, columns), np.int64), *np.indices((rows, columns))]).reshape(3, -1)
            found[:, image.start : image.end] = place + grid
            at, place = image.end, place + max(rows, columns)
        found[:, at:] = place + np.arange(length - at)
        return found, place - at

    def shown(self, images: Sequence[Sequence[PlacedImage]]) -> list[PlacedFeatures]:
        """The features of whole rows that show these images each, row by row."""
        return [
            PlacedFeatures(row, one.start, self.patches(one), 0, one.length)
            for row, own in enumerate(images)
            for one in own
        ]

    def row_positions(self, width: int, images: Sequence[Sequence[PlacedImage]]) -> Tensor:
        """`positions` of whole rows, padded to the right to `width`, int64 [3, B, width]."""
        return torch.from_numpy(np.stack([self.positions(width, own)[0] for own in images], axis=1))

    def run(self, model: nn.Module, token_ids: Tensor, images: Sequence[Sequence[PlacedImage]], **given: Any) -> Any:
        """The output of `model` for whole rows [B, T], padded to the right, that show these images each."""
        positions = self.row_positions(token_ids.shape[1], images).to(token_ids.device)
        with showing(model, self.shown(images)):
            return model(input_ids=token_ids, position_ids=positions, **given)

    @property
    def blank(self) -> Patches:
        """The smallest image, of zeros: one feature."""
        side = self.merge_size
        return Patches(torch.zeros(side * side, self._patch_values), (1, side, side))

    def _merge(self, axis: int) -> int:
        return self.merge_size if axis else 1

    def _read(self, image: PlacedImage) -> Patches:
        if hashlib.sha256(image.data).hexdigest() != image.sha256:
            raise ValueError(f"the bytes of image {image.sha256} are not those that the digest is of")
        try:
            with Pillow.open(io.BytesIO(image.data)) as opened:
                pixels = _as_shown(opened)
        except (OSError, SyntaxError, ValueError, Pillow.DecompressionBombError) as error:
            raise ValueError(f"image {image.sha256} cannot be read: {error}") from error
        given = self._processor(images=[pixels], return_tensors="pt")
        rows: list[int] = given["image_grid_thw"][0].tolist()
        return Patches(given["pixel_values"], (rows[0], rows[1], rows[2]))


def _as_shown(image: Pillow.Image) -> Pillow.Image:
    """The picture as one sees it, and as vLLM gives it to its models: turned as its EXIF says, transparent on white."""
    with contextlib.suppress(Exception):  # whatever is wrong with its EXIF: vLLM leaves it as it lies then, too
        image = ImageOps.exif_transpose(image)
    if image.mode == "RGB" or not (image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info):
        return image.convert("RGB")
    with_alpha = image.convert("RGBA")
    shown = Pillow.new("RGB", image.size, "white")
    shown.paste(with_alpha, mask=with_alpha.getchannel("A"))
    return shown


def vision_of(folder: Path, model: nn.Module) -> ModelVision | None:
    """How `model` sees, with the image processor of `folder`; None for a model that reads text alone.

    Raises ValueError for a model that sees in a way that is not known here.
    """
    config: Any = model.config
    if getattr(config, "vision_config", None) is None:
        return None
    if config.model_type not in FAMILIES:
        raise ValueError(f"images of {config.model_type!r} models are not known here; known are {sorted(FAMILIES)}")
    return ModelVision(folder, config)


@contextlib.contextmanager
def showing(model: nn.Module, shown: Sequence[PlacedFeatures], unseen: Patches | None = None) -> Iterator[None]:
    """Inside, `model` reads the features of `shown` in their places of its `input_ids` [B, T].

    They are computed within its forward pass, where a model in shards has its weights together. `unseen` goes through
    the tower too and changes nothing: a model in shards runs its tower on all workers or on none.
    """
    if not shown and unseen is None:
        yield
        return
    core = _core(model)
    of_layers: dict[str, Any] = {}

    def embed(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert not args
        token_ids = given["input_ids"]
        embeddings, deep, places = _embedded(core, token_ids, shown, unseen)
        of_layers.clear()
        if deep:
            where = torch.zeros(token_ids.shape, dtype=torch.bool, device=token_ids.device)
            where[places] = True
            of_layers.update(visual_pos_masks=where, deepstack_visual_embeds=deep)
        return (), given | {"input_ids": None, "inputs_embeds": embeddings}

    def add(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, given | of_layers

    hooks = [
        core.register_forward_pre_hook(embed, with_kwargs=True),
        core.language_model.register_forward_pre_hook(add, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _core(model: nn.Module) -> Any:
    """The part of `model` that has the tower and the language model side by side."""
    return [part for part in model.modules() if hasattr(part, "visual") and hasattr(part, "language_model")][-1]


def _embedded(
    core: Any, token_ids: Tensor, shown: Sequence[PlacedFeatures], unseen: Patches | None
) -> tuple[Tensor, list[Tensor], tuple[Tensor, Tensor]]:
    """The embeddings of tokens [B, T, D] with the features of images in their places; what is added behind each of the
    first layers there [N, D], where the family does that; and the rows [N] and columns [N], in their order."""
    embeddings: Tensor = core.get_input_embeddings()(token_ids)
    device = embeddings.device
    read = [*(one.patches for one in shown), *([] if unseen is None else [unseen])]
    seen = core.get_image_features(
        torch.cat([one.pixels for one in read]).to(device),
        torch.tensor([one.grid for one in read], device=device),
        return_dict=True,
    )
    deep = getattr(seen, "deepstack_features", None) or []
    if unseen is not None:  # times 0, so that the tower has a gradient on every worker
        for features in (seen.pooler_output, *deep):
            embeddings = embeddings + 0 * features[-1].sum().to(embeddings.dtype)
    rows = np.repeat([one.row for one in shown], [one.length for one in shown]).astype(np.int64)
    columns = np.concatenate([np.empty(0, np.int64), *(one.column + np.arange(one.length) for one in shown)])
    order = np.lexsort((columns, rows))
    places = torch.from_numpy(rows[order]).to(device), torch.from_numpy(columns[order]).to(device)

    def chosen(features: Sequence[Tensor]) -> Tensor:
        parts = [own[one.first : one.first + one.length] for one, own in zip(shown, features, strict=False)]
        together = torch.cat(parts) if parts else embeddings.new_empty(0, embeddings.shape[-1])
        return together[torch.from_numpy(order).to(device)].to(embeddings.dtype)

    return embeddings.index_put(places, chosen(seen.pooler_output)), [chosen(one) for one in deep], places
