"""Baseline and dev through the real parts: they run the agent, say what came of it, and train nothing."""

import json
import threading
from collections import UserList
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest

import lightning_rl as lrl
from lightning_rl.algorithms.baseline import _keep_tokenizer
from lightning_rl.algorithms.evaluation import wilson
from lightning_rl.data.dataset import TaskError
from lightning_rl.inspect.folder import tokenizer_folder
from lightning_rl.rewards import FinishedRollout
from lightning_rl.sft import examples
from lightning_rl.telemetry import made_with
from lightning_rl.tutorial import checkpoint
from lightning_rl_proxy.rendering.load import FILES, load_renderer
from tests.lightning_rl.ppo.agents import plan_and_execute, says_something

pytestmark = pytest.mark.e2e


@lrl.rollout
async def agent(task: dict[str, Any], llm: lrl.LLM) -> float | None:
    """Task 2 raises before its call; the others are right when their number is odd."""
    if task["i"] == 2:
        raise RuntimeError("this agent has a bug")
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        chat: Any = [{"role": "user", "content": f"number {task['i']}"}]
        first = await client.chat.completions.create(model=llm.model, messages=chat, max_tokens=4)
        chat += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "so"}]
        await client.chat.completions.create(model=llm.model, messages=chat, max_tokens=4)
    return float(task["i"] % 2)


class Classic(lrl.Agent):
    """The class form, sync: it resolves its LLM by hand."""

    def training_rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        raise AssertionError("an evaluation is no training")

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        llm = resources["main_llm"].resolve(rollout)
        with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
            chat: Any = [{"role": "user", "content": f"number {task['i']}"}]
            client.chat.completions.create(model=llm.model, messages=chat, max_tokens=4)
        return float(task["i"] % 2)


TASKS = [{"i": i} for i in range(6)]


def test_a_baseline_is_an_accuracy_with_its_confidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baseline = lrl.Baseline(n=1)
    lrl.Trainer(agent, n_runners=4, run_dir=tmp_path).fit(baseline, TASKS, TASKS[:2])
    assert len(made_with.sessions(tmp_path)) == 1
    train, val = baseline.evaluations
    assert (train.mean, train.failed, train.without_calls) == (0.5, 1, 1)
    assert (train.low, train.high) == wilson(3, 6)
    assert (val.mean, val.tasks) == (0.5, 2)
    assert "train: accuracy 0.500, 95 % confidence" in capsys.readouterr().out
    assert json.loads((tmp_path / "evaluations.json").read_text())[0]["mean"] == 0.5
    assert not (tmp_path / "checkpoints").exists()
    # A policy with this tokenizer learns from its ids as they are.
    sft = lrl.SFT({"sft": {"mode": "val"}}, traces=tmp_path)
    learned = examples.load(sft.config, sft.sources, load_renderer(checkpoint(), "auto", "student"))
    assert learned.trained
    assert set(learned.calls) == {"as_sampled"}


def test_one_model_plays_every_part_of_an_agent_that_asks_several(tmp_path: Path) -> None:
    trainer = lrl.Trainer(plan_and_execute, n_runners=2, run_dir=tmp_path)
    dev = trainer.dev([0, 1], n_tasks=2)
    calls = [[node.call for node in one.forest.nodes.values()] for one in dev.trajectories]
    assert [[call.agent for call in of_one] for of_one in calls] == [["planner", "executor"]] * 2
    assert len({call.model for of_one in calls for call in of_one}) == 1


@pytest.mark.long
def test_a_reward_function_judges_what_agents_do_not(tmp_path: Path) -> None:
    seen: list[str] = []

    def longer(rollouts: Sequence[FinishedRollout]) -> list[float]:
        seen.extend(rollout.answer for rollout in rollouts)
        return [0.25] * len(rollouts)

    baseline = lrl.Baseline(n=2, reward=longer)
    lrl.Trainer(says_something, n_runners=4, run_dir=tmp_path).fit(baseline, [{"n": 1}, {"n": 2}])
    [evaluation] = baseline.evaluations
    assert (evaluation.mean, evaluation.rollouts, evaluation.failed) == (0.25, 4, 0)
    assert len(seen) == 4
    assert all(seen)


@pytest.mark.long
@pytest.mark.parametrize("form", [Classic, Classic()])
def test_an_agent_may_be_a_class(form: Any, tmp_path: Path) -> None:
    baseline = lrl.Baseline()
    lrl.Trainer(form, n_runners=2, run_dir=tmp_path).fit(baseline, TASKS[:4])
    assert (baseline.evaluations[0].mean, baseline.evaluations[0].failed) == (0.5, 0)


@pytest.mark.long
def test_what_was_evaluated_is_not_run_again(tmp_path: Path) -> None:
    first, again = lrl.Baseline(n=2), lrl.Baseline(n=2, resume=True)
    lrl.Trainer(agent, n_runners=4, run_dir=tmp_path).fit(first, TASKS)

    @lrl.rollout
    def never(task: Any) -> float:
        raise AssertionError("it ran again")

    for _ in range(2):
        lrl.Trainer(never, n_runners=4, run_dir=tmp_path).fit(again, TASKS)
        assert again.evaluations == first.evaluations
    assert first.evaluations[0].rollouts == 12
    other = lrl.Baseline(n=2, resume=True, sampling_parameters={"temperature": 0.5})
    lrl.Trainer(never, n_runners=4, run_dir=tmp_path).fit(other, TASKS)
    assert other.evaluations[0].failed == 12, "another sampling is another evaluation"


def test_dev_lays_calls_triplets_and_rows_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    dev = lrl.Trainer(agent).dev(TASKS[1:], n_tasks=2)
    printed = capsys.readouterr().out
    assert "model: the tutorial's" in printed
    assert "call 2, continues call 1: finish reason" in printed
    assert "user  number 1" in printed
    assert "reward  1" in printed
    assert "RuntimeError: this agent has a bug" in printed
    [right, wrong] = dev.trajectories
    [row] = right.rows
    assert f"row 1: {len(row.token_ids)} tokens, {sum(row.loss_mask)} to be trained, exact: true" in printed
    assert (wrong.agent_failed, wrong.rows) == (True, [])
    assert len(list((tmp_path / "runs").iterdir())) == 1


class Service(BaseHTTPRequestHandler):
    """A chat service that gives no token ids: it answers with the length of the conversation."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        known = self.headers["authorization"] == "Bearer right" and self.path == "/v1/chat/completions"
        message = {"role": "assistant", "content": f"answer {len(asked['messages'])} of {asked['model']}"}
        answer = {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": "theirs-2024",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8},
        }
        body = json.dumps(answer if known else {"error": {"message": "no such key"}}).encode()
        self.send_response(200 if known else 401)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


@pytest.mark.long
def test_dev_on_a_service_without_token_ids_says_that_rows_are_not_exact(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    dev = lrl.Trainer(agent).dev(TASKS[1:2], model="theirs", base_url=service, api_key="right")
    printed = capsys.readouterr().out
    assert "assistant  answer 1 of theirs" in printed
    assert "assistant  answer 3 of theirs" in printed
    assert "call 2, continues call 1" in printed
    assert "exact: false, left out: inexact" in printed
    [trajectory] = dev.trajectories
    assert [(row.exact, row.excluded) for row in trajectory.rows] == [(False, "inexact")]


@pytest.mark.smoke
def test_a_baseline_of_a_service(service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "right")
    baseline = lrl.Baseline("theirs", base_url=service)
    lrl.Trainer(agent, n_runners=4, run_dir=tmp_path).fit(baseline, TASKS)
    assert (baseline.evaluations[0].mean, baseline.evaluations[0].failed) == (0.5, 1)
    assert b"right" not in b"".join(file.read_bytes() for file in tmp_path.iterdir() if file.is_file())


@pytest.mark.long
def test_a_baseline_by_litellm(service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "right")
    monkeypatch.setenv("OPENAI_BASE_URL", service)
    baseline = lrl.Baseline("openai/theirs", chat_backend="litellm")
    lrl.Trainer(agent, n_runners=4, run_dir=tmp_path).fit(baseline, TASKS)
    assert (baseline.evaluations[0].mean, baseline.evaluations[0].failed) == (0.5, 1)


@pytest.mark.long
def test_a_wrong_key_of_a_service_is_told(service: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    baseline = lrl.Baseline("theirs", base_url=service, api_key="wrong")
    lrl.Trainer(agent, n_runners=4, run_dir=tmp_path).fit(baseline, TASKS[:2])
    told = "\n".join(record.getMessage() for record in caplog.records)
    assert "401" in told
    assert "no such key" in told
    assert "check the api_key" in told


def test_dev_without_tasks_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="the dataset is empty; Dev needs tasks"):
        lrl.Trainer(agent).dev([])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"base_url": "http://127.0.0.1:1/v1"}, "name the model"),
        ({"model": "m", "base_url": "http://127.0.0.1:1/v1", "chat_backend": "litellm"}, "not both"),
        ({"n": 0}, "at least one"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lrl.Baseline(**arguments)


@pytest.mark.parametrize(
    "value",
    [pytest.param(object(), marks=pytest.mark.long), float("nan"), pytest.param({1, 2}, marks=pytest.mark.long)],
)
def test_a_task_that_is_no_json_value_is_named(value: Any, tmp_path: Path) -> None:
    tasks = [{"i": 0}, {"i": value}]
    with pytest.raises(TaskError, match=r"task 1 of train_dataset is no JSON value .* make it of dicts"):
        lrl.Trainer(agent, run_dir=tmp_path / "run").fit(lrl.Baseline(), tasks)
    assert not (tmp_path / "run").exists()
    with pytest.raises(TaskError, match=r"the task of rollout train-[0-9a-f]+-1-0\.[0-9a-f]+ is no JSON value"):
        lrl.Trainer(agent, run_dir=tmp_path / "run").fit(lrl.Baseline(), UserList(tasks))  # read as they are needed


@pytest.mark.parametrize("given", [TASKS, lrl.Baseline, agent])
def test_fit_takes_an_algorithm_first(given: Any) -> None:
    with pytest.raises(TypeError, match=r"fit takes an algorithm first, as in fit\(lrl.PPO\(config\), tasks\)"):
        lrl.Trainer(agent).fit(given, TASKS)


def test_a_folder_of_models_with_several_tokenizers_says_of_none_that_it_is_its_own(tmp_path: Path) -> None:
    one, other, run = (tmp_path / name for name in ("one", "other", "run"))
    for folder in (one, other, run):
        folder.mkdir()
        (folder / "tokenizer.json").write_text(folder.name)
    for file in FILES[1:]:  # its calls can be rendered again, too
        (one / file).write_text(file)
    _keep_tokenizer(one, run, first=True)
    kept = run / "tokenizer"
    assert {file.name for file in kept.iterdir()} == set(FILES)
    assert tokenizer_folder(run, None) == kept
    assert (kept / "tokenizer.json").read_text() == "one"
    (one / "generation_config.json").write_text("{}")  # tells no tokenizers apart
    _keep_tokenizer(one, run, first=False)
    assert tokenizer_folder(run, None) == kept
    for later in (other, one):
        _keep_tokenizer(later, run, first=False)
        assert tokenizer_folder(run, None) is None
