"""SFT that runs the agent with a teacher first: its answers, and its answers alone, are learned from."""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

import lightning_rl as lrl
from lightning_rl.cli import app
from lightning_rl.config import ConfigError
from lightning_rl.sft.teacher import TeacherAway
from lightning_rl.store.contract import ErrorInfo
from lightning_rl.telemetry.metrics.jsonl import read
from tests.lightning_rl.inspect import runs
from tests.proxy.engines.service import Service, running

from .records import CHECKPOINT

CONFIG: dict[str, Any] = {
    "data": {"train_batch_size": 4, "max_prompt_length": 200},
    "actor_rollout_ref": {"actor": {"optim": {"lr": 1e-3}}},
    "sft": {"min_reward": 1.0, "held_out": 0.25},
    "trainer": {"total_epochs": 1, "device": "cpu", "logger": ["jsonl"]},
}
TASKS = [{"i": i} for i in range(8)]


@lrl.rollout
async def agent(task: dict[str, Any], llm: lrl.LLM) -> float:
    """Asks its model, and a judge whose answer nobody shall learn; odd tasks are right."""
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        chat: Any = [{"role": "user", "content": f"how many cats are {task['i']} years old?"}]
        await client.chat.completions.create(model=llm.model, messages=chat, max_tokens=8)
        if task.get("judged", True):
            await client.chat.completions.create(model="judge", messages=chat, max_tokens=8)
    return float(task["i"] % 2)


@pytest.fixture
def service() -> Iterator[Service]:
    with running() as service:
        service.tokens = False
        service.reply = lambda body: "select count from cats" if body["model"] == "theirs" else "fair"
        yield service


def with_service(service: Service) -> dict[str, Any]:
    frozen = {"kind": "openai", "url": service.url}
    backends = {"helper": frozen | {"remote_model": "theirs"}, "judge": frozen | {"remote_model": "strict"}}
    return CONFIG | {"gateway": {"backends": backends}}


@pytest.mark.e2e
@pytest.mark.smoke
def test_a_frozen_models_answers_are_learned(service: Service, tmp_path: Path) -> None:
    config = with_service(service) | {"sft": CONFIG["sft"] | {"total_epochs": 2}}
    sft = lrl.SFT(config, teacher="helper")
    lrl.Trainer(agent, n_runners=4, run_dir=tmp_path).fit(sft, TASKS)
    # Four of eight rollouts are right, one of them is held out; three answers, twice.
    assert (len(sft.examples.trained), len(sft.examples.held_out), sft.step) == (3, 1, 2)
    last = sft.history[-1]
    assert last["sft/held_out_loss"] < sft.history[0]["sft/held_out_loss"]
    assert last["sft/calls/rendered"] == 8, "the judge's calls are written, too"
    assert last["tokens/excluded/not_selected"] > 0, "and are not learned"
    assert last["tokens/received"] == last["tokens/trained"] + sum(
        value for name, value in last.items() if name.startswith("tokens/excluded/")
    )
    assert sft.model == tmp_path / "model"
    asked = len(service.requests)
    assert asked == 16

    again = lrl.SFT(config | {"trainer": CONFIG["trainer"] | {"resume_mode": "auto"}}, teacher="helper")
    lrl.Trainer(agent, n_runners=4, run_dir=tmp_path).fit(again, TASKS)
    assert len(service.requests) == asked
    assert again.step == 2


@pytest.mark.e2e
@pytest.mark.long
def test_a_teacher_of_ours_with_the_policys_tokenizer_is_learned_by_its_ids(tmp_path: Path) -> None:
    sft = lrl.SFT(CONFIG | {"sft": {"n": 2, "held_out": 0.0, "total_training_steps": 3}}, teacher=CHECKPOINT)
    tasks = [{"i": i, "judged": False} for i in range(4)]
    lrl.Trainer(agent, n_runners=4, run_dir=tmp_path).fit(sft, tasks)
    assert set(sft.examples.calls) == {"as_sampled"}
    assert (len(sft.examples.trained), sft.step) == (8, 3)


@pytest.mark.e2e
@pytest.mark.long
def test_one_command_imitates_and_then_goes_on_with_rewards(service: Service, tmp_path: Path) -> None:
    program, tasks, run = tmp_path / "asking.py", tmp_path / "tasks.jsonl", tmp_path / "run"
    program.write_text(
        f"from typing import Any\nimport openai\nimport lightning_rl as lrl\n\n{inspect.getsource(agent)}"
    )
    tasks.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    backends = [
        f"gateway.backends.{name}={{kind:openai,url:'{service.url}',remote_model:{model}}}"
        for name, model in (("helper", "theirs"), ("judge", "strict"))
    ]
    words = [
        *("train", "--sft", f"agent={program}:agent", f"data.train_files={tasks}", *backends, "--run-dir", str(run)),
        *("sft.teacher=helper", "sft.min_reward=1", "sft.lr=1e-3", "sft.total_training_steps=2", "--json"),
        *("data.train_batch_size=4", "data.max_prompt_length=200", "data.max_response_length=8", "trainer.device=cpu"),
        *("actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=1", "actor_rollout_ref.actor.optim.lr=1e-4"),
    ]
    planned = CliRunner().invoke(app, [*words, "--dry-run"])
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["plan"]["begins_with"] == "SFT on rollouts of helper"
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout.splitlines()[-1])["model"] == str(run / "model")
    assert [row["step"] for row in read(run / "sft" / "metrics.jsonl")][-1] == 2
    assert f"path: {run / 'sft' / 'model'}" in (run / "config.yaml").read_text()
    first = read(run / "metrics.jsonl")[-1]
    assert (first["step"], first["actor/lr"]) == (1, 1e-4), "the rate of supervised training is its own"

    # Stopped between the two: what is there is taken, and PPO begins.
    for left in (*run.glob("*.yaml"), *run.glob("run.id"), *run.glob("server.url"), *run.glob("store.db*")):
        left.unlink()
    asked = len(service.requests)
    more = CliRunner().invoke(app, ["train", "--resume", str(run), "--json"])
    assert more.exit_code == 0, more.output
    assert sum(one["model"] == "theirs" for one in service.requests[asked:]) == 0


@pytest.mark.e2e
@pytest.mark.long
def test_what_an_outage_of_the_teacher_ended_is_asked_again_by_a_run_that_goes_on(
    service: Service, tmp_path: Path
) -> None:
    def away(body: dict[str, Any]) -> str:
        raise OSError("away")

    answers, service.reply = service.reply, away
    config = with_service(service)
    with pytest.raises(TeacherAway, match="infrastructure ended all 2 of its rollouts"):
        lrl.Trainer(agent, n_runners=2, run_dir=tmp_path).fit(lrl.SFT(config, teacher="helper"), TASKS[:2])
    service.reply = answers
    resumed = config | {"trainer": CONFIG["trainer"] | {"resume_mode": "auto"}}
    sft = lrl.SFT(resumed, teacher="helper")
    lrl.Trainer(agent, n_runners=2, run_dir=tmp_path).fit(sft, TASKS[:2])
    assert len(sft.examples.trained) == 1, "the odd one is right"


def test_what_is_no_model_is_named() -> None:
    with pytest.raises(ConfigError, match=r"sft\.teacher=helper: gateway\.backends is empty, and there is no folder"):
        lrl.SFT(CONFIG, teacher="helper")


def test_a_teacher_needs_an_agent_and_tasks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lrl\.Trainer\(agent\)\.fit\(sft, tasks\)"):
        lrl.SFT(CONFIG, teacher=CHECKPOINT).fit(tmp_path)
    with pytest.raises(ConfigError, match="there is no task for the teacher"):
        lrl.Trainer(agent, run_dir=tmp_path).fit(lrl.SFT(CONFIG, teacher=CHECKPOINT))
    with pytest.raises(ConfigError, match=r"call fit\(run_dir\), or name a teacher"):
        lrl.Trainer(agent, run_dir=tmp_path).fit(lrl.SFT(CONFIG, traces=tmp_path), TASKS)
    with pytest.raises(ConfigError, match="leave the val_dataset out"):
        lrl.Trainer(agent, run_dir=tmp_path).fit(lrl.SFT(CONFIG, teacher=CHECKPOINT), TASKS, TASKS)


def test_the_teacher_plays_every_part_that_no_frozen_model_has() -> None:
    backends = {name: {"kind": "openai", "url": "http://127.0.0.1:1"} for name in ("judge", "helper")}
    sft = lrl.SFT(CONFIG | {"gateway": {"backends": backends}}, teacher=CHECKPOINT)
    sft.answer_for(["judge", "planner"])
    assert set(sft.resources or ()) == {"main_llm", "judge", "helper", "planner"}
    assert sft.teacher is not None
    assert sft.teacher.resources == ("main_llm", "planner")


def test_a_teacher_may_be_a_folder_or_an_id_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CHECKPOINT.parent)
    for name in (CHECKPOINT.name, "owner/model"):
        sft = lrl.SFT(CONFIG | {"sft": {"n": 3}}, teacher=name)
        assert sft.teacher is not None
        assert (sft.teacher.model, sft.teacher.n) == (name, 3)


def test_frozen_models_answer_beside_a_teacher_of_ours_and_as_the_teacher(tmp_path: Path) -> None:
    backends = {name: {"kind": "openai", "url": "http://127.0.0.1:1"} for name in ("judge", "helper")}
    ours, frozen = (
        lrl.SFT(CONFIG | {"gateway": {"backends": backends}}, teacher=name).teacher for name in (CHECKPOINT, "helper")
    )
    assert ours is not None
    assert frozen is not None
    try:
        engines = ours.open(tmp_path).engines
        assert ours.policy is not None
        names = {ours.policy.name, "judge", "helper"}
        assert ours.gateway_name == ours.policy.name != str(CHECKPOINT)
        assert {engine["model"] for engine in engines} == names
    finally:
        ours.close()
    assert {engine["model"] for engine in frozen.open(tmp_path).engines} == {"judge", "helper"}
    assert frozen.gateway_name == "helper"


def test_some_rollouts_that_an_outage_ended_leave_the_others_to_learn_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = ErrorInfo(type="Lost", message="away", infrastructure=True)
    with runs.open_store(tmp_path) as store:
        runs.record(store, "answered", runs.TALK)
        runs.record(store, "lost", [], error=lost)
        found = [store.traces([name])[name] for name in ("lost", "answered")]
    begun = []
    for name in (CHECKPOINT, "owner/model"):
        teacher = lrl.SFT(CONFIG, teacher=name).teacher
        assert teacher is not None
        teacher.run_dir = tmp_path
        monkeypatch.setattr(teacher, "roll_out", lambda prefix, tasks: begun.append(prefix) or found)
        answered, evaluation = teacher.answer(TASKS, None)
        assert (answered, evaluation.left_out) == (found, 1)
    assert len(set(begun)) == 2, "in one folder another teacher is asked anew"


def test_the_teacher_has_so_many_tasks_and_the_reward_that_the_keys_name(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info): return 1.0")
    scored = {"reward": {"custom_reward_function": {"path": str(tmp_path / "f.py")}}}
    config = CONFIG | {"data": CONFIG["data"] | {"train_max_samples": 3}} | scored
    sft = lrl.SFT(config, teacher=CHECKPOINT)
    tasks = [{"i": i, "reward_model": {"ground_truth": "1"}} for i in range(5)]
    chosen, held_out = sft.prepare(tasks, None)
    assert (len(chosen), held_out) == (3, [])
    assert sft._grader is not None


def test_a_run_that_goes_on_keeps_its_config_until_the_new_one_is_checked(tmp_path: Path) -> None:
    backends = {"helper": {"kind": "openai", "url": "http://127.0.0.1:1"}}
    written = tmp_path / "config.yaml"
    written.write_text("of the run so far")
    for mode in ("auto", "disable"):
        trainer = CONFIG["trainer"] | {"resume_mode": mode}
        sft = lrl.SFT(CONFIG | {"gateway": {"backends": backends}, "trainer": trainer}, teacher="helper")
        sft.open(tmp_path)
        assert (written.read_text() == "of the run so far") == (mode == "auto")
