"""vLLM's own transfers with our ends of them, without a GPU: run in vLLM's environment, by `test_transfers.py`.

What needs a GPU is replaced: its name, and the handle of its memory. Everything else is vLLM's: our source is read by
its sender, what the sender tells is what our client would post, and vLLM's receiver makes its update of that.
"""

import json
import os
from types import SimpleNamespace
from typing import Any

import torch

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"

from vllm.distributed.weight_transfer import ipc_engine, nccl_engine, packed_tensor

from lightning_rl.inference.vllm.transfer import DeviceTransfer
from lightning_rl.inference.weights.stream import stream_of

WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.bias": torch.ones(4), "count": torch.tensor([7])}


class Server:
    """Keeps what it was told."""

    url = "http://127.0.0.1:8000"

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def initialise(self, info: Any) -> None:
        self.told.append(("initialise", json.loads(json.dumps(info))))

    def begin(self) -> None:
        self.told.append(("begin", None))

    def update(self, info: Any) -> None:
        self.told.append(("update", json.loads(json.dumps(info))))

    def finish(self, version: int) -> None:
        self.told.append(("finish", version))

    def world_size(self) -> int:
        return 2


def ipc() -> None:
    torch.accelerator.current_device_index = lambda: 0
    torch.cuda.get_device_properties = lambda index: SimpleNamespace(uuid="GPU-0")
    torch.cuda.ipc_collect = lambda: None
    empty = torch.empty
    torch.empty = lambda *size, device=None, **more: empty(*size, **more)  # not on a GPU
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_stream = lambda *_: SimpleNamespace(synchronize=lambda: None)
    packed_tensor.reduce_tensor = lambda tensor: (None, ("handle", tensor.numel()))
    server = Server()
    transfer = DeviceTransfer("ipc", torch.bfloat16)
    for version in (3, 4):
        transfer.offer(stream_of(WEIGHTS), version)
        transfer.give(server)
    steps = [what for what, _ in server.told]
    assert steps == ["initialise", "begin", "update", "finish", "begin", "update", "finish"], steps
    assert [said for what, said in server.told if what == "finish"] == [3, 4]
    engine = ipc_engine.IPCWeightTransferEngine
    assert engine.init_info_cls(**server.told[0][1]).packed
    update = engine.update_info_cls(**server.told[2][1])
    assert update.names == list(WEIGHTS)
    assert update.shapes == [[2, 3], [4], [1]]
    assert update.dtype_names == ["bfloat16", "bfloat16", "int64"]
    assert isinstance(update.ipc_handles, dict)
    assert list(update.ipc_handles) == ["GPU-0"]


def nccl() -> None:
    joined: list[Any] = []
    broadcast: list[tuple[str, torch.Tensor]] = []
    nccl_engine.open_trainer_endpoint = lambda info: joined.append(info) or SimpleNamespace(device="cpu")
    nccl_engine.packed_nccl_broadcast_producer = lambda iterator, **_: broadcast.extend(iterator)
    server = Server()
    transfer = DeviceTransfer("nccl", torch.bfloat16)
    transfer.offer(stream_of(WEIGHTS), 5)
    transfer.give(server)
    assert joined[0].world_size == 3
    assert [what for what, _ in server.told] == ["initialise", "begin", "update", "finish"]
    told = nccl_engine.NCCLWeightTransferEngine.init_info_cls(**server.told[0][1])
    assert (told.master_port, told.rank_offset, told.world_size) == (joined[0].master_port, 1, 3)
    update = nccl_engine.NCCLWeightTransferEngine.update_info_cls(**server.told[2][1])
    assert update.names == list(WEIGHTS)
    assert [(name, tensor.dtype) for name, tensor in broadcast] == [
        ("a.weight", torch.bfloat16), ("b.bias", torch.bfloat16), ("count", torch.int64),
    ]  # fmt: skip
    assert server.told[-1] == ("finish", 5)


if __name__ == "__main__":
    ipc()
    nccl()
    print("both were understood")
