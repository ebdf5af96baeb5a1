"""What training holds beside the weights, in a folder: tensors by `torch.distributed.checkpoint`, all else as JSON.

Invariant: what is read is what was written, bit by bit and type by type, and reading runs no code of the folder's.
DCP alone keeps neither: it makes every key a string, drops empty dicts, and unpickles what is no tensor.
"""

import dataclasses
import importlib
import io
import json
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

_Plain = bool | int | float | str | None
_VALUES = "values.json"
_TENSOR, _TUPLE, _DICT = "$tensor", "$tuple", "$dict"
_DESCRIPTIONS = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_NAMES = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib", "Path")}


def write(folder: Path, state: Mapping[str, Any]) -> None:
    """Write `state` to a new folder: dicts, lists and tuples of tensors, numbers, strings and None.

    Raises TypeError, with its place, for a value of any other type.
    """
    tensors: dict[str, Tensor] = {}
    values = json.dumps(_encoded(state, "state", tensors))
    folder.mkdir()
    (folder / _VALUES).write_text(values)
    with _one_process():
        save(
            tensors,
            storage_writer=FileSystemWriter(folder, sync_files=False),  # the whole checkpoint is synced at once
            planner=DefaultSavePlanner(flatten_state_dict=False),
            no_dist=True,
        )


def read(folder: Path) -> dict[str, Any]:
    """The state that was written to `folder`, its tensors on the CPU."""
    tensors: dict[str, Tensor] = {}
    state: dict[str, Any] = _decoded(json.loads((folder / _VALUES).read_text()), tensors)
    with _one_process():
        load(tensors, storage_reader=_Reader(folder), planner=_TensorsOnly(flatten_state_dict=False), no_dist=True)
    return state


def _encoded(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON; its tensors go to `tensors`, under their paths."""
    if isinstance(value, _Plain):
        return value
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {_TENSOR: path, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if isinstance(value, list | tuple):
        items = [_encoded(item, f"{path}[{i}]", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _encoded(item, f"{path}[{key!r}]", tensors) for key, item in value.items()}
        if odd := [key for key in value if not isinstance(key, _Plain)]:
            raise TypeError(f"{path} has the key {odd[0]!r}: a checkpoint's are numbers, strings and None")
        return {_DICT: [[key, _encoded(item, f"{path}[{key!r}]", tensors)] for key, item in value.items()]}
    raise TypeError(f"{path} is a {type(value).__name__}: a checkpoint holds tensors, numbers, strings and None")


def _decoded(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse; tensors are made empty, to be filled by their names in `tensors`."""
    if isinstance(value, list):
        return [_decoded(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        dtype = getattr(torch, value["dtype"])
        return tensors.setdefault(value[_TENSOR], torch.empty(value["shape"], dtype=dtype))
    if _TUPLE in value:
        return tuple(_decoded(item, tensors) for item in value[_TUPLE])
    if _DICT in value:
        return {key: _decoded(item, tensors) for key, item in value[_DICT]}
    return {key: _decoded(item, tensors) for key, item in value.items()}


@contextmanager
def _one_process() -> Iterator[None]:
    """DCP without a process group: without its warning that there is none, and raising what really happened."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:  # no Exception, and a Ctrl-C inside becomes one too
            [(cause, _)] = error.failures.values()
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
            found = getattr(importlib.import_module(module), name, None)
            is_data = isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, Enum))
            if (module, name) in _NAMES or (is_data if module in _DESCRIPTIONS else isinstance(found, torch.dtype)):
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no description of tensors needs")


class _TensorsOnly(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise pickle.UnpicklingError(f"{read_item.dest_index.fqn} is pickled, and no tensor")
