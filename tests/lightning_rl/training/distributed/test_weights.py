"""Weights come to workers in parts, and leave them byte for byte, a bucket at a time; no worker has all of them."""

import shutil
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_rl.config import compose
from lightning_rl.inference.load import NotBySlices, load_model, unfilled
from lightning_rl.inference.weights.stream import stream_of
from lightning_rl.ppo import local_workers
from lightning_rl.ppo.local_workers import LocalWorkers, by_slices
from lightning_rl.training import lora, shards
from lightning_rl.training.distributed.group import WorkerGroup
from lightning_rl.training.distributed.process_group import ProcessGroup
from tests.lightning_rl.training.distributed.stories import CHECKPOINT

pytestmark = pytest.mark.cluster

BUCKET = 200_000  # of weights of 3.7 MB, the largest of which has 0.5 MB


class Live:
    """Counts the bytes of whole tensors that are there at once."""

    def __init__(self) -> None:
        self.now = self.most = self.largest = 0
        self._full = shards.full

    def full(self, tensor: Tensor) -> Tensor:
        found = self._full(tensor)
        size = found.nbytes
        self.now += size
        self.most, self.largest = max(self.most, self.now), max(self.largest, size)
        weakref.finalize(found, self._gone, size)
        return found

    def _gone(self, size: int) -> None:
        self.now -= size


class Sender:
    """A worker with a policy in shards."""

    def __init__(self, team: ProcessGroup) -> None:
        self._team = team

    def sent(self, rank: int, form: Any) -> tuple[dict[str, Tensor], int, int]:
        """All weights, and how many bytes of them were whole at most, and of the largest; checked in each worker."""
        config = compose(command_line=[f"actor_rollout_ref.model.lora_rank={rank}"])
        made = LocalWorkers(config, load_model(CHECKPOINT), {"actor"})
        made.train(CHECKPOINT, 1, self._team)
        live, found = Live(), {}
        with (
            patch.object(shards, "full", live.full),
            patch.object(lora, "full", live.full),
            patch.object(local_workers, "BUCKET_BYTES", BUCKET),
        ):
            described = made.begin_sending(form)
            while bucket := made.next_bucket():
                found |= {name: tensor.clone() for name, tensor in bucket.items()}
                bucket.clear()
        assert described.keys() == found.keys()
        assert live.most <= BUCKET + live.largest, (live.most, live.largest)
        return found, live.most, live.largest


def test_a_bucket_and_a_tensor_are_whole_at_once(local_ray: None) -> None:
    group = WorkerGroup("the policy", 1, 2, "cpu", Sender)
    try:
        found, most, largest = group.ask(None, "sent", 0, "saved")
        adapted, _, _ = group.ask(None, "sent", 2, "model")
    finally:
        group.close()
    expected = dict(stream_of(load_model(CHECKPOINT)))
    for one in (found, adapted):  # a fresh adapter changes nothing
        assert one.keys() == expected.keys()
        assert all(torch.equal(one[name].view(torch.uint8), each.view(torch.uint8)) for name, each in expected.items())
    assert largest < most < 0.3 * sum(each.nbytes for each in expected.values())


class Reader:
    """A worker that reads a policy by slices."""

    def __init__(self, team: ProcessGroup) -> None:
        self._team = team

    def read(self) -> tuple[list[int], int]:
        """The bytes of each slice that was read, and of what this worker holds then."""
        config = compose(command_line=[])
        model, files = by_slices(CHECKPOINT, torch.float32, None)
        sizes: list[int] = []
        cut = shards._slice

        def counted(*given: Any) -> Any:
            found = cut(*given)
            sizes.append(found.to_local().nbytes)
            return found

        assert all(parameter.is_meta for parameter in model.parameters())
        made = LocalWorkers(config, model, {"actor"}, files=files)
        with patch.object(shards, "_slice", counted):
            made.train(CHECKPOINT, 1, self._team)
        held: list[Any] = list(made.model.parameters())
        assert not any(parameter.is_meta for parameter in held)
        assert not any(buffer.is_meta for buffer in made.model.buffers())
        return sizes, sum(parameter.to_local().nbytes for parameter in held)


def test_a_worker_reads_its_part_and_nothing_else(local_ray: None) -> None:
    group = WorkerGroup("the policy", 1, 2, "cpu", Reader)
    try:
        sizes, held = group.ask(None, "read")
    finally:
        group.close()
    halves = [-(-len(each) // 2) * (each.nbytes // len(each)) for each in load_model(CHECKPOINT).parameters()]
    assert sorted(sizes) == sorted(halves)  # one after another
    assert held == sum(halves)


def test_what_cannot_be_read_by_slices_is_read_whole_with_a_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in CHECKPOINT.iterdir():
        shutil.copy(file, tmp_path)
    weights: Any = load_file(tmp_path / "model.safetensors")
    save_file({f"old.{name}": tensor for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    with pytest.raises(NotBySlices, match="have no model"):
        unfilled(tmp_path)
    torch.save(weights, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    model, files = by_slices(tmp_path, torch.float32, None)
    assert files is None
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert "each worker reads the whole model before it is cut: the weights in" in caplog.text


def test_buffers_are_those_of_a_model_that_is_read_whole() -> None:
    theirs = dict(load_model(CHECKPOINT).named_buffers())
    ours = dict(unfilled(CHECKPOINT)[0].named_buffers())
    assert ours.keys() == theirs.keys()
    assert ours
    assert all(torch.equal(ours[name], buffer) for name, buffer in theirs.items())
