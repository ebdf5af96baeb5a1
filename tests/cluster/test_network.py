"""Runners on other machines: a partition, and a machine that is gone, are survived, and nothing is lost or double."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_rl import tutorial
from lightning_rl.processes.service_keys import ADMIN_KEY, RUNNER_KEY
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import RolloutConfig, RolloutRequest, RolloutTrace
from lightning_rl_adapters.call import calls_of
from tests.cluster.machines import Machines, machines

pytestmark = pytest.mark.cluster
WAIT_SECONDS = 120
LEASE_SECONDS = 6
AT_ONCE = 2  # rollouts of a runner
KEYS = {ADMIN_KEY: "an-admin-key-of-more-than-16-characters", RUNNER_KEY: "a-runner-key-of-more-than-16-characters"}
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
ENGINE = Path(__file__).parents[1] / "chaos/engine.py"
AGENT = """
import os, secrets, time
from pathlib import Path

import openai

def solve(task, llm):
    client = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key, timeout=20, max_retries=1)
    chat = [{"role": "user", "content": task["question"]}]
    first = client.chat.completions.create(model=llm.model, messages=chat, max_tokens=8)
    wave = Path(task["wave"])
    (wave / f"{os.environ['PLACE']}-{secrets.token_hex(4)}").touch()
    while not (wave / "go").exists():
        time.sleep(0.1)
    chat += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "and"}]
    client.chat.completions.create(model=llm.model, messages=chat, max_tokens=8)
    return 1.0
"""


@dataclass
class Stage:
    """A server on one machine, and runners on two others."""

    machines: Machines
    store: HttpStore
    folder: Path

    def ask(self, what: Callable[[], Any]) -> Any:
        return self.machines.on_first(what)

    def enqueue(self, wave: str, number: int) -> list[str]:
        folder = self.folder / wave
        folder.mkdir()
        config = RolloutConfig(unresponsive_seconds=LEASE_SECONDS, max_attempts=10)
        requests = [
            RolloutRequest(task={"question": f"number {each}", "wave": str(folder)}, config=config)
            for each in range(number)
        ]
        return [rollout.rollout_id for rollout in self.ask(lambda: self.store.enqueue(requests))]

    def until(self, true: Callable[[], Any]) -> None:
        end = time.monotonic() + WAIT_SECONDS
        while not true():
            assert time.monotonic() < end, "it did not come\n" + self.logs()
            time.sleep(0.1)

    def begun(self, wave: str, place: str) -> int:
        return len(list((self.folder / wave).glob(f"{place}-*")))

    def go(self, wave: str) -> None:
        (self.folder / wave / "go").touch()

    def traces(self, ids: list[str]) -> dict[str, RolloutTrace]:
        return dict(self.ask(lambda: self.store.traces(ids)))

    def lost(self, ids: list[str]) -> int:
        """Attempts whose leases ran out."""
        return sum(
            each.attempt.error is not None and each.attempt.error.type == "LeaseExpired"
            for trace in self.traces(ids).values()
            for each in trace.attempts
        )

    def ended(self, ids: list[str]) -> bool:
        return all(trace.rollout.ended_at is not None for trace in self.traces(ids).values())

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def logs(self) -> str:
        logs = sorted(self.folder.rglob("*.log"))
        return "\n".join(f"== {path}\n{path.read_text(errors='replace')[-3000:]}" for path in logs)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    (tmp_path / "my_agent.py").write_text(AGENT)
    model, python = str(tutorial.checkpoint()), sys.executable
    with machines("server", "a", "b") as made:
        url = f"http://{made.address}:8080"
        store = HttpStore(url, KEYS[ADMIN_KEY], patience_seconds=WAIT_SECONDS)
        stage = Stage(made, store, tmp_path)
        engine = f"{ENGINE} --model {model} --port 9000 --max-model-len 256"
        made.start("server", [python, *engine.split()], tmp_path, UNBUFFERED)
        serve = f"-m lightning_rl serve --host {made.address} --port 8080 --model policy --tokenizer {model}"
        serve += " --renderer qwen3 --engine embedded=http://127.0.0.1:9000"
        made.start("server", [python, *serve.split()], tmp_path, KEYS | UNBUFFERED)
        stage.until(lambda: "serving" in stage.said("server") and "Ctrl-C ends it" in stage.said("server"))
        for place in ("a", "b"):
            join = (
                f"-m lightning_rl runner --store {url} --agent my_agent.py:solve --n {AT_ONCE} --log-dir logs-{place}"
            )
            given = {RUNNER_KEY: KEYS[RUNNER_KEY], "PLACE": place, **UNBUFFERED}
            made.start(place, [python, *join.split()], tmp_path, given)
        yield stage


def check(traces: dict[str, RolloutTrace]) -> Counter[str]:
    """Every rollout has ended once, by its last attempt, with both calls; how its attempts ended."""
    ended: Counter[str] = Counter()
    for trace in traces.values():
        statuses = [each.attempt.status for each in trace.attempts]
        ended.update(statuses)
        assert trace.rollout.status == "succeeded"
        assert trace.rollout.reward == 1.0
        assert statuses.count("succeeded") == 1
        assert statuses[-1] == "succeeded"
        assert trace.rollout.counting_attempt_id == trace.attempts[-1].attempt.attempt_id
        assert len(calls_of(trace.attempts[-1].spans)) == 2
    return ended


@pytest.mark.long
def test_a_partition_and_then_a_machine_that_is_gone_cost_retries_and_nothing_else(stage: Stage) -> None:
    first = stage.enqueue("first", 3 * AT_ONCE)
    stage.until(lambda: stage.begun("first", "a") == stage.begun("first", "b") == AT_ONCE)
    stage.machines.cut("a")
    stage.until(lambda: stage.lost(first) >= AT_ONCE)
    stage.go("first")  # on both sides, so that `a` has results that nobody wants any more
    stage.until(lambda: stage.ended(first))
    assert stage.begun("first", "a") == AT_ONCE, "what it had was run again on the other side"
    assert check(stage.traces(first))["lost"] >= AT_ONCE

    second = stage.enqueue("second", 3 * AT_ONCE)
    stage.until(lambda: stage.begun("second", "b") == AT_ONCE)
    assert stage.begun("second", "a") == 0
    stage.machines.mend("a")
    stage.until(lambda: stage.begun("second", "a") == AT_ONCE)  # it has come back by itself
    assert stage.machines.kill("b") >= 2
    stage.until(lambda: stage.lost(second) >= AT_ONCE)
    stage.go("second")
    stage.until(lambda: stage.ended(second))
    assert check(stage.traces(second))["lost"] >= AT_ONCE
    assert check(stage.traces(first)), "what came late from the other side of the partition changed nothing"
    dropped = (stage.folder / "logs-a/runner-0.log").read_text() + (stage.folder / "logs-a/runner-1.log").read_text()
    assert "lost rollout" in dropped
