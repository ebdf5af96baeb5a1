"""`lightning-rl train --from-verl FILE`: what each key becomes, then the plan."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lightning_rl.cli import app
from lightning_rl.config import ConfigError

SCRIPT = """
STEPS=${STEPS:-7}
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.truncation=left trainer.balance_batch=True \\
    data.max_prompt_length=64 data.max_response_length=64 trainer.total_training_steps=$STEPS trainer.logger=console \\
    trainer.n_gpus_per_node=1 actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 "$@"
"""


def write_tasks(folder: Path, **fields: Any) -> None:
    task = {"prompt": [{"role": "user", "content": "1 + 1"}], **fields}
    (folder / "tasks.jsonl").write_text(json.dumps(task) + "\n")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.sh").write_text(SCRIPT)
    write_tasks(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


OURS = [
    "data.train_files=tasks.jsonl",
    "data.train_batch_size=1",
    "actor_rollout_ref.rollout.name=embedded",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024",  # the plan traces rows of so many tokens
]


def run(*words: str) -> str:
    done = CliRunner().invoke(app, ["train", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_it_says_what_each_key_becomes_and_plans(place: Path) -> None:
    said = run("--from-verl", "run.sh", *OURS, "--dry-run")
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert "algorithm.adv_estimator=grpo" in lines
    assert "data.truncation=left -> data.overlong=truncate_left" in lines
    assert any(line.startswith("trainer.balance_batch=True no effect: the workers' shares") for line in lines)
    assert "agent single_turn_agent" in lines
    assert "steps 7" in lines
    assert any(line.startswith("rewards NONE, AND IT WOULD NOT BEGIN: nothing gives the rollouts") for line in lines)


@pytest.mark.long
def test_verls_defaults_stand_below_it_and_the_command_line_above(place: Path) -> None:
    told = json.loads(run("--from-verl", "run.sh", *OURS, "trainer.total_training_steps=2", "--dry-run", "--json"))
    assert told["plan"]["steps"] == 2
    assert told["config"]["actor_rollout_ref"]["rollout"]["n"] == 1
    assert {note["kind"] for note in told["from_verl"]} == {"same", "converted", "accepted"}


def test_a_script_that_relies_on_a_scorer_that_is_not_here_does_not_begin(place: Path) -> None:
    write_tasks(place, data_source="x")
    with pytest.raises(ConfigError, match=r"`data_source` is 'x', and scorers are there for openai/gsm8k, .*: name a"):
        run("--from-verl", "run.sh", *OURS)


@pytest.mark.long
def test_a_script_that_relies_on_verls_scorers_has_them(place: Path) -> None:
    write_tasks(place, data_source="openai/gsm8k", reward_model={"ground_truth": "2"})
    told = json.loads(run("--from-verl", "run.sh", *OURS, "--dry-run", "--json"))
    assert told["plan"]["rewards"] == "the scorers of the tasks' data_source"


def test_what_is_refused_stands_in_the_table_and_ends_it(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.use_pf_ppo=True: rows are not sampled again"):
        run("--from-verl", "run.sh", *OURS, "algorithm.use_pf_ppo=True", "--dry-run")


def test_it_is_the_configuration(place: Path) -> None:
    with pytest.raises(ConfigError, match="leave --config and --resume out"):
        run("--from-verl", "run.sh", "--config", "x.yaml")
    with pytest.raises(ConfigError, match=r"there is no file .*nothing\.sh"):
        run("--from-verl", "nothing.sh")
