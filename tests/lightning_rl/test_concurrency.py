"""At most how many rollouts run at once: what the user says, or the algorithm, or as many as the engines bear."""

import os
from pathlib import Path
from typing import Any

import pytest

import lightning_rl as lrl
from lightning_rl import trainer, tutorial
from lightning_rl.agents.agent import as_agent
from lightning_rl.algorithms.base import Algorithm, Endpoint
from lightning_rl.runner.launch import FOR_SERVICES, MOST


def config(batch: int, n: int, max_concurrent_rollouts: int | None) -> dict[str, Any]:
    return {
        "data": {"train_batch_size": batch},
        "actor_rollout_ref": {"rollout": {"n": n, "agent": {"max_concurrent_rollouts": max_concurrent_rollouts}}},
    }


@pytest.mark.parametrize(
    ("batch", "n", "max_concurrent_rollouts", "expected"),
    [(4, 3, None, (None, 12)), (32, 8, None, (None, 256)), (32, 8, 5, (5, 256)), (4, 3, 99, (99, 12))],
)
def test_ppo_runs_those_of_a_step_at_once_or_as_many_as_it_is_told(
    batch: int, n: int, max_concurrent_rollouts: int | None, expected: tuple[int | None, int]
) -> None:
    ppo = lrl.PPO(config(batch, n, max_concurrent_rollouts))
    assert (ppo.n_runners, ppo.asks_for) == expected


class Stop(Exception):
    pass


class Says(Algorithm):
    """An engine of a kind, which is not there."""

    def __init__(self, kind: str, n_runners: int | None, asks_for: int | None = None) -> None:
        self.kind = kind
        self.n_runners = n_runners
        self.asks_for = asks_for

    def open(self, run_dir: Path) -> Endpoint:
        engine = {"model": "m", "kind": self.kind, "url": "http://127.0.0.1:1"}
        return Endpoint(model="m", tokenizer=str(tutorial.checkpoint()), renderer="qwen3", engines=[engine])


class Programs(lrl.Agent):
    starts_processes = True


def function(task: int, llm: lrl.LLM) -> float:
    return 1.0


PROCESS, HOOK = {"isolation": "process"}, {"hooks": lrl.Hook()}


@pytest.mark.parametrize(
    ("agent", "algorithm", "given", "expected"),
    [
        (function, Says("embedded", None), {}, 2 * MOST),
        (function, Says("embedded", None, asks_for=100), {}, 100),
        (function, Says("embedded", None, asks_for=1000), {}, 2 * MOST),
        (function, Says("embedded", None, asks_for=1000), PROCESS, MOST),
        (Programs, Says("embedded", None, asks_for=1000), {}, MOST),
        (Programs, Says("embedded", None, asks_for=1000), HOOK, MOST),
        (Programs, Says("embedded", 3, asks_for=1000), {}, 3),
        (function, Says("openai", None), {}, FOR_SERVICES),
        (function, Says("openai", 3), {}, 3),
        (function, Says("embedded", 3, asks_for=4), {"n_runners": 500}, 500),
    ],
)
def test_so_many_rollouts_run_at_once(
    agent: Any,
    algorithm: Says,
    given: dict[str, Any],
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    made = lrl.Trainer(agent, run_dir=tmp_path, **given)
    assert made._at_once(as_agent(agent), algorithm, algorithm.open(tmp_path)) == expected


def test_a_run_starts_runners_for_as_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def launch(n_runners: int, *_: Any, **__: Any) -> None:
        asked.append(n_runners)
        raise Stop

    monkeypatch.setattr(trainer.runners, "launch", launch)
    with pytest.raises(Stop):
        lrl.Trainer(function, run_dir=tmp_path).fit(Says("openai", 3), [1])
    assert asked == [3]
