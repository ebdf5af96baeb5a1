"""Weights leave workers that hold shards: byte for byte, a bucket at a time, and no worker has all of them."""

import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lightning_rl.config import compose
from lightning_rl.inference.load import load_model
from lightning_rl.inference.weight_stream import stream_of
from lightning_rl.ppo import local_workers
from lightning_rl.ppo.local_workers import LocalWorkers
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
