"""Kills with SIGKILL, by a seed: which process of a training run, after how much of the run, how often; and what must
be true of the run in the end.

How far a run is, is counted in what it has left on the disk (attempts that began and ended, step records, checkpoints),
so that a seed kills at the same place on a slow machine and on a fast one, give or take a fraction of a second.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from lightning_rl.store.contract import RolloutTrace
from lightning_rl.store.sql import SqlStore
from lightning_rl.telemetry.metrics import jsonl
from lightning_rl.trajectories import step_record
from lightning_rl_adapters.call import calls_of

# The gateway and the store are one process of a run, the server. `machine` is all of them at once.
VICTIMS = ("runner", "server", "engine", "trainer", "machine")
STEPS, TASKS, GROUP = 4, 2, 2
ROLLOUTS = STEPS * TASKS * GROUP
EVENTS = 2 * ROLLOUTS + 2 * STEPS
MOST_KILLS = 3
_ROOT = Path(__file__).parents[2]
_PATIENCE_SECONDS = 200.0  # of a step of a run on a busy machine
_WORDS = {
    "server": "lightning_rl.control_plane.process",
    "runner": "lightning_rl.runner.process",
    "engine": "vllm.entrypoints.openai.api_server",
}
_AGENT = """
import time

import openai

from lightning_rl import LLM

def solve(task: dict, llm: LLM) -> float:
    client = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key)
    chat = [{"role": "user", "content": task["question"]}]
    first = client.chat.completions.create(model=llm.model, messages=chat)
    time.sleep(0.1)
    chat += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "and"}]
    second = client.chat.completions.create(model=llm.model, messages=chat)
    return float(len(second.choices[0].message.content) % 2)
"""


@dataclass(frozen=True)
class Kill:
    """`victim` dies `later` seconds after the run has left `events` on the disk."""

    victim: str
    events: int
    later: float


def kills(seed: int) -> list[Kill]:
    """Who is killed and when: the first victim goes round with the seed, so that a few seeds have every kind."""
    drawn = random.Random(seed)
    victims = [VICTIMS[seed % len(VICTIMS)], *drawn.choices(VICTIMS, k=drawn.randrange(MOST_KILLS))]
    drawn.shuffle(victims)
    moments = sorted(drawn.randrange(EVENTS) for _ in victims)
    return [Kill(*kill, drawn.uniform(0, 0.4)) for kill in zip(victims, moments, strict=True)]


class Training:
    """A small training run in `folder`, in processes of its own. `engine`: sampled in a process of its own, too."""

    def __init__(self, folder: Path, *, engine: bool = False, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.begun = 0
        self.told = ""
        self._engine = engine
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(exist_ok=True)
        (folder / "my_agent.py").write_text(_AGENT)
        tasks = [json.dumps({"question": f"number {i}"}) + "\n" for i in range(4)]
        (folder / "tasks.jsonl").write_text("".join(tasks))
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {_ROOT / "tests/chaos/engine.py"} "$@"\n')
        python.chmod(python.stat().st_mode | stat.S_IXUSR)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def done(self) -> bool:
        return self._process is not None and self._process.poll() == 0

    def begin(self) -> None:
        """Start it, or go on with it."""
        self.begun += 1
        with (self.folder / "out.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(), cwd=self.folder, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )

    def until(self, events: int) -> None:
        """Run on until so much has happened, or to the end. Raises AssertionError where nothing happens any more."""
        last, seen = time.monotonic() + _PATIENCE_SECONDS, self.events
        while not self.done and self.events < events:
            if not self.runs:
                self.begin()
            if seen != self.events:
                last, seen = time.monotonic() + _PATIENCE_SECONDS, self.events
            assert time.monotonic() < last, f"nothing happened after {seen} events\n{self.log()}"
            time.sleep(0.02)

    def finish(self) -> None:
        """Go on with it as often as it takes."""
        for _ in range(4):
            if not self.runs and not self.done:
                self.begin()
            assert self._process is not None
            self._process.wait(_PATIENCE_SECONDS)
            if self.done:
                return
        raise AssertionError(f"it does not come to its end\n{self.log()}")

    def processes(self, victim: str) -> list[psutil.Process]:
        """Those of its processes that are `victim`."""
        if not self.runs:
            return []
        trainer = psutil.Process(self.pid)
        if victim == "trainer":
            return [trainer]
        children = trainer.children(recursive=True)
        return [*children, trainer] if victim == "machine" else [c for c in children if _WORDS[victim] in _words(c)]

    def kill(self, victim: str) -> bool:
        """Whether there was one to kill."""
        with contextlib.suppress(psutil.NoSuchProcess):
            victims = self.processes(victim)
            for process in victims:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if victim in ("trainer", "machine") and victims:
                assert self._process is not None
                self._process.wait(_PATIENCE_SECONDS)
            return bool(victims)
        return False

    def stop(self) -> None:
        """Leave no process behind."""
        self.kill("machine")

    def log(self) -> str:
        """What went wrong, as far as it was told."""
        logs = sorted([self.folder / "out.log", *self.run_dir.glob("*.log")])
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in logs if path.exists()
        )

    @property
    def events(self) -> int:
        """What it has left on the disk."""
        steps = len(list((self.run_dir / step_record.FOLDER).glob("*.msgpack")))
        return steps + len(list((self.run_dir / "checkpoints").glob("step-*"))) + self._attempts()

    def _attempts(self) -> int:
        """Rollouts that were begun, and those that have ended."""
        try:
            with contextlib.closing(sqlite3.connect(f"file:{self.run_dir / 'store.db'}?mode=ro", uri=True)) as store:
                asked = "SELECT count(attempt_id) + count(ended_at) FROM rollouts"
                return int(store.execute(asked).fetchone()[0])
        except sqlite3.OperationalError:  # it is not there yet
            return 0

    def _command(self) -> list[str]:
        words = [sys.executable, "-m", "lightning_rl", "train"]
        if (self.run_dir / "config.yaml").exists():
            return [*words, "--resume", "run"]
        keys = [
            "agent=my_agent:solve", "data.train_files=tasks.jsonl", f"data.train_batch_size={TASKS}",
            "data.max_response_length=8", f"actor_rollout_ref.rollout.n={GROUP}",
            "actor_rollout_ref.rollout.max_model_len=128", "actor_rollout_ref.rollout.agent.max_concurrent_rollouts=4",
            "actor_rollout_ref.actor.optim.lr=1e-3", f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1",
            "trainer.max_actor_ckpt_to_keep=100", "trainer.logger=[jsonl]",
        ]  # fmt: skip
        if self._engine:
            python = self.folder / "python"
            keys += ["actor_rollout_ref.rollout.name=vllm", f"actor_rollout_ref.rollout.python={python}"]
        return [*words, *keys, "--run-dir", "run"]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@contextlib.contextmanager
def training(folder: Path, **given: Any) -> Iterator[Training]:
    """A run of which nothing is left behind."""
    made = Training(folder, **given)
    try:
        yield made
    finally:
        made.stop()


@dataclass
class Told:
    """What came of a run: how often each process was killed, and what its store holds."""

    killed: Counter[str] = field(default_factory=Counter)
    attempts: Counter[str] = field(default_factory=Counter)


def survive(folder: Path, seed: int) -> Told:
    """A run that is killed as `seed` has it, and goes on until it is done; everything is checked."""
    planned = kills(seed)
    told = Told()
    with training(folder, engine=any(kill.victim == "engine" for kill in planned)) as run:
        for kill in planned:
            run.until(kill.events)
            time.sleep(kill.later)
            told.killed[kill.victim] += run.kill(kill.victim)
        run.finish()
        try:
            told.attempts = check(run)
        except AssertionError as error:
            error.add_note(f"seed {seed}: {planned}\n{run.log()}")
            raise
    return told


def check(run: Training) -> Counter[str]:
    """Everything that must be true of a run that is done; how its attempts ended."""
    rows = jsonl.read(run.run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "a step is told of once"
    store = SqlStore(f"sqlite:///{run.run_dir / 'store.db'}")
    try:
        rollouts, _ = store.page(limit=10 * ROLLOUTS)
        traces = store.traces([rollout.rollout_id for rollout in rollouts])
    finally:
        store.close()
    assert len(traces) == len(rollouts) == ROLLOUTS
    ended: Counter[str] = Counter()
    for trace in traces.values():
        ended.update(_check_rollout(trace))
    _check_tokens(rows, traces, list(step_record.read_all(run.run_dir)))
    return ended


def _check_rollout(trace: RolloutTrace) -> list[str]:
    """It ended once, by the attempt that counts; nobody works on it any more."""
    statuses = [each.attempt.status for each in trace.attempts]
    assert trace.rollout.status == "succeeded", trace.rollout
    assert statuses.count("succeeded") == 1
    assert "running" not in statuses
    assert statuses[-1] == "succeeded", "nothing is tried again that has succeeded"
    assert trace.rollout.counting_attempt_id == trace.attempts[-1].attempt.attempt_id
    assert len(calls_of(trace.attempts[-1].spans)) == 2, "the agent calls twice"
    return statuses


def _check_tokens(
    rows: list[dict[str, Any]], traces: Mapping[str, RolloutTrace], records: list[step_record.StepRecord]
) -> None:
    """Every sampled token was trained in one place or excluded, and was counted once."""
    calls = {call.call_id: call for t in traces.values() for a in t.attempts for call in calls_of(a.spans)}
    counting = {
        call.call_id
        for t in traces.values()
        for a in t.attempts
        if a.attempt.attempt_id == t.rollout.counting_attempt_id
        for call in calls_of(a.spans)
    }
    assert [record.step for record in records] == list(range(1, STEPS + 1))
    seen = [call_id for record in records for rollout in record.rollouts for call_id in rollout.calls]
    assert len(seen) == len(set(seen)), "no call is in two steps"
    assert set(seen) == counting, "every call of a counting attempt is in one, and no other"
    trained = 0
    for record in records:
        for rollout in record.rollouts:
            for call_id, call in rollout.calls.items():
                assert call.kept is None
                assert call.trained_tokens in (0, len(calls[call_id].response_ids)), "none is trained twice"
                trained += call.trained_tokens
    last = rows[-1]
    excluded = sum(value for name, value in last.items() if name.startswith("tokens/excluded/"))
    assert last["tokens/trained"] == trained > 0
    assert last["tokens/pending"] == 0
    assert last["tokens/received"] == last["tokens/trained"] + excluded
    assert last["tokens/received"] == sum(call.sampled_tokens for call in calls.values()), "all of them are recorded"


def check_weights(run: Training, folder: Path) -> None:
    """A run that nobody disturbs, over the same recorded rollouts, ends with the same weights, bit by bit."""
    with training(folder) as unbroken:
        unbroken.run_dir.mkdir()
        for name in ("store.db", "run.id", "config.yaml"):
            shutil.copy(run.run_dir / name, unbroken.run_dir / name)
        unbroken.finish()
        check(unbroken)
        ends = [each.run_dir / "model" / "model.safetensors" for each in (run, unbroken)]
        assert ends[0].read_bytes() == ends[1].read_bytes()


def signal_all(processes: list[psutil.Process], number: signal.Signals) -> None:
    """Send it to all of them."""
    for process in processes:
        process.send_signal(number)
