"""The trainer's side: models that workers hold are asked like its own, together or apart, and a failure is told."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_rl.config import compose
from lightning_rl.errors import WorkerDied
from lightning_rl.ppo.local_workers import roles_of
from lightning_rl.ppo.models import Models
from lightning_rl.ppo.ray_workers import groups
from lightning_rl.training import state as states
from lightning_rl.training.distributed.group import WorkerGroup
from lightning_rl.training.state import Stored
from tests.lightning_rl.training.distributed.stories import CHECKPOINT, rows

pytestmark = pytest.mark.cluster


@contextmanager
def models(*changes: str) -> Iterator[Models]:
    config = compose(
        {
            "actor_rollout_ref": {"model": {"path": str(CHECKPOINT)}, "actor": {"optim": {"lr": 1e-3}}},
            "trainer": {"device": "cpu"},
        },
        command_line=changes,
    )
    made = Models(config, Path(), with_critic=True)
    try:
        made.train(10)
        yield made
    finally:
        made.close()


def step(made: Models, seed: int) -> dict[str, float]:
    batch = rows(seed)
    for sequence, own in zip(batch, made.actor.log_probs(batch), strict=True):
        sequence.old_log_probs = own
    for sequence, values in zip(batch, made.values(batch), strict=True):
        sequence.values = values
    assert made.critic is not None
    metrics = made.critic.update(made.critic.plan(batch, 4))
    return metrics | made.actor.update(made.actor.plan(batch, 4))


def engine_weights(made: Models) -> dict[str, torch.Tensor]:
    found: Any = made.policy.engine._policy.model
    return dict(found.state_dict())


@pytest.mark.long
def test_the_engine_gets_what_workers_trained_apart(local_ray: None, tmp_path: Path) -> None:
    with models() as alone:
        expected = step(alone, 0)
        alone.send_weights(1)
        state = alone.state_dict()
    with models("trainer.n_gpus_per_node=2", "trainer.colocate=false") as made:
        assert made._crew is not None
        assert [group.name for group in made._crew._all] == ["actor", "critic"]
        found = step(made, 0)
        made.send_weights(1)
        for name, value in expected.items():
            if not name.startswith("perf/"):
                assert found[name] == pytest.approx(value, rel=1e-3, abs=2e-5), name
        for (name, theirs), ours in zip(engine_weights(made).items(), engine_weights(alone).values(), strict=True):
            torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=2e-5, msg=name)
        made.load_state_dict(state)  # that of one process, with its optimizers
        states.write(tmp_path / "state", {"models": made.state_dict()})
    assert len(list((tmp_path / "state" / "part-0").glob("*.distcp"))) == 2  # each worker has written its own
    written = states.read(tmp_path / "state")["models"]
    assert written.keys() == state.keys()
    for ours, theirs in zip(tensors(state), tensors(written), strict=True):
        assert torch.equal(ours, theirs)
    assert {type(each) for each in leaves(states.opened(tmp_path / "state")["models"]["critic"]["model"])} == {Stored}


def leaves(tree: Any) -> list[Any]:
    return [found for one in tree.values() for found in leaves(one)] if isinstance(tree, dict) else [tree]


def tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [found for one in inner for found in tensors(one)]


@pytest.mark.long
def test_what_a_worker_raises_is_raised(local_ray: None) -> None:
    with models("trainer.n_gpus_per_node=2") as made:
        batch = rows(0)
        for sequence in batch:
            sequence.old_log_probs = np.zeros(len(sequence.trained), np.float32)
        batch[-1].advantages[:] = np.inf
        with pytest.raises(FloatingPointError, match=r"is (nan|inf|-inf) for the rollouts \[.*lower actor\.optim\.lr"):
            made.actor.update(made.actor.plan(batch, 4))
        with pytest.raises(WorkerDied, match="failed before"):
            made.actor.log_probs(batch)


class Sleeper:
    """Models of which nothing is asked but to wait."""

    def __init__(self, team: Any) -> None:
        self._team = team

    def die_while_asked(self) -> None:
        if self._team.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()


@pytest.mark.smoke
def test_a_worker_that_dies_is_named_at_once(local_ray: None) -> None:
    group = WorkerGroup("the actor", 1, 2, "cpu", Sleeper)
    try:
        with pytest.raises(WorkerDied, match=r"worker 1 of 2 that trains the actor is gone .*last checkpoint"):
            group.ask(None, "die_while_asked")
    finally:
        group.close()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], [{"actor", "critic", "reference"}]),
        (["trainer.colocate=false"], [{"actor"}, {"critic"}, {"reference"}]),
        (["trainer.colocate=false", "critic.shared_trunk=true"], [{"actor", "value head"}, {"reference"}]),
        (["trainer.colocate=false", "actor_rollout_ref.model.lora_rank=2"], [{"actor", "reference"}, {"critic"}]),
    ],
)
def test_who_shares_workers(changes: list[str], expected: list[set[str]]) -> None:
    config = compose(command_line=["actor_rollout_ref.actor.use_kl_loss=true", *changes])
    assert groups(config, roles_of(config, with_critic=True)) == expected
