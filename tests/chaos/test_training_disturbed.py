"""A training run whose disk is full, whose store is locked, whose server stands still, or whose clock jumps: it goes on
by itself, and nothing is there twice or missing.

`CHAOS_AWAY_SECONDS=35` makes each of them last longer than every lease and every time-out of the store.
"""

import os
import resource
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.chaos.killing import EVENTS, Training, check, signal_all, training

AWAY_SECONDS = float(os.environ.get("CHAOS_AWAY_SECONDS", "4"))

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]

# Every process of a run loads it as it starts, and then lives by the machine's clock and what the file says beside.
CLOCK = """
import os, time

def jumping(clock, unit):
    def told():
        with open(os.environ["CHAOS_CLOCK"]) as file:
            return clock() + type(clock())(float(file.read() or 0) * unit)
    return told

time.time, time.time_ns = jumping(time.time, 1), jumping(time.time_ns, 10**9)
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Training]:
    """A run that is in its midst."""
    with training(tmp_path) as made:
        made.until(EVENTS // 4)
        yield made


@contextmanager
def full_disk(pids: list[int]) -> Iterator[None]:
    """No file of these processes can be written beyond its first byte."""
    before = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, before[pid][1]))
    try:
        yield
    finally:
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before[pid])


def ended_undisturbed(run: Training) -> None:
    """It came to its end without being begun again, and no rollout was tried twice."""
    run.finish()
    assert run.begun == 1, run.log()
    assert set(check(run)) == {"succeeded"}, run.log()


@pytest.mark.long
def test_a_server_whose_disk_is_full_for_a_while_costs_nothing(run: Training) -> None:
    with full_disk([process.pid for process in run.processes("server")]):
        time.sleep(AWAY_SECONDS)
    ended_undisturbed(run)


@pytest.mark.long
def test_a_store_that_another_process_locks_for_a_while_costs_nothing(run: Training) -> None:
    with closing(sqlite3.connect(run.run_dir / "store.db", timeout=60, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        time.sleep(AWAY_SECONDS)
        other.execute("ROLLBACK")
    ended_undisturbed(run)


@pytest.mark.smoke
def test_a_server_that_stands_still_for_a_while_costs_nothing(run: Training) -> None:
    servers = run.processes("server")
    signal_all(servers, signal.SIGSTOP)
    time.sleep(AWAY_SECONDS)
    signal_all(servers, signal.SIGCONT)
    ended_undisturbed(run)


@pytest.mark.long
def test_a_run_that_goes_on_waits_for_the_server_that_its_dead_trainer_left(run: Training) -> None:
    """That one still has calls in flight and records on their way."""
    servers = run.processes("server")
    signal_all(servers, signal.SIGSTOP)
    run.kill("trainer")
    run.begin()
    while not run.processes("server"):
        time.sleep(0.1)
    before = run.events
    time.sleep(AWAY_SECONDS)
    assert run.events == before
    signal_all(servers, signal.SIGCONT)
    run.finish()
    check(run)


@contextmanager
def by_another_clock(folder: Path) -> Iterator[tuple[Training, Path]]:
    """A run, and the file that says by how many seconds its clock is off."""
    (folder / "path").mkdir()
    (folder / "path" / "sitecustomize.py").write_text(CLOCK)
    clock = folder / "clock"
    clock.write_text("0")
    path = os.pathsep.join(filter(None, [str(folder / "path"), os.environ.get("PYTHONPATH")]))
    with training(folder / "run", environment={"PYTHONPATH": path, "CHAOS_CLOCK": str(clock)}) as run:
        yield run, clock


@pytest.mark.long
def test_a_clock_that_jumps_by_hours_costs_nothing(tmp_path: Path) -> None:
    with by_another_clock(tmp_path) as (run, clock):
        run.until(EVENTS // 5)
        clock.write_text(str(3 * 3600))
        run.until(2 * EVENTS // 5)
        clock.write_text(str(-3 * 3600))
        ended_undisturbed(run)


@pytest.mark.long
def test_a_run_goes_on_after_the_clock_was_set_back(tmp_path: Path) -> None:
    with by_another_clock(tmp_path) as (run, clock):
        run.until(EVENTS // 2)
        run.kill("machine")
        clock.write_text("-3600")
        run.finish()
        assert run.begun == 2, run.log()
        check(run)
