"""The dashboard over a run of many rollouts: the first view, filters, pages, one rollout, and what it keeps in memory.

    python benchmarks/dashboard.py [ROLLOUTS]

A run folder with that many rollouts (100,000) is made by SQL, each with a task of its own, two calls and a reward, in
steps of 512 with their records. `lightning-rl dashboard` is started on it and asked over HTTP as its page asks: the
first answers while it still reads the run, the others when all is read. With Playwright and Chromium at hand (make
test-browser) the views are timed in the browser, too. Medians of ten, on an otherwise quiet machine.
"""

import json
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlencode

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
from load import resident_mb

from lightning_rl.store.contract import RolloutRequest
from lightning_rl.store.sql import SqlStore
from lightning_rl.trajectories import step_record
from lightning_rl.trajectories.step_record import CallRecord, RolloutRecord, StepRecord
from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import Call, VersionRange, to_span
from lightning_rl_adapters.span import pack, pack_logprobs

OF_A_STEP, OF_A_GROUP, REPEATS = 512, 8, 10
NOUNS = ("lakes", "cars", "birds", "ships", "planes", "schools", "books", "lamps")
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")


def fill(run_dir: Path, rollouts: int) -> None:
    """A run of so many rollouts that have ended."""
    SqlStore(f"sqlite:///{run_dir / 'store.db'}").close()
    with closing(sqlite3.connect(run_dir / "store.db", isolation_level=None)) as connection:
        connection.execute("BEGIN")
        for first in range(0, rollouts, OF_A_STEP):
            _fill_step(connection, run_dir, first // OF_A_STEP, range(first, min(first + OF_A_STEP, rollouts)))
        connection.execute("COMMIT")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    rows = [
        {"step": float(step), "critic/score/mean": step / rollouts * OF_A_STEP} for step in range(rollouts // OF_A_STEP)
    ]
    (run_dir / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def _fill_step(connection: sqlite3.Connection, run_dir: Path, step: int, numbers: range) -> None:
    records = []
    for i in numbers:
        name, attempt, group, at = f"r-{i}", f"a-{i}", f"g-{i // OF_A_GROUP}", 1.7e9 + i
        asked = RolloutRequest(
            task={"question": f"How many {NOUNS[i % 8]} have size {i % 997}?", "id": i // OF_A_GROUP},
            rollout_id=name, group_id=group, metadata={"step": step},
        )  # fmt: skip
        reward = float(i * 7919 % 4) / 4
        connection.execute(
            "INSERT INTO rollouts (rollout_id, status, mode, group_id, request, attempt_count, attempt_id, created_at, "
            "ended_at) VALUES (?, 'succeeded', 'train', ?, ?, 1, ?, ?, ?)",
            (name, group, msgspec.json.encode(asked), attempt, at, at + i % 60),
        )
        connection.execute(
            "INSERT INTO attempts (attempt_id, rollout_id, sequence, status, worker_id, unresponsive_seconds, "
            "lease_expires_at, started_at, ended_at, reward, rewards) "
            "VALUES (?, ?, 1, 'succeeded', 'w', 30, ?, ?, ?, ?, ?)",
            (attempt, name, at, at, at + 1, reward, msgspec.json.encode({"reward": reward})),
        )
        calls = {}
        for number in range(2):
            span = _call(name, attempt, number, step, i)
            packed = pack(span)
            row = (packed.span_id, name, attempt, number, packed.record)
            connection.execute("INSERT INTO spans VALUES (?, ?, ?, ?, ?)", row)
            calls[span.span_id] = CallRecord(
                credit=reward, compared_with="group", baseline=0.4, scale=0.3, advantage=(reward - 0.4) / 0.3,
                weight=1e-3, mini_batch=0, trained_tokens=32, old_log_probs=pack_logprobs([-0.5] * 32),
            )  # fmt: skip
        records.append(RolloutRecord(rollout_id=name, group_id=group, reward=reward, calls=calls))
    step_record.write(
        run_dir, StepRecord(step=step, policy_version=step, rule="final", loss_agg_mode="token-mean", rollouts=records)
    )


def _call(name: str, attempt: str, number: int, step: int, i: int) -> Any:
    call = Call(
        call_id=f"{name}-c{number}", rollout_id=name, attempt_id=attempt, number=number, model="policy",
        prompt_ids=list(range(64)), response_ids=list(range(32)), logprobs=[-0.5] * 32,
        versions=[VersionRange(step, 0, 32)], temperature=1.0, finish_reason="stop",
        parent_id=f"{name}-c0" if number else None, start_ns=i * 10**9, end_ns=i * 10**9 + 10**8,
    )  # fmt: skip
    said = f"SELECT count(*) FROM {NOUNS[i % 8]} WHERE size={i % 997}"
    asked = [{"role": "user", "content": f"{NOUNS[i % 8]}: size id; how many have size {i % 997}?"}]
    return to_span(
        call, **{semconv.INPUT_MESSAGES: asked, semconv.OUTPUT_MESSAGES: [{"role": "assistant", "content": said}]}
    )


def ask(url: str, path: str, **query: Any) -> Any:
    """An answer of the page's server."""
    with urllib.request.urlopen(f"{url}api/runs/run/{path}?{urlencode(query)}") as answer:
        return json.load(answer)


def milliseconds(act: Callable[[], Any], repeats: int = REPEATS) -> float:
    """How long it takes, the median."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        act()
        times.append(1000 * (time.perf_counter() - start))
    return median(times)


def measure(url: str, pid: int, rollouts: int) -> None:
    """Print what each question takes."""
    start = time.perf_counter()
    first = ask(url, "rollouts", limit=200)
    print(f"first page of rollouts, 0 s after the start   {1000 * (time.perf_counter() - start):8.0f} ms")
    assert first["rollouts"][0]["rollout_id"] == f"r-{rollouts - 1}"
    while (told := ask(url, "summary")).get("indexed", 0) < 1 or not told["listed"]:
        time.sleep(0.2)
    print(f"until all is listed and found by searches     {time.perf_counter() - start:8.1f} s")
    page = ask(url, "rollouts", limit=200, sort="-reward")
    questions: dict[str, Callable[[], Any]] = {
        "newest 200": lambda: ask(url, "rollouts", limit=200),
        "sorted by reward": lambda: ask(url, "rollouts", limit=200, sort="-reward"),
        "the page behind it": lambda: ask(url, "rollouts", limit=200, sort="-reward", after=page["next"]),
        "sorted by task": lambda: ask(url, "rollouts", limit=200, sort="task"),
        "reward above 0.7 in a step": lambda: ask(url, "rollouts", limit=200, step=9, reward_min=0.7),
        "a word of one in eight": lambda: ask(url, "rollouts", limit=200, text="lakes"),
        "a part of a word": lambda: ask(url, "rollouts", limit=200, text="*ake"),
        "three words": lambda: ask(url, "rollouts", limit=200, text="lakes where 501"),
        "choices of the filters": lambda: ask(url, "choices"),
        "groups of a step": lambda: ask(url, "groups", step=9),
        "now": lambda: ask(url, "now"),
        "one rollout": lambda: ask(url, "rollouts/r-777"),
        "tokens of a call": lambda: ask(url, "rollouts/r-777/calls/1/2"),
    }
    for name, question in questions.items():
        print(f"{name:<45} {milliseconds(question):8.1f} ms")
    print(f"resident memory                               {resident_mb(pid):8.0f} MB")


def in_the_browser(url: str) -> None:
    """Time the views as a person sees them."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("(no Playwright here: the browser's part is left out)")
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})

        def opened(view: str, shows: str) -> None:
            page.goto("about:blank")
            page.goto(f"{url}#/run/run/{view}")
            page.wait_for_selector(shows)

        def filtered(words: str) -> None:
            before = page.locator(".count").inner_text()
            page.fill("#search", words)
            while page.locator(".count").inner_text() == before:
                page.wait_for_timeout(5)

        views = {
            "Now": ("now", ".tile"),
            "Rollouts": ("rollouts", "a.row"),
            "One rollout": ("rollout/r-777", "article.call"),
        }
        for name, (view, shows) in views.items():
            print(f"{'view ' + name:<45} {milliseconds(lambda v=view, s=shows: opened(v, s), 5):8.0f} ms")
        opened("rollouts", "a.row")
        words = iter(["lakes", "birds 17", "ships where", "cars 5", "planes 99"])
        taken = milliseconds(lambda: filtered(next(words)), 5)
        print(f"{'search, from the last key to the new rows':<45} {taken:8.0f} ms")
        browser.close()


def main() -> None:
    """Make the run, and measure."""
    rollouts = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        run_dir.mkdir()
        fill(run_dir, rollouts)
        size = sum(file.stat().st_size for file in run_dir.rglob("*") if file.is_file()) / 1e6
        print(f"{rollouts:,} rollouts, {2 * rollouts:,} calls, {size:.0f} MB")
        command = [sys.executable, "-u", "-m", "lightning_rl", "dashboard", str(run_dir), "--port", "0"]
        served = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert served.stdout is not None
            [url] = re.findall(r"http://\S+/", served.stdout.readline())
            for _ in range(100):
                try:
                    urllib.request.urlopen(f"{url}login").close()
                    break
                except OSError:
                    time.sleep(0.02)
            measure(url, served.pid, rollouts)
            in_the_browser(url)
        finally:
            served.terminate()
            served.wait(20)


if __name__ == "__main__":
    main()
