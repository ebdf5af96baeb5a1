"""Several policies in one rollout, through the real parts: each learns from its own calls, and from nothing else."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import lightning_rl as lrl
from lightning_rl.cli import app
from lightning_rl.config import ConfigError
from lightning_rl.ppo.policy_learner import Learners
from lightning_rl.store.sql import SqlStore
from lightning_rl.telemetry.metrics.jsonl import read
from lightning_rl.trajectories import step_record
from lightning_rl_adapters.call import Call, calls_of
from tests.lightning_rl.ppo.agents import (
    plan_and_execute,
    plan_and_execute_by_names,
    plan_and_execute_by_tags,
    plan_by_tags_alone,
)
from tests.lightning_rl.ppo.test_ppo import CHECKPOINT, config

pytestmark = pytest.mark.e2e

LEARNING = {"actor": {"optim": {"lr": 1e-3}}}


def given(**trainer: Any) -> dict[str, Any]:
    found = config(**trainer)
    found["actor_rollout_ref"] |= LEARNING
    found["actor_rollout_ref"]["rollout"] |= {"temperature": 4.0}  # the checkpoint is sure of its words
    return found


def calls_in(run_dir: Path) -> list[Call]:
    store = SqlStore(f"sqlite:///{run_dir / 'store.db'}")
    traces = store.traces([rollout.rollout_id for rollout in store.page(limit=1000)[0]]).values()
    store.close()
    return [call for trace in traces for attempt in trace.attempts for call in calls_of(attempt.spans)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def equal(first: Path, second: Path) -> bool:
    one, two = weights(first), weights(second)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.smoke
def test_each_policy_learns_from_its_own_calls(tmp_path: Path) -> None:
    policies = {
        "planner": {"actor_rollout_ref": {"rollout": {"temperature": 1.5}}},
        "executor": {"actor_rollout_ref": {"rollout": {"temperature": 1.2}}},
    }
    algorithm = lrl.PPO(given(total_training_steps=2, test_freq=2), policies=policies)
    lrl.Trainer(plan_and_execute, n_runners=4, run_dir=tmp_path).fit(algorithm, [0, 1, 2, 3], [4])
    calls = calls_in(tmp_path)
    assert Counter((call.model, call.agent) for call in calls) == {("planner", "planner"): 18, ("executor",) * 2: 18}
    assert {(call.model, call.temperature) for call in calls} == {
        ("planner", 1.5),
        ("executor", 1.2),
        ("planner", 0.0),
        ("executor", 0.0),
    }
    rows = read(tmp_path / "metrics.jsonl")
    for name in ("planner", "executor"):
        assert rows[-1][f"{name}/tokens/received"] == (
            rows[-1][f"{name}/tokens/trained"] + rows[-1][f"{name}/tokens/excluded/validation"]
        )
        assert rows[-1][f"{name}/training/policy_version"] == 2
        assert any(row.get(f"{name}/actor/grad_norm") for row in rows)
        assert not equal(tmp_path / "model" / name, CHECKPOINT)
    assert not equal(tmp_path / "model" / "planner", tmp_path / "model" / "executor")
    # The executor counts with the reward of its name, the planner with the final one.
    assert rows[1]["planner/critic/score/mean"] == rows[1]["critic/score/mean"] != rows[1]["executor/critic/score/mean"]
    [of_planner, of_executor] = (next(iter(step_record.read_all(tmp_path, policy=one))) for one in ("", "executor"))
    models = {call.call_id: call.model for call in calls}
    for record, model in ((of_planner, "planner"), (of_executor, "executor")):
        assert {models[call_id] for rollout in record.rollouts for call_id in rollout.calls} == {model}
    _assert_inspection_knows_both(tmp_path, of_planner.rollouts[0].rollout_id)


def _assert_inspection_knows_both(run_dir: Path, rollout_id: str) -> None:
    command = CliRunner()
    told = json.loads(command.invoke(app, ["explain", rollout_id, "--run-dir", str(run_dir), "--json"]).stdout)
    calls = [call for attempt in told["attempts"] for call in attempt["calls"]]
    assert [(call["model"], call["training"]["trained_tokens"] > 0) for call in calls] == [
        ("planner", True),
        ("executor", True),
    ]
    now = command.invoke(app, ["explain", rollout_id, "--run-dir", str(run_dir), "--call", "1", "--now"])
    assert now.exit_code == 0, now.output
    file = run_dir / "rows.jsonl"
    assert (
        command.invoke(app, ["export", str(run_dir), "-o", str(file), "--format", "jsonl", "--what", "rows"]).exit_code
        == 0
    )
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    trained = [row for row in rows if row["mode"] == "train"]
    assert Counter(row["model"] for row in trained) == {"planner": 16, "executor": 16}
    assert not any(row["excluded"] for row in trained)
    agent = "tests.lightning_rl.ppo.agents:plan_and_execute"
    again = command.invoke(app, ["replay", str(run_dir), rollout_id, "--agent", agent])
    assert again.exit_code == 0, again.output
    judged = json.loads(command.invoke(app, ["doctor", str(run_dir), "--json"]).stdout)["looked_at"]
    assert {name.partition(": ")[0] for name in judged if ": " in name} == {"planner", "executor"}


@pytest.mark.parametrize(
    "agent", [plan_and_execute_by_tags, pytest.param(plan_and_execute_by_names, marks=pytest.mark.long)]
)
def test_one_endpoint_reaches_every_policy(tmp_path: Path, agent: Any) -> None:
    algorithm = lrl.PPO(given(), policies={"planner": {"agents": "plan.*"}, "executor": {"train_every": 0}})
    lrl.Trainer(agent, n_runners=4, run_dir=tmp_path).fit(algorithm, [0, 1, 2, 3])
    assert Counter(call.model for call in calls_in(tmp_path)) == {"planner": 8, "executor": 8}
    [row] = read(tmp_path / "metrics.jsonl")
    for name in ("tokens/received", "tokens/trained"):
        assert row[name] == row[f"planner/{name}"] + row[f"executor/{name}"]
    assert row["executor/tokens/excluded/frozen"] == row["executor/tokens/received"] > 0
    assert row["planner/tokens/trained"] == row["planner/tokens/received"] > 0
    assert (row["planner/training/policy_version"], row["executor/training/policy_version"]) == (1, 0)
    assert equal(tmp_path / "model" / "executor", CHECKPOINT)


def test_a_frozen_policy_beside_another_is_one_policy_of_which_only_that_agent_learns(tmp_path: Path) -> None:
    both, one = tmp_path / "both", tmp_path / "one"
    several = lrl.PPO(given(), policies={"planner": {}, "executor": {"train_every": 0}})
    lrl.Trainer(plan_by_tags_alone, n_runners=1, run_dir=both).fit(several, [0, 1, 2, 3])
    alone = lrl.PPO(given() | {"algorithm": {"train_agents": "planner"}})
    lrl.Trainer(plan_by_tags_alone, n_runners=1, run_dir=one).fit(alone, [0, 1, 2, 3])
    assert equal(both / "model" / "planner", one / "model")
    [many], [single] = (read(folder / "metrics.jsonl") for folder in (both, one))
    assert single["actor/grad_norm"] > 0
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/advantages/max"):
        assert many[f"planner/{name}"] == single[name]


@pytest.mark.long
def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Resumed after a step, two policies end with the weights of a run that was never stopped."""
    policies = {"planner": {}, "executor": {"train_every": 2}}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    tasks = [0, 1, 2, 3]
    for folder, steps in ((whole, 2), (cut, 1), (cut, 2)):
        algorithm = lrl.PPO(given(total_training_steps=steps, resume_mode="auto"), policies=policies)
        lrl.Trainer(plan_and_execute, n_runners=1, run_dir=folder).fit(algorithm, tasks)
    for name in policies:
        assert equal(whole / "model" / name, cut / "model" / name)
    rows = read(cut / "metrics.jsonl")
    assert [row["executor/training/policy_version"] for row in rows] == [1, 1]
    with pytest.raises(ConfigError, match="has the policies executor, planner, and the config one policy, which"):
        lrl.Trainer(plan_by_tags_alone, run_dir=cut).fit(
            lrl.PPO(given(total_training_steps=3, resume_mode="auto")), tasks
        )


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "bound"),
    [({"schedule": "async", "max_off_policy_threshold": 2}, 2), ({"schedule": "one_step_off"}, 1)],
)
def test_no_token_is_older_than_the_bound_in_updates_of_its_own_policy(
    tmp_path: Path, schedule: dict[str, Any], bound: int
) -> None:
    policies = {"planner": {}, "executor": {"train_every": 2}}
    algorithm = lrl.PPO(given(total_training_steps=6, **schedule), policies=policies)
    lrl.Trainer(plan_and_execute, n_runners=4, run_dir=tmp_path).fit(algorithm, [0, 1, 2, 3])
    rows = read(tmp_path / "metrics.jsonl")
    assert [row["planner/training/policy_version"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["executor/training/policy_version"] for row in rows] == [1, 1, 2, 2, 3, 3]
    for name in policies:
        assert max(row[f"{name}/training/staleness/max"] for row in rows) <= bound
        account = {key: value for key, value in rows[-1].items() if key.startswith(f"{name}/tokens/")}
        received, pending = account.pop(f"{name}/tokens/received"), account.pop(f"{name}/tokens/pending")
        assert (received, pending) == (sum(account.values()), 0)


@pytest.mark.long
def test_adapters_over_one_base_are_each_trained(tmp_path: Path) -> None:
    keys = given(total_training_steps=2)
    keys["actor_rollout_ref"]["model"] |= {"lora_rank": 4, "lora_alpha": 8}
    algorithm = lrl.PPO(keys, policies={"planner": {}, "executor": {}})
    lrl.Trainer(plan_and_execute, n_runners=4, run_dir=tmp_path).fit(algorithm, [0, 1, 2, 3])
    one, other = (learner.models.policy for learner in algorithm.learners)
    assert one.engine is other.engine  # type: ignore[union-attr]
    for row in read(tmp_path / "metrics.jsonl"):  # the sampler's log probabilities are the trainer's
        assert max(abs(row[f"{name}/training/mismatch_kl"]) for name in ("planner", "executor")) < 1e-9
    first, second = (dict(learner.models.model.named_parameters()) for learner in algorithm.learners)
    shared = [name for name in first if first[name].data_ptr() == second[name].data_ptr()]
    assert shared == [name for name in first if ".lora_" not in name]
    assert any(not torch.equal(first[name], second[name]) for name in first if ".lora_B." in name)
    assert not equal(tmp_path / "model" / "planner", tmp_path / "model" / "executor")


@pytest.mark.long
def test_each_policy_is_compared_with_its_own_reward_of_the_greedy_rollout(tmp_path: Path) -> None:
    keys = given(total_training_steps=1, val_before_train=False) | {"algorithm": {"adv_estimator": "remax"}}
    algorithm = lrl.PPO(keys, policies={"planner": {}, "executor": {}})
    lrl.Trainer(plan_and_execute, n_runners=2, run_dir=tmp_path).fit(algorithm, [0, 1, 2, 3])
    store = SqlStore(f"sqlite:///{tmp_path / 'store.db'}")
    found = [rollout for rollout in store.page(limit=1000)[0] if str(rollout.group_id).startswith("greedy-")]
    own = {str(rollout.group_id).removeprefix("greedy-"): (rollout.rewards or {})["executor"] for rollout in found}
    [record] = step_record.read_all(tmp_path, policy="executor")
    compared = {rollout.group_id: call.baseline for rollout in record.rollouts for call in rollout.calls.values()}
    assert len(compared) == 4
    assert compared == {group: own[group] for group in compared}


@pytest.mark.long
def test_the_order_of_policies_changes_nothing(tmp_path: Path) -> None:
    for names in (["planner", "executor"], ["executor", "planner"]):
        algorithm = lrl.PPO(given(total_training_steps=2), policies={name: {} for name in names})
        lrl.Trainer(plan_by_tags_alone, n_runners=1, run_dir=tmp_path / names[0]).fit(algorithm, [0, 1, 2, 3])
    for name in ("planner", "executor"):
        assert equal(tmp_path / "planner" / "model" / name, tmp_path / "executor" / "model" / name)


@pytest.mark.long
def test_an_opponent_plays_with_a_checkpoint_of_the_player(tmp_path: Path) -> None:
    opponent = {"checkpoints_of": "planner", "pool": 1, "train_from": 3}
    algorithm = lrl.PPO(given(total_training_steps=3, save_freq=1), policies={"planner": {}, "executor": opponent})
    lrl.Trainer(plan_and_execute, n_runners=4, run_dir=tmp_path).fit(algorithm, [0, 1, 2, 3])
    rows = read(tmp_path / "metrics.jsonl")
    assert [row["executor/training/policy_version"] for row in rows] == [0, 0, 1]
    checkpoints = tmp_path / "checkpoints"
    assert equal(checkpoints / "step-2" / "executor", CHECKPOINT)
    assert equal(checkpoints / "step-3" / "executor", checkpoints / "step-2" / "planner")
    assert not equal(checkpoints / "step-3" / "executor", checkpoints / "step-3" / "planner")
    assert rows[-1]["executor/tokens/excluded/frozen"] == rows[-1]["executor/tokens/received"]


@pytest.mark.long
def test_the_pages_script_and_command_run(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "policies.md").read_text()
    script, _ = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_agent.py").write_text(script)
    done = subprocess.run([sys.executable, "my_agent.py"], cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    assert (tmp_path / "runs" / "two" / "model" / "executor" / "model.safetensors").exists()
    tasks = [{"question": f"How many dogs are {age} years old?"} for age in range(32)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    [command] = [line for line in page.splitlines() if line.startswith("lightning-rl train")]
    words = [*command.split()[1:], "trainer.total_training_steps=1", "data.train_batch_size=4"]
    done = subprocess.run(
        [sys.executable, "-m", "lightning_rl", *words], cwd=tmp_path, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1/1  reward" in done.stdout


class Openable:
    """A policy that notes whose models were loaded when it was opened."""

    name = ""

    def __init__(self, seen: list[list[Any]]) -> None:
        self._seen = seen
        self.models: Any = SimpleNamespace(
            cards=SimpleNamespace(line=lambda: None), policy=SimpleNamespace(folder="the same")
        )

    def open(self, run: Any, resumed: Any, learners: Learners) -> None:
        self._seen.append(list(learners.opened))


def test_policies_that_are_opened_anew_share_nothing_with_those_before() -> None:
    nobody: Any = None
    seen: list[list[Any]] = []
    made: Any = [Openable(seen), Openable(seen)]
    learners = Learners(made)
    for _ in range(2):  # as after a lost worker (trainer.max_restarts)
        learners.open(nobody, None, tell=None)
    assert seen == [[], made[:1]] * 2
