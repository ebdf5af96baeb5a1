"""What training holds beside the weights, in a folder: tensors by `torch.distributed.checkpoint`, all else as JSON.

Invariant: what is read is what was written, bit by bit and type by type, and reading runs no code of the folder's.
DCP alone keeps neither: it makes every key a string, drops empty dicts, and unpickles what is no tensor. Nor does the
folder depend on who reads it: what several processes write of shared tensors (`DTensor`), a part each, is read by one,
and by any other number of them.
"""

import dataclasses
import importlib
import io
import json
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

_Plain = bool | int | float | str | None
_VALUES = "values.json"
_TENSOR, _TUPLE, _DICT, _PART = "$tensor", "$tuple", "$dict", "$part"
_DESCRIPTIONS = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_NAMES = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib", "Path")}


class Elsewhere:
    """A value of a state that others have: `write` has them write it to a new folder, under the name PART."""

    def __init__(self, write: Callable[[Path], None]) -> None:
        self.write = write


# The only classes that are made of what a folder holds, and where they are.
_LOW_BIT_CLASSES = {
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}
_KIND, _PARTS, _ABOUT = "low_bit", "parts", "about"
PART = "part"  # the name of what `Elsewhere` writes in its folder


def write(folder: Path, state: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Write `state` to a new folder: dicts, lists and tuples of tensors, numbers, strings, None, and `Elsewhere`.

    Args:
        group: the processes, gloo's, that call this together; each writes its part of shared tensors.

    Raises TypeError, with its place, for a value of any other type.
    """
    tensors: dict[str, Tensor] = {}
    parts: list[Elsewhere] = []
    values = json.dumps(_encoded(state, "state", tensors, parts))
    if group is None or group.rank() == 0:
        folder.mkdir()
        (folder / _VALUES).write_text(values)
    if group is not None:
        dist.barrier(group)  # the folder is there
    for number, part in enumerate(parts):
        part.write(folder / f"part-{number}")
    with _explained():
        save(
            tensors,
            storage_writer=FileSystemWriter(folder, sync_files=False),  # the whole checkpoint is synced at once
            planner=DefaultSavePlanner(flatten_state_dict=False),
            process_group=group,
            no_dist=group is None,
        )


def read(folder: Path) -> dict[str, Any]:
    """The state that was written to `folder`, its tensors whole, on the CPU."""
    tensors: dict[str, Tensor] = {}

    def empty(stored: Stored) -> Tensor:
        return tensors.setdefault(stored.name, torch.empty(stored.shape, dtype=stored.dtype))

    state = _values(folder, empty, read)
    with _explained():
        load(tensors, storage_reader=_Reader(folder), planner=_TensorsOnly(flatten_state_dict=False), no_dist=True)
    return state


def opened(folder: Path) -> dict[str, Any]:
    """The state that was written to `folder` with a `Stored` in the place of each tensor."""
    return _values(folder, lambda stored: stored, opened)


def whole(state: Any) -> Any:
    """An opened state, or a part of it, with its tensors, on the CPU."""
    if isinstance(state, Stored):
        return state.read()
    if isinstance(state, Mapping):
        return {key: whole(value) for key, value in state.items()}
    return type(state)(map(whole, state)) if isinstance(state, list | tuple) else state


def to_parts(value: Any) -> Any:
    """A tensor of few bits (`torchao`'s optimizer states) as what it is made of; anything else as it is.

    Such a tensor is one to torch and several in memory: codes, their scales, a table. A folder holds these, so nothing
    is rounded again.
    """
    if type(value).__name__ not in _LOW_BIT_CLASSES:
        return value
    names, about = value.__tensor_flatten__()
    parts = {name: getattr(value, name) for name in names}
    return {_KIND: type(value).__name__, _PARTS: parts, _ABOUT: [_plain(each) for each in about]}


def from_parts(value: Any) -> Any:
    """The inverse of `to_parts`, of what was read or opened. Raises ValueError for a class that is not known."""
    if not isinstance(value, Mapping) or _KIND not in value:
        return value
    if value[_KIND] not in _LOW_BIT_CLASSES:
        raise ValueError(
            f"an optimizer state in the checkpoint is a {value[_KIND]!r}; there are {', '.join(_LOW_BIT_CLASSES)}"
        )
    made: Any = getattr(importlib.import_module(_LOW_BIT_CLASSES[value[_KIND]]), value[_KIND])
    return made.__tensor_unflatten__(whole(value[_PARTS]), [_read(each) for each in value[_ABOUT]])


def _plain(about: Any) -> Any:
    """What is known of a state beside its parts (signed, shape, dtype), as JSON holds it."""
    if isinstance(about, torch.dtype):
        return str(about)
    return list(about) if isinstance(about, tuple) else about


def _read(about: Any) -> Any:
    if isinstance(about, str):
        return getattr(torch, about.removeprefix("torch."))
    return torch.Size(about) if isinstance(about, list) else about


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor of a folder, read when it is asked for; it may be sent to other processes that see the folder."""

    folder: "_Folder"
    name: str
    dtype: torch.dtype
    shape: torch.Size

    def read(self, like: Tensor | None = None) -> Tensor:
        """The tensor, on the CPU; where `like` is shared and of its shape, this process's part of it, as `like` is cut.

        Beside what it returns, one part is in memory that a process has written.
        """
        if isinstance(like, DTensor) and like.shape == self.shape:
            target: Tensor = torch.empty_like(like.detach(), dtype=self.dtype)
        else:
            target = torch.empty(self.shape, dtype=self.dtype)
        only = {self.name: target}
        with _explained():
            load(only, storage_reader=self.folder.reader, planner=_TensorsOnly(flatten_state_dict=False), no_dist=True)
        return only[self.name]


class _Folder:
    """A folder, whose description is read once."""

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()

    @cached_property
    def reader(self) -> "_Reader":
        return _Reader(self._path)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Folder, (self._path,)


def _values(folder: Path, tensor: Callable[[Stored], Any], part: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    here = _Folder(folder)

    def leaf(value: dict[str, Any]) -> Any:
        if _PART in value:
            return part(folder / value[_PART])[PART]
        dtype = getattr(torch, value["dtype"])
        return tensor(Stored(here, value[_TENSOR], dtype, torch.Size(value["shape"])))

    state: dict[str, Any] = _decoded(json.loads((folder / _VALUES).read_text(encoding="utf-8")), leaf)
    return state


def _encoded(value: Any, path: str, tensors: dict[str, Tensor], parts: list[Elsewhere]) -> Any:
    """`value` as JSON; its tensors go to `tensors`, under their paths, and what others have to `parts`."""
    if isinstance(value, _Plain):
        return value
    if isinstance(value, Elsewhere):
        parts.append(value)
        return {_PART: f"part-{len(parts) - 1}"}
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {_TENSOR: path, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if isinstance(value, list | tuple):
        items = [_encoded(item, f"{path}[{i}]", tensors, parts) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _encoded(item, f"{path}[{key!r}]", tensors, parts) for key, item in value.items()}
        if odd := [key for key in value if not isinstance(key, _Plain)]:
            raise TypeError(f"{path} has the key {odd[0]!r}: a checkpoint's are numbers, strings and None")
        return {_DICT: [[key, _encoded(item, f"{path}[{key!r}]", tensors, parts)] for key, item in value.items()]}
    raise TypeError(f"{path} is a {type(value).__name__}: a checkpoint holds tensors, numbers, strings and None")


def _decoded(value: Any, leaf: Callable[[dict[str, Any]], Any]) -> Any:
    """The inverse; `leaf` makes tensors, and what others had."""
    if isinstance(value, list):
        return [_decoded(item, leaf) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value or _PART in value:
        return leaf(value)
    if _TUPLE in value:
        return tuple(_decoded(item, leaf) for item in value[_TUPLE])
    if _DICT in value:
        return {key: _decoded(item, leaf) for key, item in value[_DICT]}
    return {key: _decoded(item, leaf) for key, item in value.items()}


@contextmanager
def _explained() -> Iterator[None]:
    """DCP without its warning that there is no process group, and raising what really happened."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:  # no Exception, and a Ctrl-C inside becomes one too
            cause, _ = next(iter(error.failures.values()))
            raise cause from None


class _Reader(FileSystemReader):
    """Reads DCP's own description of the folder by names of data classes alone."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # Read here: DCP takes any failure of `read_metadata` for a folder of another kind.
        self._metadata: Metadata = _Descriptions(io.BytesIO((folder / ".metadata").read_bytes())).load()

    def read_metadata(self) -> Metadata:
        return self._metadata


class _Descriptions(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in (*_DESCRIPTIONS, "torch") or (module, name) in _NAMES:
            value = getattr(importlib.import_module(module), name, None)
            is_data = isinstance(value, type) and (dataclasses.is_dataclass(value) or issubclass(value, Enum))
            if (module, name) in _NAMES or (is_data if module in _DESCRIPTIONS else isinstance(value, torch.dtype)):
                return value
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no description of tensors needs")


class _TensorsOnly(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise pickle.UnpicklingError(f"{read_item.dest_index.fqn} is pickled, and no tensor")
