"""The server process: it starts, answers, keeps what it answered, and goes when its parent does."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from lightning_rl.server.child import ChildDied
from lightning_rl.server.launch import launch
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Finish, RolloutRequest

TOKENIZER = Path(__file__).parents[3] / "examples/sql_agent/checkpoint"


@dataclass
class Policy:
    model: str = "policy"
    tokenizer: str = str(TOKENIZER)
    renderer: str = "qwen3"
    engines: list = field(default_factory=list)


def test_a_server_runs_as_long_as_its_block_and_keeps_what_it_answered(tmp_path) -> None:
    engine = {"model": "policy", "kind": "embedded", "url": "http://127.0.0.1:1", "policy_version": 2}
    with launch(tmp_path, Policy(engines=[engine]), admin_key="a", runner_key="r") as serving:
        serving.check()
        store = HttpStore(serving.url, "a")
        assert store.state()["models"]["policy"]["policy_version"] == 2
        store.enqueue([RolloutRequest(task=1, rollout_id="r1")])
        (claim,) = HttpStore(serving.url, "r").claim("w")
        assert claim.resources["main_llm"]["model"] == "policy"
        store.finish("r1", claim.attempt.attempt_id, Finish(status="succeeded", reward=1.0))
        os.kill(serving.pid, signal.SIGKILL)
        with pytest.raises(ChildDied, match="the server ended with status -9"):
            check_for_long(serving)
    with launch(tmp_path, Policy(), admin_key="a", runner_key="r") as serving:
        assert HttpStore(serving.url, "a").rollout("r1").reward == 1.0


def check_for_long(serving) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        serving.check()
        time.sleep(0.01)


def test_a_long_poll_does_not_hold_up_the_stop(tmp_path) -> None:
    with launch(tmp_path, Policy(), admin_key="a", runner_key="r") as serving:
        answers = []
        store = HttpStore(serving.url, "r")
        poll = threading.Thread(target=lambda: answers.append(store.claim("w", wait_seconds=500)))
        poll.start()
        store.claim("other")  # the server is up, and has most likely seen the poll
    poll.join(20)
    assert answers in ([[]], [])  # answered empty, or refused when it came too late


def test_a_server_that_cannot_start_says_why(tmp_path) -> None:
    with (
        pytest.raises(ChildDied, match=r"holds no tokenizer\.json"),
        launch(tmp_path, Policy(tokenizer=str(tmp_path)), admin_key="a", runner_key="r"),
    ):
        pass


@pytest.mark.parametrize("how", ["eof", "sigterm"])
def test_it_stops_cleanly_on_sigterm_and_at_the_end_of_stdin(tmp_path, how) -> None:
    settings = {"store": f"sqlite:///{tmp_path / 'run.db'}", "run_dir": str(tmp_path), "admin_key": "a"}
    settings |= {"runner_key": "r", "model": "m", "tokenizer": str(TOKENIZER), "renderer": "qwen3"}
    with subprocess.Popen(
        [sys.executable, "-m", "lightning_rl.server.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        child.stdin.write(msgspec.json.encode(settings) + b"\n")
        child.stdin.flush()
        started = msgspec.json.decode(child.stdout.readline())
        assert started["pid"] == child.pid
        if how == "eof":
            child.stdin.close()
        else:
            child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0
        log = child.stderr.read().decode()
    assert "Traceback" not in log, log


def test_the_server_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, lightning_rl.server.process\n"
        "print([m for m in ('torch', 'transformers', 'pydantic_ai', 'litellm') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert answer.stdout.strip() == b"[]"
