"""Child processes never survive their parent, at whatever moment it is interrupted."""

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from pathlib import Path

import pytest

from lightning_rl.processes.child import Child, ChildDied
from tests.lightning_rl.control_plane.test_process import TOKENIZER


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Makes the module that a child runs."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def made(source: str, first: bytes = b"") -> Child:
        (tmp_path / "of_a_child.py").write_text(textwrap.dedent(source))
        return Child("of_a_child", name="the child", log=tmp_path / "log", first=first)

    return made


STUBBORN = """
    import time
    print("{}", flush=True)
    time.sleep(1e6)
"""


def interrupt_soon() -> None:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_a_child_that_does_not_stop_is_killed_when_the_wait_is_interrupted(module) -> None:
    child = module(STUBBORN)
    child.start()
    child.next_line()
    interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        child.stop()
    assert child.process.returncode == -signal.SIGKILL


def test_a_child_whose_start_is_interrupted_is_still_its_owners(module, monkeypatch) -> None:
    monkeypatch.setattr("lightning_rl.processes.child._STOP_SECONDS", 0.1)
    child = module(STUBBORN, first=b"x" * 2**20)  # more than a pipe holds: the start waits for the child to read
    try:
        interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            child.start()
    finally:
        child.stop()
    assert child.process.returncode == -signal.SIGKILL


def test_a_child_that_was_never_started_is_stopped_without_effect(module) -> None:
    child = module("")
    child.ask_to_stop()
    child.stop()


def test_what_a_dead_child_has_started_is_ended(module) -> None:
    child = module(
        """
        import os, subprocess
        print(subprocess.Popen(["sleep", "1000"]).pid, flush=True)
        os.abort()
        """
    )
    child.start()
    pid = int(child.next_line())
    child.process.wait()
    with pytest.raises(ChildDied, match="killed by SIGABRT"):
        child.check()
    eventually(lambda: not Path(f"/proc/{pid}").exists() or ") Z" in Path(f"/proc/{pid}/stat").read_text())


def test_alarms_and_other_lines_become_warnings(module, caplog) -> None:
    child = module(
        """
        import logging
        from lightning_rl.processes.child import TellAlarms, tell
        from lightning_rl_proxy.recording.alerts import ALARMS, Alert
        ALARMS.addHandler(TellAlarms())
        trouble = Alert("the disk")
        for _ in range(2):
            trouble.begin("it is full")
        trouble.end()
        print("a library's line", flush=True)
        tell({"started": True})
        """
    )
    child.start()
    child.listen()
    child.process.wait()
    child.stop()
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "the child: trouble with the disk: it is full",
        "the child: trouble with the disk is over",
        "the child: a library's line",
    ]
    assert child.reported["started"]


def eventually(what) -> None:
    end = time.monotonic() + 30
    while not what():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def tagged(tag: str) -> list[int]:
    """The processes with `tag` in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if tag.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def test_interrupts_at_any_moment_leave_no_process(tmp_path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys, time
            from pathlib import Path
            from types import SimpleNamespace
            from lightning_rl.agents.agent import as_agent
            from lightning_rl.runner import launch as runners
            from lightning_rl.control_plane import launch as server
            from lightning_rl.store.client import HttpStore
            from lightning_rl.store.contract import RolloutRequest

            folder = Path(sys.argv[1])
            folder.mkdir()
            chats = {{"tokenizer": {str(TOKENIZER)!r}, "renderer": "qwen3", "history": "keep"}}
            policy = SimpleNamespace(model="m", engines=[], **chats)
            print("begin", flush=True)
            with server.launch(folder, policy, admin_key="a", runner_key="r") as serving:
                print("serving", flush=True)
                HttpStore(serving.url, "a").enqueue([RolloutRequest(task=1)])
                with runners.launch(2, as_agent(lambda task: time.sleep(1e6)), serving.url, "r", log_dir=folder):
                    print("running", flush=True)
                    time.sleep(1e6)
            """
        )
    )
    tag = f"interrupted-{uuid.uuid4()}"
    parents = []
    for number, (moment, seconds) in enumerate([("begin", 0.0), ("begin", 0.3), ("serving", 0.0), ("running", 0.0)]):
        parent = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / str(number))],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"TAG": tag},
        )
        parents.append((parent, threading.Thread(target=interrupt_twice, args=(parent, moment.encode(), seconds))))
        parents[-1][1].start()
    for parent, interrupter in parents:
        interrupter.join(30)
        assert parent.wait(30) != 0
        parent.stdout.close()
    eventually(lambda: not tagged(tag))


def interrupt_twice(parent: subprocess.Popen, moment: bytes, seconds: float) -> None:
    while parent.stdout.readline().strip() not in (moment, b""):
        pass
    for _ in range(2):
        time.sleep(seconds)
        parent.send_signal(signal.SIGINT)
        seconds = 0.1
