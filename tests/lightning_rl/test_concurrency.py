"""At most how many rollouts run at once: what the user says, or the algorithm, or as many as the engines bear."""

from pathlib import Path
from typing import Any

import pytest

import lightning_rl as lrl
from lightning_rl import trainer, tutorial
from lightning_rl.algorithms.base import Algorithm, Endpoint
from lightning_rl.runner.launch import FOR_SERVICES, MOST


def config(batch: int, n: int, max_concurrent_rollouts: int | None) -> dict[str, Any]:
    return {
        "data": {"train_batch_size": batch},
        "actor_rollout_ref": {"rollout": {"n": n, "agent": {"max_concurrent_rollouts": max_concurrent_rollouts}}},
    }


@pytest.mark.parametrize(
    ("batch", "n", "max_concurrent_rollouts", "expected"),
    [(4, 3, None, 12), (32, 8, None, MOST), (32, 8, 5, 5), (4, 3, 99, 99)],
)
def test_ppo_runs_those_of_a_step_at_once_or_as_many_as_it_is_told(
    batch: int, n: int, max_concurrent_rollouts: int | None, expected: int
) -> None:
    assert lrl.PPO(config(batch, n, max_concurrent_rollouts)).n_runners == expected


class Stop(Exception):
    pass


class Says(Algorithm):
    """An engine of a kind, which is not there."""

    def __init__(self, kind: str, n_runners: int | None) -> None:
        self.kind = kind
        self.n_runners = n_runners

    def open(self, run_dir: Path) -> Endpoint:
        engine = {"model": "m", "kind": self.kind, "url": "http://127.0.0.1:1"}
        return Endpoint(model="m", tokenizer=str(tutorial.checkpoint()), renderer="qwen3", engines=[engine])


@pytest.mark.parametrize(
    ("kind", "algorithm", "given", "expected"),
    [
        ("embedded", None, None, MOST),
        ("openai", None, None, FOR_SERVICES),
        ("openai", 3, None, 3),
        ("embedded", 3, 5, 5),
    ],
)
def test_the_trainer_starts_as_many_workers_as_somebody_says(
    kind: str, algorithm: int | None, given: int | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def launch(n_runners: int, *_: Any, **__: Any) -> None:
        asked.append(n_runners)
        raise Stop

    monkeypatch.setattr(trainer.runners, "launch", launch)
    with pytest.raises(Stop):
        lrl.Trainer(lambda task, llm: 1.0, n_runners=given, run_dir=tmp_path).fit(Says(kind, algorithm), [1])
    assert asked == [expected]
