"""What an attempt prints is kept with it, and with no other; it goes to the runner's log as well."""

import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import pytest

from lightning_rl.runner import output_capture
from lightning_rl.runner.output_capture import CapturedOutput, Printed
from lightning_rl.store.contract import AttemptLog, Log
from lightning_rl.store.errors import NotAllowed, NotFound
from tests.lightning_rl.runner.runs import asked

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # children cannot import a test


def talking(task, llm):
    import logging
    import subprocess
    import sys
    import threading
    import time

    for number in range(20):
        print(task, end=" ")
        print(f"line {number}")
        print(f"{task} error {number}", file=sys.stderr)
        time.sleep(0.002)
    thread = threading.Thread(target=print, args=(f"{task} thread",))
    thread.start()
    thread.join()
    logging.getLogger("agent").warning("%s warns", task)
    if task == "4":
        subprocess.run(["echo", "a child of 4"], check=True)
        raise LookupError("no such table")
    return 1.0


async def talking_async(task, llm):
    import asyncio
    import sys

    for number in range(20):
        print(task, end=" ")
        await asyncio.sleep(0)
        print(f"line {number}")
        print(f"{task} error {number}", file=sys.stderr)
    await asyncio.to_thread(print, f"{task} thread")
    if task == "4":
        raise LookupError("no such table")
    return 1.0


@pytest.mark.parametrize(("agent", "isolation"), [(talking, "thread"), (talking_async, "thread"), (talking, "process")])
def test_each_attempt_has_its_own_output_and_traceback(server, tmp_path, monkeypatch, agent, isolation) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # one process
    tasks = [str(number) for number in range(8)]
    with asked(server, tmp_path, agent, tasks, 8, isolation) as rollouts:
        rollouts.ended()
        logs = rollouts.logs()
    for task, log in zip(tasks, logs, strict=True):
        lines = [f"{task} line {number}" for number in range(20)] + [f"{task} thread"]
        lines += ["a child of 4"] if (task, isolation) == ("4", "process") else []  # where descriptors are its own
        assert log.stdout.splitlines() == lines
        assert [line for line in log.stderr.splitlines() if " error " in line] == [
            f"{task} error {n}" for n in range(20)
        ]
        assert (f"{task} warns" in log.stderr) == (agent is talking)
        assert not [
            line for line in log.stderr.splitlines() if line[:1].isdigit() and line[0] != task and line[1] == " "
        ]
        assert ("LookupError: no such table" in log.traceback) == (task == "4")
    told = (tmp_path / "runner-0.log").read_text()
    for task in tasks:
        assert re.search(rf"^\S+ \| {task} error 19$", told, re.MULTILINE)
        assert re.search(rf"^\S+ \| {task} thread$", told, re.MULTILINE)
    assert re.search(r"^\S+ \| LookupError: no such table$", told, re.MULTILINE), "each line of a traceback, too"
    assert "a child of 4" in told or agent is talking_async
    assert "LookupError: no such table" in told


def test_what_is_kept_is_the_beginning_and_the_end() -> None:
    kept = CapturedOutput()
    for number in range(100_000):
        kept.add(b"%06d\n" % number)
    text = kept.text()
    assert text.startswith("000000\n000001\n")
    assert text.endswith("099998\n099999\n")
    assert "634464 bytes left out" in text
    assert len(text) < 66_000
    short = CapturedOutput()
    short.add("größer".encode())
    assert short.text() == "größer"


def test_threads_that_print_at_once_are_never_mixed_up(monkeypatch, capfd) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    output_capture.route()
    begin = threading.Barrier(8)

    def talk(name: int) -> Printed:
        mine = Printed(f"r{name}")
        with mine.collecting():
            begin.wait()
            for _ in range(500):
                print(name, name, name)
        return mine

    with ThreadPoolExecutor(8) as threads:
        for name, mine in enumerate(threads.map(talk, range(8))):
            assert mine.stdout.text() == f"{name} {name} {name}\n" * 500
            assert mine.stderr.text() == ""
    print("nobody's")
    assert sorted(capfd.readouterr().err.splitlines()) == sorted(
        ["nobody's", *(f"r{name} | {name} {name} {name}" for name in range(8) for _ in range(500))]
    )


def test_a_line_of_the_log_is_one_rollouts_and_is_written_when_it_is_whole() -> None:
    read, write = os.pipe()
    log = output_capture.RunnerLog(write)
    for data, name in [
        (b"half", "r1"), (b"whole\nand", "r2"), (b" more\n", "r2"), (b"nobody\n", ""), (b"\n\n", "r1"), (b"open", "r1"),
        (b"", "r3"), (b"x" * 9000, "r3"),
    ]:  # fmt: skip
        log.write(data, name)
    log.end("r1")
    log.end("r2")
    os.close(write)
    with open(read) as told:
        assert told.read().splitlines() == [
            "r2 | whole", "r2 | and more", "nobody", "r1 | half", "r1 | ", "r3 | " + "x" * 9000, "r1 | open",
        ]  # fmt: skip


def test_a_rollout_that_prints_without_end_fills_no_log(tmp_path) -> None:
    with (tmp_path / "log").open("wb") as file:
        log = output_capture.RunnerLog(file.fileno())
        for _ in range(40):
            log.write(b"y\n" * 32768, "r1")
        log.write(b"hello\n", "r2")
        log.end("r1")
        log.write(b"again\n", "r1")
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines.count("r1 | y") == 2**19
    assert lines[-3:] == [
        "r1 | [it printed more than 1 MiB: the rest is not in this log]", "r2 | hello", "r1 | again",
    ]  # fmt: skip


def test_a_log_is_kept_of_an_attempt_that_has_ended_and_read_with_the_admin_key_alone(server) -> None:
    from lightning_rl.store.client import HttpStore
    from lightning_rl.store.contract import RolloutRequest

    runner = HttpStore(server.url, server.runner_key)
    claim = server.store.start(RolloutRequest(task=1))
    place = (claim.rollout.rollout_id, claim.attempt.attempt_id)
    assert server.store.log(*place) == Log()
    server.store.cancel(place[0])
    first = Log(stdout="out", stderr="err", traceback="here")
    runner.add_log(*place, first)
    runner.add_log(*place, Log(stdout="another"))
    assert server.store.log(*place) == first
    with pytest.raises(NotAllowed):
        runner.log(*place)
    with pytest.raises(NotFound):
        runner.add_log(place[0], "unknown", first)
    other = server.store.start(RolloutRequest(task=2))
    there = [place, (other.rollout.rollout_id, other.attempt.attempt_id)]
    logs = [AttemptLog(rollout_id=r, attempt_id=a, log=Log(stdout="of many")) for r, a in there]
    with pytest.raises(NotFound, match="no attempt unknown of rollout"):
        runner.add_logs([*logs, AttemptLog(rollout_id=place[0], attempt_id="unknown", log=first)])
    assert server.store.log(*there[1]) == Log()
    runner.add_logs(logs)
    assert [server.store.log(*each).stdout for each in there] == ["out", "of many"]
