"""How weights reach a vLLM server: by a file that it reads, or on GPUs by vLLM's own transfers, which leave no file.

Both are given the same: all weights under their names in the checkpoint, one after another, and a version. A file
needs nothing but a disk that both sides see. `ipc` hands over GPU memory (trainer and server on the same GPUs), `nccl`
broadcasts it (on other ones); they are vLLM's code on both sides, so the trainer's own environment must have vLLM, of
the server's version.
"""

import base64
import importlib.util
import json
import pickle
import secrets
import shutil
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import torch
from safetensors.torch import save_file
from torch import Tensor

from lightning_rl.errors import Explained
from lightning_rl.inference.adapters import A, B
from lightning_rl.inference.vllm.control import Control
from lightning_rl.inference.weights.stream import BUCKET_BYTES, WeightStream, write

Way = Literal["file", "ipc", "nccl"]


class NoVllm(Explained, ModuleNotFoundError):
    """vLLM is missing where its code is needed."""


class Transfer(Protocol):
    """`offer` what is sent from now on, then `give` it to each server; `forget` what a restarted one was told.

    `sends_the_model`: each server is sent the model's own memory, so that nothing can be given while that is trained.
    """

    sends_the_model: bool

    def offer(self, weights: WeightStream, version: int) -> None: ...

    def give(self, control: Control) -> None:
        """Returns when the server samples with what was offered. Raises WeightsRefused or Unreached."""
        ...

    def is_given(self, control: Control) -> bool:
        """Whether a server has what was offered. Raises Unreached or VllmRefused."""
        ...

    def forget(self, control: Control) -> None: ...


def transfer_of(way: Way, outbox: Path, dtype: torch.dtype) -> Transfer:
    """The transfer of that name; weights are sent as `dtype`, and files are written to `outbox`.

    Raises NoVllm where vLLM's own is asked for, and the trainer's environment has no vLLM.
    """
    if way == "file":
        return FileTransfer(outbox, dtype)
    if importlib.util.find_spec("vllm") is None:
        raise NoVllm(
            f"actor_rollout_ref.rollout.weight_transfer={way} is vLLM's code in the trainer's process too: install "
            "vLLM in the trainer's environment, or use weight_transfer=file"
        )
    return DeviceTransfer(way, dtype)


class FileTransfer:
    """One safetensors file per version, which the plugin reads. Each version replaces the one before."""

    sends_the_model = False

    def __init__(self, outbox: Path, dtype: torch.dtype) -> None:
        self._outbox = outbox
        self._dtype = dtype
        self._shapes: dict[str, list[int]] = {}
        self._knowing: set[Control] = set()
        self._file: Path | None = None
        self._version = 0

    def offer(self, weights: WeightStream, version: int) -> None:
        """See `Transfer`."""
        self._outbox.mkdir(parents=True, exist_ok=True)
        self._shapes = self._shapes or {name: list(each.shape) for name, each in weights.described.items()}
        file = self._outbox / f"version-{version}.safetensors"
        partial = file.with_suffix(".partial")
        write(weights.held_as(self._dtype), partial)
        partial.rename(file)
        former, self._file, self._version = self._file, file.resolve(), version
        if former is not None and former != self._file:
            former.unlink()

    def give(self, control: Control) -> None:
        """See `Transfer`."""
        if control not in self._knowing:
            control.initialise({"shapes": self._shapes})
            self._knowing.add(control)
        control.begin()
        control.update({"path": str(self._file)})
        control.finish(self._version)

    def is_given(self, control: Control) -> bool:
        """See `Transfer`."""
        return control.weight_version() == str(self._version)

    def forget(self, control: Control) -> None:
        """See `Transfer`."""
        self._knowing.discard(control)


class AdapterTransfer:
    """A `peft` folder for each version of an adapter, which servers sample under the name `name@version` from then on.

    Answers that are under way end with the version that they began with, so nobody waits for an update. A server that
    is short of room reads a version again while it samples with it, and dies where it cannot; so twice as many stay as
    the `versions` that may be under way at once, for answers of rollouts that were cancelled, too. The folders are new
    with each process: what a server computed with an adapter it knows again by its folder.
    """

    sends_the_model = False

    def __init__(self, outbox: Path, name: str, versions: int) -> None:
        self._kept_versions = 2 * versions
        self._outbox = outbox / secrets.token_hex(4)
        self._name = name
        self._folders: dict[int, Path] = {}  # by version, the newest last
        self._loaded_names: dict[Control, list[str]] = {}

    @property
    def served_name(self) -> str:
        """The name of what was offered last."""
        return f"{self._name}@{list(self._folders)[-1]}"

    def offer(self, weights: WeightStream, version: int) -> None:
        """See `Transfer`; of an adapter's matrices (`training.lora.low_rank`)."""
        folder = self._outbox.resolve() / f"{self._name}@{version}"
        shutil.rmtree(folder, ignore_errors=True)
        write_adapter(dict(weights), folder)
        self._folders.pop(version, None)
        self._folders[version] = folder
        for old in list(self._folders)[: -self._kept_versions]:
            shutil.rmtree(self._folders.pop(old))

    def give(self, control: Control) -> None:
        """See `Transfer`."""
        name = self.served_name
        control.load_adapter(name, list(self._folders.values())[-1])
        names = self._loaded_names.setdefault(control, [])
        names.append(name)
        while len(names) > self._kept_versions:
            control.unload_adapter(names.pop(0))

    def is_given(self, control: Control) -> bool:
        """See `Transfer`."""
        names = control.adapters()
        return not self._folders or self.served_name in names

    def forget(self, control: Control) -> None:
        """See `Transfer`."""
        self._loaded_names.pop(control, None)


class DeviceTransfer:
    """vLLM's own: `ipc` or `nccl`. What is offered must not change until it is given. A stream is not held in between:
    whoever has its weights may move them."""

    sends_the_model = True

    def __init__(self, way: Way, dtype: torch.dtype) -> None:
        self._way = way
        self._dtype = dtype
        self._ends: dict[Control, Any] = {}  # our ends of the transfers
        self._one_at_a_time = threading.Lock()
        self._offered = WeightStream({}, lambda: iter(()))
        self._version = 0

    def offer(self, weights: WeightStream, version: int) -> None:
        """See `Transfer`."""
        self._offered, self._version = weights.held_as(self._dtype), version

    def give(self, control: Control) -> None:
        """See `Transfer`."""
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        weights = self._offered
        source = _source(weights)
        with self._one_at_a_time, _on_the_gpu_of(weights):
            if control not in self._ends:
                self._ends[control] = WeightTransferTrainerFactory.trainer_init(
                    self._init_info(control, weights), client=_Client(control), source=source
                )
            end = self._ends[control]
            end.source, end.client.version = source, self._version
            end.send_weights()
            end.source = None  # it would hold them

    def is_given(self, control: Control) -> bool:
        """See `Transfer`."""
        return control.weight_version() == str(self._version)

    def forget(self, control: Control) -> None:
        """See `Transfer`."""
        if (end := self._ends.pop(control, None)) is not None:
            end.shutdown()

    def _init_info(self, control: Control, weights: WeightStream) -> Any:
        if self._way == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            return IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=buffer_bytes(weights))
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        address = address_towards(control.url)
        with socket.create_server((address, 0)) as free:
            port = free.getsockname()[1]
        return NCCLTrainerInitInfo(
            rank=0, master_address=address, master_port=port, world_size=1 + control.world_size()
        )


def write_adapter(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write scaled matrices, by module (`inference.adapters`), as a `peft` adapter of one rank, which vLLM reads: where
    ranks differ, zeros are added."""
    modules = sorted(name.removesuffix(A) for name in weights if name.endswith(A))
    rank = max(len(weights[name + A]) for name in modules)
    padded: dict[str, Tensor] = {}
    for name in modules:
        a, b = (weights[name + end].detach().to("cpu", torch.float32) for end in (A, B))
        missing = rank - len(a)
        padded[f"base_model.model.{name}{A}"] = torch.nn.functional.pad(a, (0, 0, 0, missing)).contiguous()
        padded[f"base_model.model.{name}{B}"] = torch.nn.functional.pad(b, (0, missing)).contiguous()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,  # B is scaled already
        "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
        "bias": "none",
    }
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(padded, folder / "adapter_model.safetensors")


def _on_the_gpu_of(weights: WeightStream) -> AbstractContextManager[Any]:
    """vLLM's code sends from the thread's current GPU, which is the first one until a thread says otherwise."""
    return torch.cuda.device(weights.device) if weights.device.type == "cuda" else nullcontext()


def buffer_bytes(weights: WeightStream) -> int:
    """The size of the buffer that packed weights are sent in: a tensor is not cut, so the largest must fit. The
    embedding of a model of 7B is larger than vLLM's own default, 1 GiB."""
    return max([BUCKET_BYTES, *(each.bytes for each in weights.described.values())])


def address_towards(url: str) -> str:
    """The address of this machine that a server at `url` reaches it by. Raises OSError where there is no way to it."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((parts.hostname or "127.0.0.1", parts.port or 80))  # of UDP: nothing is sent
        address: str = way.getsockname()[0]
        return address


class _Client:
    """What vLLM's end of a transfer asks of the server, by our control of it."""

    version = 0

    def __init__(self, control: Control) -> None:
        self._control = control

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._control.initialise(init_info)

    def start_weight_update(self) -> None:
        self._control.begin()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        info = dict(update_info)
        if (handles := info.pop("ipc_handles", None)) is not None:  # no JSON
            info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
        self._control.update(info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._control.finish(self.version)


def _source(weights: WeightStream) -> Any:
    """The weights as vLLM's transfers take them."""
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource

    class OurWeights(WeightSource):  # type: ignore[misc]  # vLLM's
        def metadata(self) -> list[Any]:
            return [ParamMeta(name, each.dtype, each.shape) for name, each in weights.described.items()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return iter(weights)

    return OurWeights()
