"""`lightning-rl runner` as a person types it: it joins, waits, gives back, and refuses in one line."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import lightning_rl as lrl
from lightning_rl import tutorial
from lightning_rl.algorithms.base import Algorithm, Endpoint
from lightning_rl.control_plane.launch import launch
from lightning_rl.processes.service_keys import RUNNER_KEY
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import RolloutRequest

KEY = "a-runner-key-of-more-than-16-characters"
AGENT = """
import time
def solve(task, llm):
    print("solving", task)
    if task == "long":
        time.sleep(1e6)
    return float(llm.base_url.startswith(task)) if task.startswith("http") else 1.0
"""
NOWHERE = [{"model": "policy", "kind": "embedded", "url": "http://127.0.0.1:9"}]
WAIT_SECONDS = 120


policy_of = partial(Endpoint, model="policy", tokenizer=str(tutorial.checkpoint()), renderer="qwen3", engines=NOWHERE)


@contextlib.contextmanager
def serving(folder: Path, **where: Any) -> Iterator[HttpStore]:
    """A server whose runners come from elsewhere; its store with the admin key, and its URL."""
    folder.mkdir()
    with launch(folder, policy_of(), admin_key="admin", runner_key=KEY, **where) as server:
        store = HttpStore(server.url, "admin")
        store.url = server.url  # type: ignore[attr-defined]
        yield store


@contextlib.contextmanager
def runner(
    folder: Path, url: str, *words: str, key: str | None = KEY, before: Sequence[str] = ()
) -> Iterator["subprocess.Popen[str]"]:
    """The command, in a folder that has the agent; ended by force at the end of the block."""
    (folder / "my_agent.py").write_text(AGENT)
    environment = {name: value for name, value in os.environ.items() if name != RUNNER_KEY}
    command = [sys.executable, "-m", "lightning_rl", "runner", "--store", url, "--n", "2", *words]
    child = subprocess.Popen(
        [*before, *command],
        cwd=folder,
        env=environment | ({} if key is None else {RUNNER_KEY: key}) | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
        child.communicate(timeout=60)


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpStore]:
    with serving(tmp_path_factory.mktemp("module") / "server") as store:
        yield store


@pytest.mark.parametrize("isolation", [pytest.param("thread", marks=pytest.mark.long), "process"])
def test_it_joins_and_gives_back_what_runs_when_it_is_interrupted(
    store: HttpStore, tmp_path: Path, isolation: str
) -> None:
    url = store.url  # type: ignore[attr-defined]
    with runner(tmp_path, url, "--agent", "my_agent:solve", "--isolation", isolation) as command:
        short, long = store.enqueue([RolloutRequest(task=task) for task in ("short", "long")])
        until(lambda: store.rollout(short.rollout_id).status == "succeeded")
        until(lambda: store.rollout(long.rollout_id).status == "running")
        assert KEY.encode() not in Path(f"/proc/{command.pid}/environ").read_bytes()
        command.send_signal(signal.SIGINT)
        out, errors = command.communicate(timeout=60)
    assert (command.returncode, errors) == (130, "")
    assert "Runs my_agent:solve for http://127.0.0.1" in out
    assert "given back" in out
    given_back = store.rollout(long.rollout_id)
    assert (given_back.status, given_back.attempts[0].error.type) == ("queued", "RunnerStopped")
    store.cancel(long.rollout_id)
    attempt_id = store.rollout(short.rollout_id).attempts[0].attempt_id
    assert store.log(short.rollout_id, attempt_id).stdout == "solving short\n"
    assert "solving short" in "".join(path.read_text() for path in (tmp_path / "runner-logs").glob("runner-*.log"))


def test_a_runner_for_one_rollout_takes_one_and_ends(store: HttpStore, tmp_path: Path) -> None:
    rollouts = store.enqueue([RolloutRequest(task="short"), RolloutRequest(task="short")])
    url = store.url  # type: ignore[attr-defined]
    with runner(tmp_path, url, "--agent", "my_agent:solve", "--max-rollouts", "1") as command:
        out, errors = command.communicate(timeout=WAIT_SECONDS)
    assert (command.returncode, errors) == (0, "")
    assert "Done: rollouts that ended here: 1." in out
    assert sorted(store.rollout(each.rollout_id).status for each in rollouts) == ["queued", "succeeded"]
    for each in rollouts:
        store.cancel(each.rollout_id)


@pytest.mark.long
@pytest.mark.e2e
def test_it_waits_for_a_server_that_is_away(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with runner(tmp_path, f"http://127.0.0.1:{port}", "--agent", "my_agent.py:solve") as command:
        assert command.stdout is not None
        assert command.stdout.readline().startswith(f"Waiting for http://127.0.0.1:{port}")
        for number in range(2):  # it is there, and there again
            with serving(tmp_path / str(number), port=port) as store:
                [rollout] = store.enqueue([RolloutRequest(task="short")])
                until(lambda: store.rollout(rollout.rollout_id).status == "succeeded")  # noqa: B023


@pytest.mark.parametrize(
    ("words", "key", "told"),
    [
        (["--agent", "my_agent:solve"], "another key", "refuses the key in LIGHTNING_RL_RUNNER_KEY"),
        (["--agent", "my_agent:solve"], None, "set LIGHTNING_RL_RUNNER_KEY"),
        (["--agent", "my_agent:solv"], KEY, "did you mean 'solve'?"),
        (["--agent", "nowhere:solve"], KEY, "there is no module 'nowhere'"),
        (["--agent", "json:__all__"], KEY, "agent 'json:__all__': an agent is a function"),
        (["--agent", "my_agent:solve", "--store", "trainer:80"], KEY, "is no URL"),
        (["--agent", "my_agent:solve", "--store", "http://a", "--n", "1"], KEY, "--n 1 is shared by 2 servers"),
        (
            ["--agent", "my_agent:solve", "--store", "http://a", "--max-rollouts", "1"],
            KEY,
            "--max-rollouts goes with one",
        ),
        (
            ["--agent", "my_agent:solve", "--log-dir", "my_agent.py"],
            KEY,
            "--log-dir my_agent.py cannot be made: File exists",
        ),
    ],
)
def test_what_its_user_can_put_right_ends_it_with_one_line(
    store: HttpStore, tmp_path: Path, words: list[str], key: str | None, told: str
) -> None:
    with runner(tmp_path, store.url, *words, key=key) as command:  # type: ignore[attr-defined]
        out, errors = command.communicate(timeout=60)
    assert command.returncode == 1
    assert errors.startswith("error: ")
    assert told in errors
    assert "Traceback" not in out + errors


class Asks(Algorithm):
    """Asks for rollouts, and trains nothing."""

    def __init__(self) -> None:
        self.rewards: list[float | None] = []

    def open(self, run_dir: Path) -> Endpoint:
        return Endpoint(model="policy", tokenizer=str(tutorial.checkpoint()), renderer="qwen3", engines=list(NOWHERE))

    def run(self, train_dataset: Any, val_dataset: Any) -> None:
        requests = [RolloutRequest(task=task, rollout_id=f"r{n}") for n, task in enumerate(train_dataset)]
        self.rewards = self.finished(requests, lambda trace: trace.rollout.reward)


@pytest.mark.smoke
@pytest.mark.e2e
def test_all_rollouts_of_a_trainer_may_run_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNNER_KEY, KEY)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    asks, url = Asks(), f"http://localhost:{port}"  # the URL that agents get is the one that was given
    trainer = lrl.Trainer(lambda task, llm: -1.0, n_runners=0, run_dir=tmp_path / "run", port=port, url=url)
    fitting = threading.Thread(target=trainer.fit, args=(asks, [url] * 3), daemon=True)
    fitting.start()
    with runner(tmp_path, url, "--agent", "my_agent:solve"):
        fitting.join(WAIT_SECONDS)
    assert asks.rewards == [1.0] * 3
    assert not list((tmp_path / "run").glob("runner-*.log"))


def test_a_trainer_that_others_can_reach_needs_a_runner_key_and_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUNNER_KEY, raising=False)
    with pytest.raises(ValueError, match=RUNNER_KEY):
        lrl.Trainer(lambda task: 1.0, host="0.0.0.0", url="http://here:1")
    with pytest.raises(ValueError, match="n_runners is 0"):
        lrl.Trainer(lambda task: 1.0, n_runners=0)
    monkeypatch.setenv(RUNNER_KEY, KEY)
    with pytest.raises(ValueError, match="give url"):
        lrl.Trainer(lambda task: 1.0, host="0.0.0.0")
    lrl.Trainer(lambda task: 1.0, host="0.0.0.0", url="http://here:1", n_runners=0)


@pytest.fixture
def two_machines() -> Iterator[tuple[str, list[str]]]:
    """Two network namespaces with a cable between them: the address of this one there, and how to run in the other."""
    name = f"lrl{os.getpid() % 10_000}"
    inside = ["ip", "netns", "exec", name]
    steps = [
        ["ip", "netns", "add", name],
        ["ip", "link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name],
        ["ip", "address", "add", "10.203.77.1/30", "dev", f"{name}a"],
        ["ip", "link", "set", f"{name}a", "up"],
        [*inside, "ip", "address", "add", "10.203.77.2/30", "dev", f"{name}b"],
        [*inside, "ip", "link", "set", f"{name}b", "up"],
    ]
    try:
        for step in steps:
            try:
                subprocess.run(step, check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"no network namespaces here: {error}")
        yield "10.203.77.1", inside
    finally:
        with contextlib.suppress(OSError):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@pytest.mark.e2e
def test_it_joins_from_another_machine(tmp_path: Path, two_machines: tuple[str, list[str]]) -> None:
    host, there = two_machines
    with serving(tmp_path / "server", host=host) as store:
        url = store.url  # type: ignore[attr-defined]
        assert url.startswith(f"http://{host}:")
        [rollout] = store.enqueue([RolloutRequest(task=url)])
        with runner(tmp_path, url, "--agent", "my_agent:solve", before=there):
            until(lambda: store.rollout(rollout.rollout_id).status == "succeeded")
        assert store.rollout(rollout.rollout_id).reward == 1.0
