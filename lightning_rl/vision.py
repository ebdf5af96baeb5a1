"""Images as a model sees them: pixels in patches, features in the places of tokens, positions in three dimensions.

Invariant: an image stands at the tokens that it was recorded at, and nowhere else. The features are put there by place,
never by looking for the placeholder's id: a policy may sample that id like any other, and then it is a token. What
engine and trainer compute of an image is the same, since both ask here.
"""

import contextlib
import hashlib
import io
import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageOps, UnidentifiedImageError
from torch import Tensor, nn
from transformers import AutoImageProcessor

Ints = NDArray[np.int64]

# Whose images are one run of features each, in positions of three dimensions; Qwen3-VL adds features to the states
# behind its first layers too (DeepStack, arXiv 2406.04334).
FAMILIES = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"}
_KEPT_BYTES = 2**28  # of patches: about 85 images of 1280 x 800 pixels


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


class Colours(NamedTuple):
    """What an image processor makes of the values of colours: `scaled` float32 [C, 256]. Of each patch there are
    `frames`, all alike, since a tower also reads videos."""

    scaled: Tensor
    frames: int


class Patches(NamedTuple):
    """An image's patches, and its grid: (1, rows, columns), rows x columns = N.

    Kept are the `values` of their colours, uint8 [N, C, P x P]: an eighth of what a tower is given.
    """

    values: Tensor
    grid: tuple[int, int, int]
    colours: Colours

    def pixels(self, device: torch.device | str = "cpu") -> Tensor:
        """What a tower is given, float32 [N, C x frames x P x P]."""
        values, scaled = self.values.to(device), self.colours.scaled.to(device)
        patches, channels, _ = values.shape
        places = values.int() + 256 * torch.arange(channels, dtype=torch.int32, device=device)[:, None]
        one = scaled.flatten().index_select(0, places.flatten()).view(patches, channels, 1, -1)
        return one.expand(-1, -1, self.colours.frames, -1).reshape(patches, -1)


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

    Patches of the latest images are kept, up to a bound. Usable from several threads. Raises ValueError for an image
    processor that does more to pixels than the families' own.
    """

    def __init__(self, folder: Path, config: Any) -> None:
        self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        self.merge_size: int = config.vision_config.spatial_merge_size
        self._side: int = self._processor.patch_size
        self._frames: int = self._processor.temporal_patch_size
        self._colours = self._measured_colours()
        self._cache: OrderedDict[str, Patches] = OrderedDict()
        self._cache_bytes = 0
        self._lock = threading.Lock()

    def patches(self, image: PlacedImage) -> Patches:
        """What the model's tower is given of an image.

        Raises ValueError for bytes that are no image, and where its features are not as many as its tokens.
        """
        with self._lock:
            image_patches = self._cache.get(image.sha256)
            if image_patches is not None:
                self._cache.move_to_end(image.sha256)
        if image_patches is None:
            image_patches = self._read(image)
            self._keep(image.sha256, image_patches)
        features = self.features(image_patches.grid)
        if features != image.length:
            raise ValueError(
                f"image {image.sha256} has {features} features, and {image.length} tokens from {image.start} on stand "
                "for it: gateway and model do not read it alike; give both the same preprocessor_config.json"
            )
        return image_patches

    def features(self, grid: tuple[int, int, int]) -> int:
        """How many features the model has of an image with that grid."""
        return grid[0] * grid[1] * grid[2] // self.merge_size**2

    def read(self, images: Iterable[PlacedImage]) -> dict[str, Patches]:
        """The patches of images by their SHA-256, as `patches`; those that are not kept are read by all cores of this
        process."""
        wanted = list({image.sha256: image for image in images}.values())
        if len(wanted) == 1:
            return {wanted[0].sha256: self.patches(wanted[0])}
        with ThreadPoolExecutor(max(1, min(len(wanted), torch.get_num_threads()))) as threads:
            return dict(zip((image.sha256 for image in wanted), threads.map(self.patches, wanted), strict=True))

    def positions(self, length: int, images: Sequence[PlacedImage], read: Mapping[str, Patches]) -> tuple[Ints, int]:
        """The places of `length` tokens in time, height and width, int64 [3, length], and how far the token that comes
        next stands before or behind its index: its place in each is `length` + that. `read` has the images' patches.

        Text goes on by one in all three; an image's features have the place of the token before + 1 in time, their rows
        and columns counted from there; behind it text goes on from the largest (Qwen2-VL's M-RoPE).
        """
        places = np.empty((3, length), np.int64)
        at, place = 0, 0
        for image in images:
            _, rows, columns = (side // self._merge(axis) for axis, side in enumerate(read[image.sha256].grid))
            text = np.arange(image.start - at)
            places[:, at : image.start] = place + text
            place += len(text)
            grid = np.stack([np.zeros((rows, columns), np.int64), *np.indices((rows, columns))]).reshape(3, -1)
            places[:, image.start : image.end] = place + grid
            at, place = image.end, place + max(rows, columns)
        places[:, at:] = place + np.arange(length - at)
        return places, place - at

    def rows(self, width: int, images: Sequence[Sequence[PlacedImage]]) -> "Rows":
        """Whole rows that show these images each, padded to the right to `width`."""
        read = self.read(one for own in images for one in own)
        positions = np.stack([self.positions(width, own, read)[0] for own in images], axis=1)
        shown = [
            PlacedFeatures(row, one.start, read[one.sha256], 0, one.length)
            for row, own in enumerate(images)
            for one in own
        ]
        return Rows(torch.from_numpy(positions), shown)

    def run(self, model: nn.Module, token_ids: Tensor, images: Sequence[Sequence[PlacedImage]], **kwargs: Any) -> Any:
        """The output of `model` for whole rows [B, T], padded to the right, that show these images each."""
        rows = self.rows(token_ids.shape[1], images)
        with showing(model, rows.shown):
            return model(input_ids=token_ids, position_ids=rows.positions.to(token_ids.device), **kwargs)

    @property
    def blank(self) -> Patches:
        """The smallest image, of one colour: one feature."""
        side = self.merge_size
        values = torch.zeros(side * side, len(self._colours.scaled), self._side**2, dtype=torch.uint8)
        return Patches(values, (1, side, side), self._colours)

    def _keep(self, sha256: str, patches: Patches) -> None:
        with self._lock:
            if sha256 in self._cache:  # another thread has read it, too
                return
            self._cache[sha256] = patches
            self._cache_bytes += patches.values.nbytes
            while self._cache_bytes > _KEPT_BYTES and len(self._cache) > 1:
                self._cache_bytes -= self._cache.popitem(last=False)[1].values.nbytes

    def _measured_colours(self) -> Colours:
        """By an image that has every value of every colour, at several places."""
        side = self._side * self.merge_size
        side *= math.ceil(32 / side)
        order, some = np.random.default_rng(0), np.tile(np.arange(256, dtype=np.uint8), side * side // 256)
        image = Pillow.fromarray(np.resize(np.stack([order.permutation(some) for _ in "RGB"], -1), (side, side, 3)))
        raw, normalized = (
            self._processor(images=[image], return_tensors="pt", do_resize=False, **how)["pixel_values"]
            for how in ({"do_rescale": False, "do_normalize": False}, {})
        )
        values = self._values(raw)
        scaled = torch.full((values.shape[1], 256), math.nan)
        for channel, own in enumerate(normalized.view(len(normalized), -1, self._frames, self._side**2).unbind(1)):
            scaled[channel, values[:, channel].long()] = own[:, 0]
        colours = Colours(scaled, self._frames)
        if not torch.equal(Patches(values, (1, 0, 0), colours).pixels(), normalized):
            raise ValueError(
                f"{type(self._processor).__name__} does more to an image than to cut and scale it: it is not known here"
            )
        return colours

    def _values(self, raw: Tensor) -> Tensor:
        """The values of patches [N, C x frames x P x P] that were not scaled, of one frame: uint8 [N, C, P x P]."""
        return raw.view(len(raw), -1, self._frames, self._side**2)[:, :, 0].to(torch.uint8)

    def _merge(self, axis: int) -> int:
        return self.merge_size if axis else 1

    def _read(self, image: PlacedImage) -> Patches:
        if hashlib.sha256(image.data).hexdigest() != image.sha256:
            raise ValueError(f"the bytes of image {image.sha256} are not those that the digest is of")
        try:
            with Pillow.open(io.BytesIO(image.data)) as opened:
                pixels = _as_shown(opened)
        except UnidentifiedImageError as error:  # whose message shows an address in memory
            raise ValueError(f"image {image.sha256} cannot be read: it is damaged behind its header") from error
        except (OSError, SyntaxError, ValueError, Pillow.DecompressionBombError) as error:
            raise ValueError(f"image {image.sha256} cannot be read: {error}") from error
        processed = self._processor(images=[pixels], return_tensors="pt", do_rescale=False, do_normalize=False)
        rows: list[int] = processed["image_grid_thw"][0].tolist()
        return Patches(self._values(processed["pixel_values"]), (rows[0], rows[1], rows[2]), self._colours)


class Rows(NamedTuple):
    """Rows that show images: the positions of their tokens, int64 [3, B, T], and the features that they show."""

    positions: Tensor
    shown: list[PlacedFeatures]


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

    def embed(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert not args
        token_ids = kwargs["input_ids"]
        embeddings, deep, places = _embedded(core, token_ids, shown, unseen)
        of_layers.clear()
        if deep:
            where = torch.zeros(token_ids.shape, dtype=torch.bool, device=token_ids.device)
            where[places] = True
            of_layers.update(visual_pos_masks=where, deepstack_visual_embeds=deep)
        return (), kwargs | {"input_ids": None, "inputs_embeds": embeddings}

    def add(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs | of_layers

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
    output = core.get_image_features(
        torch.cat([one.pixels(device) for one in read]),
        torch.tensor([one.grid for one in read], device=device),
        return_dict=True,
    )
    deep = getattr(output, "deepstack_features", None) or []
    if unseen is not None:  # times 0, so that the tower has a gradient on every worker
        for features in (output.pooler_output, *deep):
            embeddings = embeddings + 0 * features[-1].sum().to(embeddings.dtype)
    rows = np.repeat([one.row for one in shown], [one.length for one in shown]).astype(np.int64)
    columns = np.concatenate([np.empty(0, np.int64), *(one.column + np.arange(one.length) for one in shown)])
    order = np.lexsort((columns, rows))
    places = torch.from_numpy(rows[order]).to(device), torch.from_numpy(columns[order]).to(device)

    def chosen(features: Sequence[Tensor]) -> Tensor:
        parts = [own[one.first : one.first + one.length] for one, own in zip(shown, features, strict=False)]
        together = torch.cat(parts) if parts else embeddings.new_empty(0, embeddings.shape[-1])
        return together[torch.from_numpy(order).to(device)].to(embeddings.dtype)

    return embeddings.index_put(places, chosen(output.pooler_output)), [chosen(one) for one in deep], places
