"""Weights on their way: named tensors that are made one after another, so that nobody needs to hold all of them.

Invariant: names, types and shapes are known before the first tensor is made, and each tensor may be forgotten before
the next one is asked for.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import safetensors
import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

# That are under way at once, unless one tensor is larger. vLLM's own is 2**30, which a card of 24 GB has no room for.
BUCKET_BYTES: Final = 2**28
FILE_BYTES: Final = 5 * 10**9  # of an exported file, unless one tensor is larger
_TYPES: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_CPU: Final = torch.device("cpu")
_DTYPES: Final = {name: dtype for dtype, name in _TYPES.items()}


class Described(NamedTuple):
    """What is known of a tensor before it is made."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """What its numbers take."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class WeightStream:
    """Tensors by name. Whoever goes through it has them made, anew each time.

    Args:
        described: of each what is known before, in the order in which they come.
        source: makes them.
        device: where they are.
    """

    described: Mapping[str, Described]
    source: Callable[[], Iterator[tuple[str, Tensor]]]
    device: torch.device = _CPU

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.source()

    def held_as(self, dtype: torch.dtype) -> "WeightStream":
        """The same with its fractions in another number format."""
        described = {name: Described(_held(each.dtype, dtype), each.shape) for name, each in self.described.items()}
        source = self.source
        return WeightStream(described, lambda: ((n, t.to(_held(t.dtype, dtype))) for n, t in source()), self.device)


def stream_of(
    weights: "nn.Module | Mapping[str, Tensor] | WeightStream", full: Callable[[Tensor], Tensor] | None = None
) -> WeightStream:
    """A model's or a state dict's tensors, of tied ones the first alone; a stream as it is.

    Args:
        full: makes a whole tensor of one that several processes share; None: none is shared.
    """
    if isinstance(weights, WeightStream):
        return weights
    state = weights.state_dict(keep_vars=True) if isinstance(weights, nn.Module) else weights
    own = distinct(state)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in own.items():
            yield name, tensor.detach() if full is None else full(tensor.detach())

    described = {name: Described(tensor.dtype, tuple(tensor.shape)) for name, tensor in own.items()}
    device = next((tensor.device for tensor in own.values()), _CPU)
    return WeightStream(described, tensors, device)


def distinct(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of names that stand for one tensor the first alone."""
    first: dict[Any, str] = {}
    for name, tensor in state.items():
        first.setdefault(_place(tensor), name)
    return {name: state[name] for name in first.values()}


def as_saved(model: Any, weights: WeightStream) -> WeightStream:
    """A stream of a model's weights under the names of the checkpoint that the model was read from.

    Where a tensor of the checkpoint is made of several of the model's, these are held together: all of them.
    """
    meta = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in weights.described.items()}
    together: dict[str, Tensor] = revert_weight_conversion(model, dict(meta))
    alone = {saved: each for name, one in meta.items() for saved, each in _reverted(model, name, one).items()}
    described = {name: Described(each.dtype, tuple(each.shape)) for name, each in together.items()}
    if {name: Described(each.dtype, tuple(each.shape)) for name, each in alone.items()} != described:
        return WeightStream(
            described, lambda: iter(revert_weight_conversion(model, dict(weights)).items()), weights.device
        )

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            yield from _reverted(model, name, tensor).items()

    return WeightStream({name: described[name] for name in alone}, tensors, weights.device)


def buckets(weights: Iterable[tuple[str, Tensor]], size: int) -> Iterator[dict[str, Tensor]]:
    """The tensors in their order, so many together as have `size` bytes; at least one."""
    bucket: dict[str, Tensor] = {}
    held = 0
    for name, tensor in weights:
        if bucket and held + tensor.nbytes > size:
            yield bucket
            bucket, held = {}, 0
        bucket[name] = tensor
        held += tensor.nbytes
        del tensor
    if bucket:
        yield bucket


def write(weights: WeightStream, file: Path) -> None:
    """Write all tensors to one safetensors file, each as it comes. Raises OSError, or ValueError where the stream does
    not keep to what it said."""
    _write(file, weights.described, iter(weights))


def export_model(model: Any, weights: WeightStream, folder: Path) -> None:
    """Write a Hugging Face folder: the config, and what else there is, of a `transformers` model, and these weights of
    it under their names in a checkpoint."""
    model.save_pretrained(folder, state_dict={})
    export(weights, folder)


def export(weights: WeightStream, folder: Path) -> None:
    """Write all tensors as the weights of a Hugging Face folder: model.safetensors, or, of more than FILE_BYTES,
    several files and their index."""
    parts: list[dict[str, Described]] = [{}]
    for name, each in weights.described.items():
        if parts[-1] and sum(other.bytes for other in parts[-1].values()) + each.bytes > FILE_BYTES:
            parts.append({})
        parts[-1][name] = each
    tensors = iter(weights)
    if len(parts) == 1:
        _write(folder / "model.safetensors", parts[0], tensors)
        return
    names = [f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
    for file, part in zip(names, parts, strict=True):
        _write(folder / file, part, tensors)
    index = {
        "metadata": {"total_size": sum(each.bytes for each in weights.described.values())},
        "weight_map": {name: file for file, part in zip(names, parts, strict=True) for name in part},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def stream_of_files(folder: Path, model: Any) -> WeightStream | None:
    """The weights in the safetensors files of a Hugging Face folder, those that `model`, the one of this folder, would
    be saved with; None where there are no such files, or some of the names."""
    files = files_of(folder)
    names = [*as_saved(model, stream_of(model)).described]
    if files is None or not files.keys() >= set(names):
        return None
    described = {}
    for name in names:
        with safetensors.safe_open(files[name], "pt") as opened:
            each = opened.get_slice(name)
            described[name] = Described(_DTYPES[each.get_dtype()], tuple(each.get_shape()))

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in names:
            with safetensors.safe_open(files[name], "pt") as opened:
                yield name, opened.get_tensor(name)

    return WeightStream(described, tensors)


def files_of(folder: Path) -> dict[str, Path] | None:
    """The safetensors file of each tensor of a Hugging Face folder; None where its weights are in other files."""
    index, alone = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        return {
            name: folder / file for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()
        }
    if not alone.exists():
        return None
    with safetensors.safe_open(alone, "pt") as opened:
        return dict.fromkeys(opened.keys(), alone)


def _write(file: Path, described: Mapping[str, Described], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """So many of `tensors` as are `described`, as safetensors lays them out: the header, and then their bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, each in described.items():
        header[name] = {"dtype": _TYPES[each.dtype], "shape": each.shape, "data_offsets": [at, at + each.bytes]}
        at += each.bytes
    written = json.dumps(header, separators=(",", ":")).encode()
    written += b" " * (-len(written) % 8)
    with file.open("wb") as opened:
        opened.write(len(written).to_bytes(8, "little") + written)
        for expected, each in described.items():
            name, tensor = next(tensors, ("nothing", torch.empty(0)))
            if (name, tensor.dtype, tuple(tensor.shape)) != (expected, *each):
                raise ValueError(f"{file}: {name} {tensor.dtype} {tuple(tensor.shape)} came for {expected} {each}")
            opened.write(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            del tensor


def _reverted(model: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = revert_weight_conversion(model, {name: tensor})
    return tensors


def _held(own: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    return dtype if own.is_floating_point else own


def _place(tensor: Tensor) -> Any:
    """What two names of one tensor have in common; without numbers (on `meta`, or shared) it is the object itself."""
    has_address = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type != "meta"
    return (tensor.data_ptr(), tensor.shape) if has_address and tensor.numel() else id(tensor)
