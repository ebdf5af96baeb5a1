"""Where a run is kept, what it writes for others to read, and a run that begins with the checkpoint of another."""

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

import lightning_rl as lrl
from lightning_rl.cli.train import _plan
from lightning_rl.config import ConfigError, compose, to_yaml
from lightning_rl.config.schema import TrainConfig
from lightning_rl.ppo.run_state import changes_to_warn_of
from lightning_rl.telemetry import made_with
from lightning_rl.telemetry.generations import Generations
from lightning_rl.telemetry.metrics.jsonl import read
from lightning_rl.trainer import RunFolderUsed
from lightning_rl.trajectories import step_record
from lightning_rl.trajectories.trajectory import Trajectory
from lightning_rl.tutorial import checkpoint
from lightning_rl_adapters import forest, rows
from lightning_rl_adapters.credit import Rewards
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from tests.adapters.forests import make_call

SCORES = "def compute_score(data_source, solution_str, ground_truth, extra_info): return len(solution_str) % 3\n"
TASKS = [{"prompt": f"cars: size {n}", "reward_model": {"ground_truth": str(n)}} for n in range(2)]


def config(folder: Path, steps: int, **trainer: Any) -> dict[str, Any]:
    (folder / "scores.py").write_text(SCORES)
    return {
        "data": {"train_batch_size": 2, "max_response_length": 4, "shuffle": False},
        "actor_rollout_ref": {"rollout": {"n": 2, "agent": {"default_agent_loop": "single_turn_agent"}}},
        "reward": {"custom_reward_function": {"path": str(folder / "scores.py")}},
        "trainer": {"total_training_steps": steps, "logger": ["jsonl"], "val_before_train": False, **trainer},
    }


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.long
@pytest.mark.e2e
def test_a_run_goes_where_its_keys_say_and_another_begins_with_its_checkpoint(tmp_path: Path) -> None:
    folders = {
        "default_local_dir": str(tmp_path / "first"),
        "rollout_data_dir": str(tmp_path / "sampled"),
        "validation_data_dir": str(tmp_path / "validated"),
    }
    first = lrl.PPO(config(tmp_path, 1, **folders))
    lrl.Trainer().fit(first, TASKS, TASKS[:1])
    assert first.run_dir == tmp_path / "first"
    sampled, validated = lines(tmp_path / "sampled" / "1.jsonl"), lines(tmp_path / "validated" / "1.jsonl")
    assert [line["gts"] for line in sampled] == ["0", "0", "1", "1"]
    assert [line["gts"] for line in validated] == ["0"]
    for line in sampled + validated:
        assert f"cars: size {line['gts']}" in line["input"]
        assert (line["score"], line["step"]) == (len(line["output"]) % 3, 1)
    assert len({line["request_id"] for line in sampled}) == 4
    with pytest.raises(RunFolderUsed, match=r"resume it \(trainer\.resume_mode=auto"):
        lrl.Trainer().fit(lrl.PPO(config(tmp_path, 1, **folders)), TASKS)

    began = {"resume_mode": "resume_path", "resume_from_path": str(tmp_path / "first" / "checkpoints" / "step-1")}
    second = lrl.PPO(config(tmp_path, 2, default_local_dir=str(tmp_path / "second"), **began))
    lrl.Trainer().fit(second, TASKS)  # the account of tokens is checked after its step
    [row] = read(tmp_path / "second" / "metrics.jsonl")
    assert (row["step"], row["training/policy_version"]) == (2.0, 2.0)
    assert row["tokens/received"] == row["tokens/trained"] + sum(row[key] for key in row if "tokens/excluded" in key)
    assert (tmp_path / "first" / "checkpoints" / "step-1" / "model.safetensors").exists()


def test_a_line_is_a_row_with_what_was_said_in_between(tmp_path: Path) -> None:
    text = FastTokenizer(checkpoint())
    prompt, answer, more, end, other = (text.encode(words) for words in ("how many", "two", "and cars", "three", "one"))
    calls = [
        msgspec.structs.replace(
            make_call(number, parent), prompt_ids=asked, response_ids=said, logprobs=None, versions=[]
        )
        for number, parent, asked, said in ((0, None, prompt, answer), (1, 0, more, end), (2, None, prompt, other))
    ]
    tree = forest.build(calls)
    made = Trajectory(
        rollout_id="r", group_id="g", reward=0.5, rewards=Rewards(final=0.5, named={"reward": 0.5, "acc": 1.0}),
        forest=tree, rows=rows.cut(tree, {}), calls=3, sampled_tokens=0, excluded={}, agent_failed=False,
        task={"reward_model": {"ground_truth": ["2"]}},
    )  # fmt: skip
    without = Trajectory(
        rollout_id="w", group_id="g", reward=0.0, rewards=Rewards(), forest=forest.build([]), rows=[], calls=0,
        sampled_tokens=0, excluded={}, agent_failed=True, task="a text",
    )  # fmt: skip
    Generations(tmp_path / "out", checkpoint()).write(3, [made, without])
    told = {"gts": ["2"], "score": 0.5, "step": 3, "request_id": "r", "reward": 0.5, "acc": 1.0}
    assert lines(tmp_path / "out" / "3.jsonl") == [
        {"input": "how many", "output": text.decode(answer + more + end)} | told,
        {"input": "how many", "output": "one"} | told,
        {"input": "", "output": "", "gts": None, "score": 0.0, "step": 3, "request_id": "w"},
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs a checkpoint: trainer.resume_from_path=RUN_DIR/checkpoints/step-N"),
        ({"resume_from_path": "global_step_7"}, "global_step_7 is no checkpoint of a run, or broken: manifest"),
    ],
)
def test_a_checkpoint_that_is_none_is_refused_in_the_plan(tmp_path: Path, given: dict[str, str], message: str) -> None:
    settings = compose(config(tmp_path, 1, resume_mode="resume_path", **given), schema=TrainConfig)
    with pytest.raises(ConfigError, match=message):
        _plan(settings, None)


def test_a_path_that_is_not_read_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        lrl.PPO(config(tmp_path, 1, resume_mode="auto", resume_from_path="checkpoints/"))
    assert "trainer.resume_from_path=checkpoints/ is not read: trainer.resume_mode is auto" in caplog.text


def test_a_run_that_goes_on_with_another_model_or_order_of_tasks_is_told_so(tmp_path: Path) -> None:
    def told(data: dict[str, Any] | None = None, **model: Any) -> list[str]:
        given = {"actor_rollout_ref": {"model": {"path": "old"} | model}, "data": data or {}}
        return list(changes_to_warn_of(compose(given), tmp_path, 3))

    assert told(path="new") == []
    (tmp_path / "config.yaml").write_text(to_yaml(compose({"actor_rollout_ref": {"model": {"path": "old"}}})))
    assert told() == told(path="new", lora_rank=4) == []
    [model] = told(path="new")
    assert "model.path=new changes no weights of a run that goes on" in model
    [size, seed] = told({"train_batch_size": 5, "seed": 7})
    assert size.startswith("data.train_batch_size=5 (it was 32) puts the tasks into another order")
    assert seed.startswith("data.seed=7 (it was ")
    (tmp_path / made_with.FILE).write_bytes(msgspec.json.encode(msgspec.structs.replace(made_with.here(), threads=99)))
    [threads] = told()
    assert "threads (it had 99; OMP_NUM_THREADS sets them): the last bits of its numbers may be other" in threads


def test_a_run_that_does_steps_anew_with_other_updates_is_told_so(tmp_path: Path) -> None:
    def told(**actor: Any) -> list[str]:
        return list(changes_to_warn_of(compose({"actor_rollout_ref": {"actor": actor}}), tmp_path, 3))

    (tmp_path / "config.yaml").write_text(to_yaml(compose({"actor_rollout_ref": {"actor": {"optim": {"lr": 1e-6}}}})))
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "000003.msgpack").touch()
    assert told(optim={"lr": 3e-4}) == []  # no step is done anew
    (tmp_path / "steps" / "000005.msgpack").touch()
    assert told(optim={"lr": 1e-6}) == told(optim={"lr": None}) == []
    assert told() == told(ppo_max_token_len_per_gpu=99_000, fsdp_config={"param_offload": True}) == []
    step_record.set_aside(tmp_path, after=3)  # and the steps were done before still
    assert sorted(file.name for file in (tmp_path / "steps").iterdir()) == ["000003.msgpack", "000005.former"]
    [changed] = told(optim={"lr": 3e-4}, clip_ratio=0.3)
    names = "actor_rollout_ref.actor.clip_ratio, actor_rollout_ref.actor.optim.lr"
    assert changed.startswith(f"{names}: changed, and steps 4 to 5 were done before with other values")
