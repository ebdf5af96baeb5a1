"""Server, runner and trainer as commands of their own: what `Trainer.fit` starts by itself, apart."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import lightning_rl as lrl
from lightning_rl import tutorial
from lightning_rl.processes.service_keys import ADMIN_KEY, RUNNER_KEY
from lightning_rl.store.client import HttpStore

pytestmark = pytest.mark.e2e

KEYS = {ADMIN_KEY: "an-admin-key-of-the-tests", RUNNER_KEY: "a-runner-key-of-the-tests"}
AGENT = """
import random

import openai

from lightning_rl import LLM

async def solve(task: dict, llm: LLM) -> float:
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        chat = [{"role": "user", "content": task["question"]}]
        # A name that the agent was written with: it means the policy of its own run.
        answer = await client.chat.completions.create(model="gpt-4o", messages=chat)
    return len(answer.choices[0].message.content) + random.random()  # so that every group says something
"""
SCRIPT: dict[str, Any] = {
    "data": {"train_batch_size": 2, "max_response_length": 8},
    "actor_rollout_ref": {"rollout": {"n": 2}},
    "trainer": {"total_training_steps": 1, "logger": []},
}
PAGE = Path(__file__).parents[3] / "docs" / "roles-apart.md"
MODEL = str(tutorial.checkpoint())
KEYWORDS = [
    "data.train_batch_size=2", "data.max_response_length=8", "actor_rollout_ref.rollout.n=2", "trainer.save_freq=1",
]  # fmt: skip
AT = "http://127.0.0.1:8080"  # where the page has the server
WAIT_SECONDS = 120


def quick(task: dict[str, str], llm: lrl.LLM) -> float:
    """An agent without a call."""
    return float(len(task["question"]))


def command(name: str, *changed: tuple[str, str]) -> list[str]:
    """The words of a command of the page, for the tutorial's model."""
    [line] = re.findall(rf"^lightning-rl ({name} .*)$", PAGE.read_text(), re.MULTILINE)
    line = line.replace("Qwen/Qwen3-0.6B", MODEL)
    for before, after in changed:
        assert before in line
        line = line.replace(before, after)
    return line.split()


@dataclass
class Place:
    """A folder with the agent and the tasks, and the processes that were started there."""

    folder: Path
    url: str = ""

    def start(self, *words: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "lightning_rl", *words],
            cwd=self.folder,
            env=os.environ | KEYS | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def train(self, *words: str, at: str = "") -> "subprocess.Popen[str]":
        return self.start(*command("train", (AT, at or self.url)), "--json", *words)

    @property
    def store(self) -> HttpStore:
        return HttpStore(self.url, KEYS[ADMIN_KEY])


@contextlib.contextmanager
def running(place: Place, *words: str, until: str) -> Iterator[str]:
    """A command that has printed what `until` matches, for as long as the block runs."""
    process = place.start(*words)
    try:
        yield told(process, until)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_SECONDS)


def told(process: "subprocess.Popen[str]", until: str) -> str:
    """What `until` matches, once the process has printed it."""
    assert process.stdout is not None
    printed = ""
    while (found := re.search(until, printed)) is None:
        line = process.stdout.readline()
        assert line, printed
        printed += line
    return found.group(found.lastindex or 0)


@contextlib.contextmanager
def server(place: Place, *words: str) -> Iterator[str]:
    """`lightning-rl serve`; its URL."""
    serve = command("serve", ("--port 8080", "--port 0"))
    with running(place, *serve, *words, until=r" at (http://\S+)") as url:
        yield url


def runner(place: Place, url: str) -> contextlib.AbstractContextManager[str]:
    return running(place, *command("runner", (AT, url)), "--n", "4", until="Logs: ")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A server with a runner, as the page starts them."""
    made = written(tmp_path_factory.mktemp("roles"))
    with server(made) as url, runner(made, url):
        made.url = url
        yield made


def written(folder: Path) -> Place:
    (folder / "my_agent.py").write_text(AGENT)
    tasks = [{"question": f"number {i}"} for i in range(4)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return Place(folder)


def result(process: "subprocess.Popen[str]") -> Any:
    """What a `train --json` that has ended well printed."""
    printed, _ = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0, printed
    return json.loads(printed.splitlines()[-1])


def check_account(metrics: dict[str, float], rollouts: Sequence[str], store: HttpStore) -> None:
    """Law 2, and that it holds what was recorded of these rollouts."""
    excluded = sum(value for name, value in metrics.items() if name.startswith("tokens/excluded/"))
    assert metrics["tokens/pending"] == 0
    assert metrics["tokens/received"] == metrics["tokens/trained"] + excluded > 0
    counted = store.tokens_of(rollouts).values()
    assert sum(sum(each.received.values()) for each in counted) == metrics["tokens/received"]


def of_run(store: HttpStore, run_dir: str | Path) -> list[str]:
    """The ids of a run's rollouts."""
    run_id = (Path(run_dir) / "run.id").read_text()
    return [each.rollout_id for each in store.rollouts() if each.rollout_id.endswith(f".{run_id}")]


def test_three_commands_train_a_model_and_a_script_is_the_next_run(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = result(place.train(*KEYWORDS, "trainer.total_training_steps=2"))
    assert (done["steps"], done["metrics"]["training/policy_version"]) == (2, 2)
    assert Path(done["model"], "model.safetensors").exists()
    rollouts = of_run(place.store, done["run_dir"])
    assert len(rollouts) == 8
    check_account(done["metrics"], rollouts, place.store)
    assert place.store.engines() == [], "the trainer's engine is gone with it"
    assert place.store.resources().resources["main_llm"]["model"] == MODEL

    monkeypatch.setenv(ADMIN_KEY, KEYS[ADMIN_KEY])
    run_dir = place.folder / done["run_dir"]
    read_there = [place.start(*words) for words in (("explain", rollouts[0], "--run-dir", str(run_dir)),
        ("doctor", str(run_dir)), ("export", str(run_dir), "-o", "rows.jsonl", "--what", "rows"))]  # fmt: skip
    printed = [process.communicate(timeout=WAIT_SECONDS)[0] for process in read_there]
    assert [process.returncode for process in read_there] == [0, 0, 0], printed
    assert f"rollout {rollouts[0]}: succeeded, train" in printed[0]
    rows = [json.loads(line) for line in (place.folder / "rows.jsonl").read_text().splitlines()]
    assert {row["rollout_id"] for row in rows} == set(rollouts)
    assert {row["step"] for row in rows} == {1, 2}

    trainer = lrl.Trainer(store=lrl.LightningStoreClient(place.url), run_dir=place.folder / "script")
    ppo = trainer.fit(lrl.PPO(SCRIPT), [{"question": "one"}, {"question": "two"}])
    assert isinstance(ppo, lrl.PPO)
    assert ppo.step == 1
    check_account(ppo.history[-1], of_run(place.store, ppo.run_dir), place.store)


@pytest.mark.long
def test_two_runs_at_once_share_a_server_and_each_has_its_own_tokens(place: Place) -> None:
    asked = [*KEYWORDS, "trainer.total_training_steps=2"]
    started = [place.train(*asked, "--run-dir", f"twin-{n}") for n in range(2)]
    for done in [result(process) for process in started]:
        rollouts = of_run(place.store, done["run_dir"])
        assert len(rollouts) == 8
        check_account(done["metrics"], rollouts, place.store)
        models = {name for each in place.store.tokens_of(rollouts).values() for name in each.received}
        assert len(models) == 1, "the engine of the other run sampled nothing of this one"


@pytest.mark.long
def test_a_killed_trainer_leaves_the_server_as_it_was_and_its_run_is_gone_on_with(place: Place) -> None:
    process = place.train(*KEYWORDS, "trainer.total_training_steps=3", "--run-dir", "killed")
    step = place.folder / "killed" / "checkpoints" / "step-1"
    wait_until(step.exists)
    process.kill()
    process.communicate()
    time.sleep(6)  # in which attempts without an engine would fail again and again
    shutil.copytree(place.folder / "killed", place.folder / "copy", ignore=shutil.ignore_patterns("run.lock"))
    done = result(place.start("train", "--json", "--server", place.url, "--resume", "killed"))
    assert done["steps"] == 3
    copy = place.start("train", "--server", place.url, "--resume", "copy")
    printed, _ = copy.communicate(timeout=WAIT_SECONDS)
    assert copy.returncode == 1
    assert "has gone on at this server from another copy of its folder" in printed
    assert done["metrics"]["training/policy_version"] == 3, "no rollout was used up while nobody could sample it"
    excluded = sum(value for name, value in done["metrics"].items() if name.startswith("tokens/excluded/"))
    assert done["metrics"]["tokens/received"] == done["metrics"]["tokens/trained"] + excluded
    assert place.store.engines() == []


@pytest.mark.long
def test_a_run_at_two_gateways_over_postgresql(tmp_path: Path, postgres_url: str) -> None:
    place = written(tmp_path)
    with (
        server(place, "--store", postgres_url, "--run-dir", "one") as first,
        server(place, "--store", postgres_url, "--run-dir", "two") as second,
        runner(place, second),
    ):
        place.url = first
        done = result(place.train(*KEYWORDS, "trainer.total_training_steps=2", "trainer.schedule=async"))
        rollouts = of_run(place.store, done["run_dir"])
        check_account(done["metrics"], rollouts, place.store)
        stores = [HttpStore(url, KEYS[ADMIN_KEY]) for url in (first, second)]
        models = [next(iter(store.state()["models"].values())) for store in stores]
        received = [model["tokens_received"] for model in models]
        assert sum(received) == done["metrics"]["tokens/received"]
        assert min(received) > 0, "both gateways had attempts"
        assert [model["policy_version"] for model in models] == [2, 2]
        assert [store.engines() for store in stores] == [[], []]


@pytest.mark.long
def test_a_run_outlives_its_server_where_that_is_started_anew(tmp_path: Path) -> None:
    place = written(tmp_path)
    serve = command("serve", ("--port 8080", "--port 0"))
    asked = [*KEYWORDS, "trainer.total_training_steps=4", "--run-dir", "run"]
    with contextlib.ExitStack() as more:
        killed = place.start(*serve, "--run-dir", "one")
        more.callback(killed.wait)
        more.callback(killed.kill)
        place.url = told(killed, r" at (http://\S+)")
        runner = command("runner", (AT, place.url))
        more.enter_context(running(place, *runner, "--n", "8", until="Logs: "))
        process = place.train(*asked)
        wait_until((place.folder / "run" / "checkpoints" / "step-1").exists)
        killed.kill()
        killed.wait()
        again = command("serve", ("--port 8080", f"--port {place.url.rpartition(':')[2]}"))
        more.enter_context(running(place, *again, "--run-dir", "one", until=r" at (http://\S+)"))
        done = result(process)
        account = done["metrics"]
        assert (done["steps"], account["training/policy_version"], account["tokens/pending"]) == (4, 4, 0)
        excluded = sum(value for name, value in account.items() if name.startswith("tokens/excluded/"))
        assert account["tokens/received"] == account["tokens/trained"] + excluded > 0


@pytest.mark.long
def test_a_run_at_two_servers_outlives_one_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = written(tmp_path)
    serve = command("serve", ("--port 8080", "--port 0"), ("sqlite:///run.db", "sqlite:///two.db"))
    asked = [*KEYWORDS, "trainer.total_training_steps=8", "trainer.schedule=async", "--run-dir", "run"]
    with server(place, "--run-dir", "one") as first, contextlib.ExitStack() as more:
        killed = place.start(*serve, "--run-dir", "two")
        more.callback(killed.wait)
        more.callback(killed.kill)
        place.url, second = first, told(killed, r" at (http://\S+)")
        both = command("runner", (f"--store {AT}", f"--store {first} --store {second}"))
        more.enter_context(running(place, *both, "--n", "8", until="Logs: "))
        process = place.train("--server", second, *asked)
        wait_until((place.folder / "run" / "checkpoints" / "step-2").exists)
        killed.kill()
        done = result(process)
        account = done["metrics"]
        assert (done["steps"], account["training/policy_version"], account["tokens/pending"]) == (8, 8, 0)
        excluded = sum(value for name, value in account.items() if name.startswith("tokens/excluded/"))
        assert account["tokens/received"] == account["tokens/trained"] + excluded > 0
        monkeypatch.setenv(ADMIN_KEY, KEYS[ADMIN_KEY])
        doctor = place.start("doctor", "run")
        assert f"http://{second.partition('//')[2]}" in doctor.communicate(timeout=WAIT_SECONDS)[0], (
            "half of it is there"
        )
        again = command("serve", ("--port 8080", f"--port {second.rpartition(':')[2]}"), ("run.db", "two.db"))
        more.enter_context(running(place, *again, "--run-dir", "two", until=r" at (http://\S+)"))
        export = place.start("export", "run", "-o", "rows.jsonl", "--what", "rows")
        assert export.wait(WAIT_SECONDS) == 0, export.communicate()
        rows = [json.loads(line) for line in (place.folder / "rows.jsonl").read_text().splitlines()]
        trained = [(row["step"], row["rollout_id"]) for row in rows if row["step"] is not None]
        assert len(trained) == len(set(trained)) == 8 * 4

        monkeypatch.setenv(RUNNER_KEY, KEYS[RUNNER_KEY])
        trainer = lrl.Trainer(quick, server=[first, second], n_runners=2, run_dir=tmp_path / "script")
        ppo = trainer.fit(lrl.PPO(SCRIPT), [{"question": "one"}, {"question": "two"}])
        assert isinstance(ppo, lrl.PPO)
        assert ppo.step == 1
        assert [(tmp_path / "script" / f"runners-{n}" / "runner-0.log").exists() for n in range(2)] == [True, True]


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)
