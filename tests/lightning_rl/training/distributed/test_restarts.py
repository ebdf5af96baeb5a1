"""How often a run whose worker died is opened again."""

from pathlib import Path
from typing import Any

import pytest

import lightning_rl as lrl
from lightning_rl.errors import WorkerDied


class Losing(lrl.Trainer):
    """Its runs lose a worker, so many times as `losses` says."""

    losses: int
    resumed: list[bool]

    def _run_once(self, agent: Any, algorithm: lrl.Algorithm, *_: Any) -> None:
        self.resumed.append(algorithm.resume)
        if len(self.resumed) <= self.losses:
            raise WorkerDied("worker 1 of 2 is gone")


def resumed(run_dir: Path, losses: int, restarts: int) -> list[bool]:
    """Of every time that the run was opened, whether it was to go on with what is there."""
    trainer = Losing(lambda task: 1.0, run_dir=run_dir)
    trainer.losses, trainer.resumed = losses, []
    algorithm = lrl.PPO({"trainer": {"max_restarts": restarts}, "data": {"train_batch_size": 1}})
    try:
        trainer.fit(algorithm, [1])
    except WorkerDied:
        assert losses > restarts
    else:
        assert losses <= restarts
    return trainer.resumed


@pytest.mark.parametrize(("losses", "restarts", "opened"), [(0, 2, 1), (1, 2, 2), (2, 2, 3), (3, 2, 3), (1, 0, 1)])
def test_a_run_is_opened_again_as_often_as_it_may(tmp_path: Path, losses: int, restarts: int, opened: int) -> None:
    assert resumed(tmp_path, losses, restarts) == [False, True, True][:opened]


def test_other_errors_end_a_run(tmp_path: Path) -> None:
    class Failing(Losing):
        def _run_once(self, agent: Any, algorithm: lrl.Algorithm, *_: Any) -> None:
            self.resumed.append(algorithm.resume)
            raise FloatingPointError("the loss is no number")

    trainer = Failing(lambda task: 1.0, run_dir=tmp_path)
    trainer.resumed = []
    with pytest.raises(FloatingPointError):
        trainer.fit(lrl.PPO({"trainer": {"max_restarts": 3}, "data": {"train_batch_size": 1}}), [1])
    assert trainer.resumed == [False]
