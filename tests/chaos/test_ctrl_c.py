"""A Ctrl-C or SIGTERM at random moments: the command ends at once, without a traceback, and what was recorded goes on.

Moments are drawn over the whole life of the command, from its imports to its end; `LIGHTNING_RL_CHAOS_SEED` draws
others, `CHAOS_INTERRUPTS` so many.
"""

import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_rl.store.sql import SqlStore
from lightning_rl_adapters.call import calls_of

MOMENTS = int(os.environ.get("CHAOS_INTERRUPTS", "20"))
STEPS = 40
ENDED_BY = (signal.SIGINT, signal.SIGTERM)

pytestmark = pytest.mark.chaos

AGENT = """
import openai

from lightning_rl import LLM

def solve(task: dict, llm: LLM) -> float:
    client = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key)
    chat = [{"role": "user", "content": task["question"]}]
    answer = client.chat.completions.create(model=llm.model, messages=chat)
    return float(len(answer.choices[0].message.content) % 2)
"""


def processes_of(folder: Path) -> list[str]:
    """The processes that run in `folder` (children inherit it)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if (entry / "cwd").readlink() == folder:
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue  # it has ended meanwhile
    return found


def eventually_none(folder: Path) -> list[str]:
    """The processes of `folder` that are still there after a while."""
    for _ in range(200):
        if not (left := processes_of(folder)):
            return []
        time.sleep(0.1)
    return left


def command(place: Path) -> list[str]:
    words = [sys.executable, "-m", "lightning_rl", "train"]
    if (place / "run" / "config.yaml").exists():
        return [*words, "--resume", "run"]
    keys = ["data.train_batch_size=2", "data.max_response_length=8", "actor_rollout_ref.rollout.n=2"]
    keys += [f"trainer.total_training_steps={STEPS}", "trainer.save_freq=3", "actor_rollout_ref.actor.optim.lr=1e-3"]
    return [*words, "agent=my_agent:solve", "data.train_files=tasks.jsonl", *keys, "--run-dir", "run"]


def test_interrupts_lose_nothing(tmp_path: Path) -> None:
    (tmp_path / "my_agent.py").write_text(AGENT)
    tasks = [json.dumps({"question": f"number {i}"}) + "\n" for i in range(4)]
    (tmp_path / "tasks.jsonl").write_text("".join(tasks))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    moments = random.Random(int(os.environ.get("LIGHTNING_RL_CHAOS_SEED", "0")))
    told = 0
    for _ in range(MOMENTS):
        child = subprocess.Popen(
            command(tmp_path), cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        wait = moments.uniform(0.1, 8.0)
        try:
            out, errors = child.communicate(timeout=wait)
        except subprocess.TimeoutExpired:
            child.send_signal(moments.choice(ENDED_BY))
            out, errors = child.communicate(timeout=60)
        case = f"after {wait:.2f} s, status {child.returncode}\n{out}\n{errors}"
        # CPython ends by the signal itself where it came inside an exec'd string, or before there was a handler.
        assert child.returncode in (0, *(status for each in ENDED_BY for status in (128 + each, -each))), case
        assert "Traceback" not in errors, case
        if "Interrupted." in errors:
            assert re.search(r"It goes on (behind step-\d+, its last|from its beginning, .* every 3 steps)", errors), (
                case
            )
        told += "Interrupted. Go on with: lightning-rl train --resume" in errors
        assert eventually_none(tmp_path) == [], case
        if (tmp_path / "run" / "store.db").exists():
            with sqlite3.connect(tmp_path / "run" / "store.db") as database:
                assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",), case
    assert told >= MOMENTS // 6

    last = subprocess.run(command(tmp_path), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert last.returncode == 0, last.stdout + last.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    store = SqlStore(f"sqlite:///{tmp_path / 'run' / 'store.db'}")
    rollouts, _ = store.page(limit=1000)
    traces = store.traces([rollout.rollout_id for rollout in rollouts]).values()
    recorded = sum(len(call.response_ids) for t in traces for a in t.attempts for call in calls_of(a.spans))
    assert rows[-1]["tokens/received"] == recorded
    assert rows[-1]["tokens/pending"] == 0
    assert len(rollouts) == STEPS * 4
    assert {rollout.status for rollout in rollouts} == {"succeeded"}, "an interrupt is not a rollout's fault"
