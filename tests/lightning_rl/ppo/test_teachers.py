"""Teachers of a run: which calls they teach, whose tokenizer they must share, and that the policy comes closer."""

import dataclasses
import json
import shutil
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from omegaconf import OmegaConf
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import lightning_rl as lrl
from lightning_rl.config import ConfigError, compose
from lightning_rl.config.schema import TeacherUnusable
from lightning_rl.inference.load import vocabulary_size
from lightning_rl.ppo.batch import BatchRules, StepBatch, read
from lightning_rl.ppo.privileged import TeacherRow
from lightning_rl.ppo.teachers import begin_to_teach, served_teachers, teach
from lightning_rl.telemetry.metrics.jsonl import read as read_metrics
from lightning_rl.training.batch import TrainingSequence
from lightning_rl.training.teacher import Scores, ServedTeacher
from tests.adapters.forests import make_call
from tests.lightning_rl.ppo.agents import two_calls
from tests.lightning_rl.ppo.test_batch import rollout
from tests.lightning_rl.ppo.test_ppo import CHECKPOINT, config


class Says:
    """A teacher that finds every token as likely."""

    def __init__(self, log_prob: float) -> None:
        self.log_prob = log_prob

    def score(self, sequences: list[TrainingSequence], top: int) -> list[Scores]:
        return [Scores(np.full(len(sequence.trained), self.log_prob, np.float32)) for sequence in sequences]


def settings(teachers: dict[str, Any], **more: Any) -> Any:
    return compose({"distillation": {"enabled": True, "teacher_models": teachers, **more}})


def rolled_out(name: str, agent: str, task: Any) -> Any:
    """A rollout of one call."""
    return msgspec.structs.replace(rollout(name, msgspec.structs.replace(make_call(0, None), agent=agent)), task=task)


def taught(config: Any) -> list[set[float]]:
    """By rollout what its tokens were told."""
    batch = read(
        [
            rolled_out("r0", "planner", {"subject": "sums", "level": 1, "data_source": "x"}),
            rolled_out("r1", "coder", {"subject": "words", "level": 2, "data_source": "x"}),
        ],
        BatchRules(),
    )
    teach(batch, {name: Says(-float(n)) for n, name in enumerate(config.distillation.teachers(), 1)}, config)
    return [
        {float(each) for s in part.sequences if s.teacher_log_probs is not None for each in s.teacher_log_probs}
        for part in batch.parts
    ]


def test_tasks_and_agents_say_which_teacher_a_call_has() -> None:
    one = {"model_path": "a"}
    assert taught(settings({"all": one})) == [{-1.0}, {-1.0}]
    by_task = {"first": {**one, "key": "sums"}, "second": {**one, "key": "words"}}
    assert taught(settings(by_task, teacher_key="subject")) == [{-1.0}, {-2.0}]
    [first, second] = taught(settings({"first": {**one, "agents": "code."}, "second": {**one, "key": "y"}}))
    assert second == {-1.0}
    assert all(np.isnan(each) for each in first)
    [first, second] = taught(settings({"first": {**one, "agents": "plan|coder"}}))
    assert second == {-1.0}
    assert all(np.isnan(each) for each in first), "a part of a name is none"
    numbered = {name: {**one, "key": key} for name, key in (("first", "1"), ("second", "2"))}
    assert taught(settings(numbered, teacher_key="level")) == [{-1.0}, {-2.0}]
    with pytest.raises(ConfigError, match=r"the tasks' data_source .* is x, and the teachers are for first: key=sums"):
        taught(settings(by_task))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs a teacher: give distillation.teacher_models.NAME.model_path"),
        ({"teacher_model": {"model_path": None, "key": None}}, "needs a teacher"),  # verl's own default
        ({"a": {"path": "x"}}, "teacher_models.a: .*unknown field `path`.*there are model_path, server_urls"),
        ({"a": {"model_path": "x", "server_urls": ["http://h:1"]}}, "teacher_models.a needs one of model_path"),
        ({"a": {"model_path": "x"}, "b": {"model_path": "y", "key": "z"}}, "teacher_models.a: of several teachers"),
        ({"a": {"model_path": "x", "agents": "("}}, "agents is no regular expression"),
    ],
)
def test_teachers_that_cannot_be_used_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TeacherUnusable, match=message):
        settings(given)


def test_a_task_that_has_no_keys_has_no_teacher_of_one() -> None:
    config, batch = settings({"a": {"model_path": "a", "key": "x"}}), read([rolled_out("r", "a", "text")], BatchRules())
    with pytest.raises(ConfigError, match=r"the tasks' data_source \(distillation.teacher_key\) is missing, and"):
        teach(batch, {"a": Says(-1.0)}, config)
    teach(read([rollout("nothing said")], BatchRules()), {"a": Says(-1.0)}, config)


def test_a_served_teacher_is_made_as_the_keys_say_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    class Made:
        def __init__(self, *given: Any) -> None:
            self.given = given

        def check(self, probe: list[tuple[str, list[int]]]) -> None:
            self.probe = probe

    monkeypatch.setattr("lightning_rl.ppo.teachers.ServedTeacher", Made)
    known = vocabulary_size(CHECKPOINT)
    likely = {"loss_mode": "reverse_kl_tail", "topk": known, "use_policy_gradient": False}
    config = settings({"big": {"server_urls": ["http://h:1"]}}, when_away="skip", distillation_loss=likely)
    made: Any = served_teachers(config, CHECKPOINT)["big"]
    assert made.given == ("big", ["http://h:1"], known, "skip")
    own = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    assert [own.decode(ids, skip_special_tokens=False) for _, ids in made.probe] == [text for text, _ in made.probe]
    assert made.probe
    assert served_teachers(settings({"self": {"weights": "averaged"}}), CHECKPOINT) == {}


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"teacher_models.big: there is no tokenizer.json in "):
        served_teachers(settings({"big": {"model_path": str(tmp_path)}}), CHECKPOINT)
    many = {"loss_mode": "reverse_kl_tail", "topk": 10**6, "use_policy_gradient": False}
    with pytest.raises(ConfigError, match=r"topk=1000000: the policy's tokenizer has \d+ tokens"):
        served_teachers(settings({"big": {"model_path": str(CHECKPOINT)}}, distillation_loss=many), CHECKPOINT)


def test_a_teacher_with_a_shorter_context_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(CHECKPOINT, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    served_teachers(settings({"big": {"model_path": str(CHECKPOINT)}}), CHECKPOINT)
    assert not caplog.messages
    served_teachers(settings({"big": {"model_path": str(tmp_path)}}), CHECKPOINT)
    assert ["teacher big reads 64 tokens, and rows may have 512" in one for one in caplog.messages] == [True]
    caplog.clear()
    del config["max_position_embeddings"]
    for nested, told in (({"text_config": {"max_position_embeddings": 32}}, ["reads 32 tokens"]), ({}, [])):
        (tmp_path / "config.json").write_text(json.dumps(config | nested))
        served_teachers(settings({"big": {"model_path": str(tmp_path)}}), CHECKPOINT)
        assert [one.partition(", and")[0].removeprefix("teacher big ") for one in caplog.messages] == told
        caplog.clear()


@pytest.mark.parametrize(
    ("end", "refused"), [("<|im_end|>", False), ({"content": "<|im_end|>"}, False), ("<|other|>", True), (None, True)]
)
def test_a_teacher_must_end_texts_as_the_policy_does(end: Any, refused: bool, tmp_path: Path) -> None:
    for name, given in (("own", {"eos_token": "<|im_end|>"}), ("other", end and {"eos_token": end})):
        shutil.copytree(CHECKPOINT, tmp_path / name)
        (tmp_path / name / "tokenizer_config.json").unlink()
        if given:
            (tmp_path / name / "tokenizer_config.json").write_text(json.dumps(given))
    config = settings({"big": {"model_path": str(tmp_path / "other")}})
    with pytest.raises(ConfigError, match="their ends of text are") if refused else nullcontext():
        served_teachers(config, tmp_path / "own")


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(CHECKPOINT, other)
    assert served_teachers(settings({"big": {"model_path": str(other)}}), CHECKPOINT) == {}
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    first, second = list(vocabulary["model"]["vocab"])[:2]
    ids = vocabulary["model"]["vocab"]
    ids[first], ids[second] = ids[second], ids[first]
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(
        ConfigError, match=r"teacher_models.big: the teacher in .* has another tokenizer .* \(sft.teacher; "
    ):
        served_teachers(settings({"big": {"model_path": str(other)}}), CHECKPOINT)


def test_what_is_asked_as_a_rollout_ends_is_what_its_step_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    def score(token_ids: list[int], top: int) -> list[dict[str, Any]]:
        asked.append(token_ids)
        return [{str(each): {"logprob": -1.0, "rank": 1}} for each in token_ids]

    config, teacher = settings({"big": {"server_urls": ["http://h:1"]}}), ServedTeacher("big", ["http://h:1"], 10**6)
    monkeypatch.setitem(teacher.__dict__, "_servers", [SimpleNamespace(url="http://h:1", score=score)])
    ended = [rolled_out(name, "a", {}) for name in ("r0", "r1")]
    for trajectory in reversed(ended):
        begin_to_teach(trajectory, BatchRules(), {"big": teacher}, config)
    begin_to_teach(ended[0], BatchRules(), {"big": Says(-1.0)}, config)  # one in our process is asked by the step alone
    batch = read(ended, BatchRules())
    teach(batch, {"big": teacher}, config)
    assert all((s.teacher_log_probs == -1).all() for s in batch.sequences)
    assert len(asked) == len(batch.sequences) == 2
    teacher.close()


class Away(ServedTeacher):
    """It is skipped for rollouts whose first token is odd."""

    def __init__(self) -> None:
        self.skipped = 0

    def score(self, sequences: list[TrainingSequence], top: int) -> list[Scores]:
        self.skipped += 1
        return [Scores(np.full(len(s.trained), np.nan if s.rollout else -1.0, np.float32)) for s in sequences]


@pytest.mark.parametrize("rewards", [True, False])
def test_rollouts_without_their_teacher_train_by_rewards_or_are_left_out_by_name(rewards: bool) -> None:
    config = settings({"big": {"model_path": "a"}}, distillation_loss={"use_task_rewards": rewards})
    batch = read([rolled_out(name, "a", {}) for name in ("r0", "r1")], BatchRules())
    trained = [part.trained for part in batch.parts]
    teach(batch, {"big": Away()}, config)
    assert [part.trained for part in batch.parts] == (trained if rewards else [trained[0], 0])
    assert batch.parts[1].excluded["teacher_away"] == (0 if rewards else trained[1])


def test_while_a_teacher_is_away_calls_that_have_none_are_left_out_as_such() -> None:
    config = settings({"big": {"model_path": "a", "agents": "coder"}}, distillation_loss={"use_task_rewards": False})
    batch = read(
        [rolled_out(name, agent, {}) for name, agent in zip("abc", ["coder", "coder", "planner"], strict=True)],
        BatchRules(),
    )
    teach(batch, {"big": Away()}, config)
    assert [part.left_out for part in batch.parts] == [None, "teacher_away", "untaught"]


def test_a_step_of_which_no_teacher_was_there_trains_nothing_and_one_that_has_none_is_an_error() -> None:
    config = settings({"big": {"model_path": "a"}}, distillation_loss={"use_task_rewards": False})
    teacher = Away()

    def of_step() -> StepBatch:
        batch = read([rolled_out(name, "a", {}) for name in "ab"], BatchRules())
        batch.parts[0].keep([np.zeros(len(each.trained), bool) for each in batch.parts[0].sequences], "rejected")
        return batch

    batch = of_step()
    teach(batch, {"big": teacher}, config)
    assert [part.left_out for part in batch.parts] == ["rejected", "teacher_away"]
    of_nobody = settings({"big": {"model_path": "a", "key": "x"}}, distillation_loss={"use_task_rewards": False})
    with pytest.raises(ConfigError, match="no call of the step has a teacher"):
        teach(of_step(), {"big": teacher}, of_nobody)


def test_calls_without_a_teacher_are_left_out_by_name_where_it_alone_trains() -> None:
    of_coder = {"big": {"model_path": "a", "agents": "coder"}}
    config = settings(of_coder, distillation_loss={"use_task_rewards": False})
    batch = read([rolled_out("r0", "planner", {}), rolled_out("r1", "coder", {})], BatchRules())
    sampled = [part.trained for part in batch.parts]
    teach(batch, {"big": Says(-1.0)}, config)
    planner, coder = batch.parts
    assert (planner.left_out, planner.trained, planner.excluded["untaught"]) == ("untaught", 0, sampled[0])
    assert set(planner.calls_left_out.values()) == {"untaught"}
    assert (coder.left_out, coder.trained, +coder.excluded) == (None, sampled[1], {})


def test_what_a_teacher_was_told_nothing_before_is_not_what_it_was_away_for() -> None:
    class TellsOfTheFirst:
        def of(self, batch: Any) -> tuple[list[TeacherRow], Counter[str]]:
            first, _ = batch.sequences
            row = dataclasses.replace(first)
            row.rollout = 1  # of which `Away` says nothing
            return [TeacherRow(first, np.arange(len(first.trained)), row)], Counter(nothing_to_tell=1)

    config = settings({"big": {"model_path": "a"}}, distillation_loss={"use_task_rewards": False})
    batch = read([rolled_out(name, "a", {}) for name in ("r0", "r1")], BatchRules())
    teach(batch, {"big": Away()}, config, cast(Any, TellsOfTheFirst()))
    assert [part.left_out for part in batch.parts] == ["teacher_away", "untaught"]


@pytest.mark.e2e
def test_a_run_is_drawn_to_its_teacher(tmp_path: Path) -> None:
    """The teacher is the policy with its last layer changed; no reward counts."""
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    model.model.norm.weight.data *= 0.3
    shutil.copytree(CHECKPOINT, tmp_path / "teacher")
    model.save_pretrained(tmp_path / "teacher")
    given = {
        "actor_rollout_ref": {"actor": {"optim": {"lr": 1e-3}, "ppo_epochs": 4}},
        "distillation": {
            "enabled": True,
            "teacher_models": {"big": {"model_path": str(tmp_path / "teacher")}},
            "distillation_loss": {
                "loss_mode": "forward_kl_tail",
                "topk": 16,
                "use_policy_gradient": False,
                "use_task_rewards": False,
            },
        },
        "trainer": {"total_training_steps": 5, "val_before_train": False},
    }
    merged: Any = OmegaConf.to_container(OmegaConf.merge(config(), given))
    lrl.Trainer(two_calls, n_runners=4, run_dir=tmp_path / "run").fit(lrl.PPO(merged), [0, 1, 2, 3])
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1]["distillation/loss"] < 0.7 * rows[0]["distillation/loss"]
    assert all(row["distillation/taught_share"] == 1 for row in rows)
    assert all(0 < row["distillation/teacher_mass"] <= 1.001 for row in rows)
    assert all(row["tokens/received"] == row["tokens/trained"] for row in rows)
