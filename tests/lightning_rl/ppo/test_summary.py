"""A run's first words, and its last."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from lightning_rl import files
from lightning_rl.config import compose
from lightning_rl.config.schema import Config, FilterGroups
from lightning_rl.ppo import reporting
from lightning_rl.ppo.batch import BatchRules
from lightning_rl.ppo.reporting import Finished
from lightning_rl.processes import cores
from lightning_rl.trajectories import step_record
from lightning_rl_adapters.call import VersionRange
from lightning_rl_adapters.credit import FINAL, Rewards
from tests.adapters.forests import make_call
from tests.lightning_rl.ppo.test_batch import build, rollout
from tests.lightning_rl.viewer.viewed import record_of


@pytest.mark.parametrize(("limit", "said"), [(2, True), (64, False), (None, False)])
def test_a_container_that_may_not_use_all_cores_is_named(
    limit: int | None, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "limit", lambda: limit)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    models: Any = SimpleNamespace(config=Config(), learning_rate_by_size=False)
    [_, *line] = reporting.first_lines(models)
    computes = f"torch computes with {torch.get_num_threads()} (OMP_NUM_THREADS)"
    assert line == [f"cores: this container may use 2 of 64; {computes}"] * said


def test_rewards_before_and_after_the_folder_and_the_next_commands(tmp_path: Path) -> None:
    run_dir = tmp_path / "my run"
    (run_dir / "model").mkdir(parents=True)
    history = [{"step": 0.0, "val/reward": 0.25}] + [
        {"step": float(step), "critic/score/mean": step / 10} for step in range(1, 9)
    ]
    history[-1] |= {"val/reward": 0.75, "tune/reward": 0.5}
    assert reporting.summary_lines(run_dir, history, "train-0-8-1-0.4f2a1c") == [
        "reward      0.150 -> 0.750 (step 1 to 8)",  # means of a quarter of the steps
        "held-out    0.250 -> 0.750 (step 0 to 8)",
        "tuning      0.500 (step 8)",
        f"run         {run_dir}",
        f"model       {run_dir / 'model'}",
        f"next        lightning-rl dashboard '{run_dir}'",
        f"            lightning-rl report '{run_dir}'",
        f"            lightning-rl doctor '{run_dir}'",
        f"            lightning-rl explain train-0-8-1-0.4f2a1c --run-dir '{run_dir}'",
    ]


def test_a_run_without_steps_says_where_it_is(tmp_path: Path) -> None:
    assert reporting.summary_lines(tmp_path, [], None) == [
        f"run         {tmp_path}",
        f"next        lightning-rl dashboard {tmp_path}",
        f"            lightning-rl report {tmp_path}",
        f"            lightning-rl doctor {tmp_path}",
    ]


@pytest.mark.parametrize(
    ("error", "of_critic", "told"),
    [
        (MemoryError(), False, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu (now 7), or set actor_rollout_ref.m"),
        (torch.OutOfMemoryError(), True, "critic.ppo_max_token_len_per_gpu (now 9), or set critic.model.enable_gradi"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), False, "the update of step 3 ran out of memory"),
        (RuntimeError("shapes do not match"), False, None),
    ],
)
def test_what_to_lower_is_told_of_an_update_that_has_no_memory(
    error: Exception, of_critic: bool, told: str | None
) -> None:
    config = compose(
        {
            "actor_rollout_ref": {"actor": {"ppo_max_token_len_per_gpu": 7}},
            "critic": {"ppo_max_token_len_per_gpu": 9},
        }
    )
    with pytest.raises(type(error)) as raised, reporting.memory_advice(config, 3, of_critic=of_critic):
        raise error
    notes = getattr(raised.value, "__notes__", [])
    assert [told in note for note in notes] == [True] if told else not notes


def test_how_old_the_tokens_of_a_step_are() -> None:
    ranges = [VersionRange(3, 0, 3), VersionRange(5, 3, 4)]
    found = reporting.staleness([rollout("r", replace(make_call(0, None, response=4), versions=ranges))], 6)
    assert found == {"training/staleness/mean": (3 * 3 + 1) / 4, "training/staleness/max": 3.0}


def test_the_rollout_to_look_at_is_one_that_made_a_call(tmp_path: Path) -> None:
    assert reporting.trained_last(tmp_path) is None
    for step in (1, 2):
        step_record.write(tmp_path, record_of(step, {f"silent-{step}": (0.0, 0.0, 0), f"spoke-{step}": (1.0, 0.5, 3)}))
    assert reporting.trained_last(tmp_path) == "spoke-2"


def test_why_a_step_updates_nothing_is_told_with_its_policy(caplog: pytest.LogCaptureFixture) -> None:
    silent = replace(rollout("a"), excluded={"superseded": 2})
    batch = build([silent, rollout("b", make_call(0, None)), replace(rollout("c"), cancelled=True)], BatchRules())
    batch.parts[1].keep([np.zeros(2, bool)], "rejected")
    assert reporting.skipped(batch, 4, FilterGroups(), "planner") == {"training/skipped": 1.0}
    rule = FilterGroups(enable=True, metric="speed", max_num_gen_batches=3)
    reporting.skipped(build([], BatchRules()), 5, rule)
    reporting.skipped(build([], BatchRules()), 6, FilterGroups())
    assert caplog.messages == [
        "step 4 updates nothing of policy planner: 1 of 3 rollouts made no call; 1 of 3 rollouts were cancelled; "
        "2 tokens excluded as rejected, 2 tokens excluded as superseded",
        "step 5 updates nothing: in 3 batches no group has rewards named speed that differ (algorithm.filter_groups)",
        "step 6 updates nothing: there are no rollouts",
    ]


def test_the_final_reward_is_not_told_twice() -> None:
    one = replace(rollout("a"), rewards=Rewards(final=1.0, named={"speed": 0.5, FINAL: 1.0}))
    assert reporting.named_rewards([one, rollout("b")]) == {"speed": 0.5}


def test_an_end_is_one_with_its_model(tmp_path: Path) -> None:
    assert reporting.end_of(tmp_path) is None
    files.note_finished(tmp_path, asked=4, made=3)
    assert reporting.end_of(tmp_path) is None
    (tmp_path / "model").mkdir()
    assert reporting.end_of(tmp_path) == Finished(asked=4, made=3)
    files.note_finished(tmp_path)
    assert reporting.end_of(tmp_path) is None, "of another algorithm"
    files.note_unfinished(tmp_path)
    assert reporting.end_of(tmp_path) is None


@pytest.mark.parametrize(
    ("end", "steps", "patience", "goes_on"),
    [
        (Finished(asked=4, made=4, patience=0), 4, None, False),
        (Finished(asked=4, made=4, patience=0), 6, None, True),
        (Finished(asked=4, made=2, patience=1), 4, 1, False),
        (Finished(asked=4, made=2, patience=1), 4, 2, True),
        (Finished(asked=4, made=2, patience=1), 4, None, True),
        (Finished(asked=4, made=2, patience=1), 2, 2, False),
        (Finished(asked=4, made=2, patience=1), 3, 1, True),
        (Finished(asked=4, made=2), 4, 2, False),
    ],
)
def test_more_steps_and_more_patience_go_on_with_a_finished_run(
    end: Finished, steps: int, patience: int | None, goes_on: bool
) -> None:
    assert end.goes_on(steps, patience) == goes_on
