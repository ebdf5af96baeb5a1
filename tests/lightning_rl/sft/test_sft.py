"""A run of SFT: the loss falls, a resumed run is the run that was not stopped, PPO begins with its model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

import lightning_rl as lrl
from lightning_rl.cli import app
from lightning_rl.config import ConfigError
from lightning_rl.viewer import run_folder

from .records import CHECKPOINT, conversation, record, write

RECORDS = [
    *(one for i in range(12) for one in conversation(f"r{i}", [f"select {i} from cats", "done"])),
    record("poor", reward=0.0),
]
CONFIG: dict[str, Any] = {
    "data": {"train_batch_size": 5, "max_prompt_length": 200},
    "actor_rollout_ref": {"actor": {"optim": {"lr": 1e-3}}},
    "sft": {"min_reward": 1.0, "held_out": 0.2},
    "trainer": {"total_epochs": 2, "device": "cpu", "logger": ["jsonl"]},
}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("traces") / "calls.jsonl", RECORDS)


def run(traces: Path, run_dir: Path, **trainer: Any) -> lrl.SFT:
    sft = lrl.SFT({**CONFIG, "trainer": CONFIG["trainer"] | trainer}, traces=traces)
    sft.fit(run_dir)
    return sft


@pytest.fixture(scope="module")
def whole(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> lrl.SFT:
    return run(traces, tmp_path_factory.mktemp("whole"))


def test_the_held_out_loss_falls_and_every_token_is_told(whole: lrl.SFT) -> None:
    first, last = whole.history[0], whole.history[-1]
    assert (whole.step, len(whole.examples.trained), len(whole.examples.held_out)) == (4, 10, 2)
    assert last["sft/held_out_loss"] < 0.7 * first["sft/held_out_loss"]
    assert (last["sft/epoch"], last["tokens/pending"]) == (2.0, 0.0)
    left = last["tokens/excluded/held_out"]
    assert last["tokens/received"] == last["tokens/trained"] + left
    assert last["sft/calls/rendered"] == 24
    assert sum(line["sft/tokens"] for line in whole.history[-2:]) == last["tokens/trained"], "two steps are an epoch"
    written = [json.loads(line) for line in (whole.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in written] == [0, 1, 2, 3, 4]


def test_the_page_of_metrics_has_those_of_a_run(whole: lrl.SFT) -> None:
    page = (CHECKPOINT.parents[2] / "docs" / "metrics.md").read_text()
    for name in whole.history[-1]:
        family = name.rsplit("/", 1)[0] + "/NAME"
        assert f"`{name}`" in page or f"`{family}`" in page, name


def test_a_resumed_run_is_the_run_that_was_not_stopped(whole: lrl.SFT, traces: Path, tmp_path: Path) -> None:
    class Stopped(Exception):
        """The power failed."""

    class Stopping(lrl.SFT):
        def train_step(self, models: Any) -> dict[str, float]:
            if self.step == 4:
                assert run_folder.state(tmp_path) == "running"
                raise Stopped
            return super().train_step(models)

    config = {**CONFIG, "trainer": CONFIG["trainer"] | {"save_freq": 2}}
    with pytest.raises(Stopped):
        Stopping(config, traces=traces).fit(tmp_path)
    assert run_folder.state(tmp_path) == "stopped"
    with pytest.raises(ConfigError, match="holds a run"):
        run(traces, tmp_path)
    resumed = run(traces, tmp_path, resume_mode="auto")
    assert run_folder.state(tmp_path) == "finished"
    assert resumed.history[-1]["sft/loss"] == whole.history[-1]["sft/loss"]
    assert [line["step"] for line in resumed.history] == [0, 1, 2, 3, 4]
    ours, theirs = (load_file(one.run_dir / "model" / "model.safetensors") for one in (resumed, whole))
    assert all(bool((ours[name] == theirs[name]).all()) for name in theirs)


def test_a_run_that_has_more_steps_than_it_is_asked_for_keeps_its_model(
    whole: lrl.SFT, traces: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole.run_dir, tmp_path / "run")
    again = run(traces, tmp_path / "run", resume_mode="auto", total_epochs=1)
    assert again.step == 4
    ours, theirs = (load_file(one.run_dir / "model" / "model.safetensors") for one in (again, whole))
    assert all(bool((ours[name] == theirs[name]).all()) for name in theirs)


def test_a_resumed_run_with_other_traces_tells_what_it_trained(
    traces: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = run(traces, tmp_path, total_training_steps=1)
    assert not caplog.records
    more = [*(json.loads(line) for line in traces.read_text().splitlines()), *conversation("new", ["yes", "no"])]
    again = run(write(tmp_path / "more.jsonl", more), tmp_path, resume_mode="auto", total_training_steps=2)
    [other_order, held_out] = [record.getMessage() for record in caplog.records]
    assert other_order.startswith(
        "the traces, data.train_batch_size, data.shuffle or data.seed are not those of the run"
    )
    assert "that are held out were trained before" in held_out
    batches = {one.rollout_id for one in first._batch(1) + again._batch(2)}
    told = sum(one.tokens for one in again.examples.trained if one.rollout_id in batches)
    assert again.history[-1]["tokens/trained"] == told


def test_a_wrong_name_leaves_a_folder_that_the_right_one_can_use(traces: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run folder and no file"):
        lrl.SFT(CONFIG, traces=tmp_path / "mistyped").fit(tmp_path / "run")
    with pytest.raises(ConfigError, match="none is left to learn from"):
        lrl.SFT(CONFIG | {"sft": {"min_reward": 9.0}}, traces=traces).fit(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_batch_has_every_rollout_once_an_epoch(whole: lrl.SFT) -> None:
    first, second = ([one.rollout_id for step in steps for one in whole._batch(step)] for steps in ((1, 2), (3, 4)))
    assert sorted(first) == sorted(second) == sorted(one.rollout_id for one in whole.examples.trained)
    assert first != second


def test_the_command_trains_and_says_what_is_next(traces: Path, tmp_path: Path) -> None:
    keys = ["data.max_prompt_length=200", "trainer.total_training_steps=1", "trainer.device=cpu"]
    given = ["sft", f"sft.traces={traces}", *keys, "--run-dir", str(tmp_path / "run"), "--json"]
    found = CliRunner().invoke(app, given)
    assert found.exit_code == 0, found.output
    result = json.loads(found.stdout.splitlines()[-1])
    assert (result["steps"], result["model"]) == (1, str(tmp_path / "run" / "model"))
    assert (tmp_path / "run" / "model" / "tokenizer.json").exists()


def test_without_traces_it_says_what_to_name() -> None:
    with pytest.raises(ConfigError, match=r"sft\.traces names nothing"):
        lrl.SFT()


def test_a_step_in_so_many_is_due_and_the_last_one(traces: Path) -> None:
    sft = lrl.SFT(CONFIG, traces=traces)

    def due(every: int) -> list[int]:
        found = []
        for sft.step in range(1, 6):
            if sft._due(every, 5):
                found.append(sft.step)
        return found

    assert (due(2), due(0), due(-1)) == ([2, 4, 5], [5], [5])


def test_the_order_of_the_batches_hangs_on_their_size_the_shuffle_and_the_seed(traces: Path) -> None:
    data = [{}, {"seed": 7}, {"shuffle": False}, {"train_batch_size": 4}]
    orders = [lrl.SFT({**CONFIG, "data": CONFIG["data"] | each}, traces=traces)._order_of_now for each in data]
    assert len(set(orders)) == len(orders)


@pytest.mark.parametrize(
    ("data", "sft", "trainer", "steps"),
    [
        ({}, {}, {}, 4),
        ({"train_batch_size": 4}, {}, {}, 6),  # the last batch of an epoch has two
        ({}, {}, {"total_training_steps": 7}, 7),
        ({}, {"total_epochs": 3}, {"total_training_steps": 7}, 6),
        ({}, {"total_epochs": 3, "total_training_steps": 5}, {"total_training_steps": 7}, 5),
    ],
)
def test_its_own_keys_say_how_long_before_those_of_ppo(
    data: dict[str, Any], sft: dict[str, Any], trainer: dict[str, Any], steps: int, whole: lrl.SFT, traces: Path
) -> None:
    more = {"data": data, "sft": sft, "trainer": trainer}
    made = lrl.SFT(CONFIG | {name: CONFIG[name] | keys for name, keys in more.items()}, traces=traces)
    made.examples = whole.examples
    assert made.steps() == steps


def test_an_epoch_ends_with_the_batch_that_has_the_rest(whole: lrl.SFT, traces: Path) -> None:
    orders = []
    for seed in (1, 2):
        made = lrl.SFT(CONFIG | {"data": CONFIG["data"] | {"train_batch_size": 4, "seed": seed}}, traces=traces)
        made.examples = whole.examples
        batches = [[one.rollout_id for one in made._batch(step)] for step in (1, 2, 3)]
        assert [len(batch) for batch in batches] == [4, 4, 2]
        orders.append([name for batch in batches for name in batch])
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


def test_checkpoints_and_the_first_held_out_loss_are_those_that_are_asked_for(traces: Path, tmp_path: Path) -> None:
    keys = {"total_training_steps": 2, "save_freq": 1, "max_actor_ckpt_to_keep": 1, "val_before_train": False}
    made = run(traces, tmp_path, **keys)
    assert [line["step"] for line in made.history] == [1, 2]
    assert [folder.name for folder in (tmp_path / "checkpoints").glob("step-*")] == ["step-2"]


def test_trackers_are_told_the_names_of_run_and_project(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = []
    monkeypatch.setattr("lightning_rl.telemetry.metrics.open_trackers", lambda *_, **more: about.append(more["about"]))
    for names in ({}, {"experiment_name": "first", "project_name": "cats"}):
        made = lrl.SFT({**CONFIG, "trainer": CONFIG["trainer"] | names}, traces=traces)
        made.run_dir = tmp_path / "run-7"
        made._trackers(1)
    assert [one.name for one in about] == ["run-7", "first"]
    assert about[0].project != about[1].project == "cats"


def test_what_is_of_ppo_alone_is_refused(traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="policies: SFT trains one policy"):
        lrl.SFT(CONFIG | {"policies": {"a": {"train_every": 1}, "b": {"train_every": 1}}}, traces=traces)
    with pytest.raises(ConfigError, match=r"resume_path is PPO's: name the model as actor_rollout_ref\.model\.path"):
        lrl.SFT(CONFIG | {"trainer": {"resume_mode": "resume_path", "resume_from_path": str(tmp_path)}}, traces=traces)
    monkeypatch.setattr("lightning_rl.training.checkpoint.open_state", lambda _: {"batches_taken": 1})
    with pytest.raises(ConfigError, match="step-1 is a checkpoint of PPO: name another folder"):
        lrl.SFT(CONFIG, traces=traces)._restore(None, tmp_path / "step-1")  # type: ignore[arg-type]
