"""The server process: it starts, answers, keeps what it answered, and goes when its parent does."""

import asyncio
import contextlib
import os
import re
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lightning_rl.algorithms.base import Endpoint
from lightning_rl.control_plane import process
from lightning_rl.control_plane.launch import ServerNotStarted, launch, loading
from lightning_rl.processes.child import ChildDied
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import ErrorInfo, Finish, ResourcesRequest, RolloutConfig, RolloutRequest
from lightning_rl.store.errors import Conflict
from lightning_rl.store.sql import SqlStore
from lightning_rl_adapters.call import Call, to_span
from lightning_rl_proxy.http.limits import RequestLimits
from lightning_rl_proxy.recording.recorder import Recorder

TOKENIZER = Path(__file__).parents[3] / "examples/sql_agent/checkpoint"


policy_of = partial(Endpoint, model="policy", tokenizer=str(TOKENIZER), renderer="qwen3", engines=[])

POLICY = policy_of(engines=[{"model": "policy", "kind": "embedded", "url": "http://127.0.0.1:1"}])


def test_a_server_runs_as_long_as_its_block_and_keeps_what_it_answered(tmp_path) -> None:
    engine = {"model": "policy", "kind": "embedded", "url": "http://127.0.0.1:1", "policy_version": 2}
    with launch(tmp_path, policy_of(engines=[engine]), admin_key="a", runner_key="r") as serving:
        serving.check()
        store = HttpStore(serving.url, "a")
        assert store.state()["models"]["policy"]["policy_version"] == 2
        store.enqueue([RolloutRequest(task=1, rollout_id="r1")])
        (claim,) = HttpStore(serving.url, "r").claim("w")
        assert claim.resources["main_llm"]["model"] == "policy"
        store.finish("r1", claim.attempt.attempt_id, Finish(status="succeeded", reward=1.0))
        os.kill(serving.pid, signal.SIGKILL)
        with pytest.raises(ChildDied, match="the server was killed by SIGKILL"):
            check_for_long(serving)
    with launch(tmp_path, policy_of(), admin_key="a", runner_key="r") as serving:
        assert HttpStore(serving.url, "a").rollout("r1").reward == 1.0


def test_a_server_with_another_model_gives_rollouts_that_one_unless_somebody_published_what_they_get(tmp_path) -> None:
    def model_given(model: str, *served: str) -> str:
        process._publish_policy(store, model, {model, *served}, tmp_path / "policy.name")
        return store.resources("latest").resources["main_llm"]["model"]

    with contextlib.closing(SqlStore(f"sqlite:///{tmp_path}/run.db")) as store:
        assert model_given("small") == "small"
        assert model_given("large") == "large"
        assert model_given("small", "large") == "large", "an engine serves it"
        store.remember_run("", "run", "{}")
        assert model_given("small") == "large", "it is perhaps the run's"
        store.forget_run("", "run")
        assert model_given("small") == "small"
        store.publish(ResourcesRequest(resources={"main_llm": {"type": "proxy_llm", "model": "judge"}}))
        assert model_given("large") == "judge", "somebody's choice, whose engine is perhaps named later"


def test_a_server_outlasts_its_clients_connections_and_has_room_for_many(tmp_path) -> None:
    own: Any = SimpleNamespace(release=None)
    assert process._Server(own, RequestLimits(), lambda: None).config.timeout_keep_alive > 60  # aiohttp's are kept 15 s
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 900), hard))
    try:
        with launch(tmp_path, policy_of(), admin_key="a", runner_key="r") as server:
            [limit] = re.findall(r"Max open files +(\d+)", Path(f"/proc/{server.pid}/limits").read_text())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert int(limit) == min(2**16, hard)


def test_a_server_that_is_told_nothing_ends_without_a_word(tmp_path) -> None:
    with loading(tmp_path) as child:
        pass
    assert child.process.returncode == 0
    assert (tmp_path / "server.log").read_text() == ""


def check_for_long(serving) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        serving.check()
        time.sleep(0.01)


def test_a_long_poll_does_not_hold_up_the_stop(tmp_path) -> None:
    with launch(tmp_path, policy_of(), admin_key="a", runner_key="r") as serving:
        answers = []
        store = HttpStore(serving.url, "r")
        poll = threading.Thread(target=lambda: answers.append(store.claim("w", wait_seconds=500)))
        poll.start()
        store.claim("other")  # the server is up, and has most likely seen the poll
    poll.join(20)
    assert answers in ([[]], [])  # answered empty, or refused when it came too late


def refusal(run_dir: Path, **given) -> str:
    """What the user is told when the server does not start."""
    port = given.pop("port", 0)
    with (
        pytest.raises(ServerNotStarted) as told,
        launch(run_dir, policy_of(**given), admin_key="a", runner_key="r", port=port),
    ):
        pass
    assert "\n" not in str(told.value)
    return str(told.value)


@pytest.mark.long
def test_a_server_without_a_tokenizer_or_a_renderer_says_why(tmp_path) -> None:
    assert refusal(tmp_path, tokenizer=str(tmp_path)) == f"{tmp_path} holds no tokenizer.json"
    assert "'nope'" in refusal(tmp_path, renderer="nope")


@pytest.mark.long
def test_a_server_whose_port_is_in_use_says_so(tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert refusal(tmp_path, port=port) == (
            f"port {port} of 127.0.0.1 is in use; choose another or stop what listens there"
        )


@pytest.mark.long
def test_a_server_on_a_bad_store_says_why(tmp_path) -> None:
    store = tmp_path / "store.db"
    store.write_bytes(b"this is no database, but it is long enough to be looked at" * 20)
    assert refusal(tmp_path) == (
        f"the store sqlite:///{store} cannot be opened: file is not a database; choose another file"
    )
    store.unlink()
    SqlStore(f"sqlite:///{store}").close()
    with contextlib.closing(sqlite3.connect(store)) as database, database:
        database.execute("UPDATE meta SET value = '0' WHERE key = 'schema_version'")
    assert f"the store sqlite:///{store} has schema version 0" in refusal(tmp_path)


@pytest.mark.long
def test_a_server_whose_run_folder_cannot_be_written_says_so(tmp_path) -> None:
    (tmp_path / "gateway.journal").mkdir()
    assert refusal(tmp_path).startswith(f"the run folder {tmp_path} cannot be written: ")
    missing = tmp_path / "missing"
    assert refusal(missing).startswith(f"the run folder {missing} cannot be written: ")


def test_what_nobody_foresaw_at_the_start_has_its_log(tmp_path) -> None:
    broken = tmp_path / "tokenizer"
    broken.mkdir()
    (broken / "tokenizer.json").write_text("{")
    with (
        pytest.raises(ChildDied, match=r"status 1; the end of .*server\.log:\n(.|\n)*Traceback"),
        launch(tmp_path, policy_of(tokenizer=str(broken)), admin_key="a", runner_key="r"),
    ):
        pass


def test_received_tokens_are_counted_on_after_a_restart_and_what_a_dead_trainer_left_is_ended(tmp_path) -> None:
    request = RolloutRequest(task=1, rollout_id="r1.run", config=RolloutConfig(max_attempts=1))
    with launch(tmp_path, POLICY, admin_key="a", runner_key="r") as serving:
        store = HttpStore(serving.url, "a")
        store.enqueue([request])
        (first,) = store.claim("w")
        assert store.state()["models"]["policy"]["tokens_received"] == 0
        os.kill(serving.pid, signal.SIGKILL)
    # One call is in the store, another only in the journal of the server that was killed.
    stored = SqlStore(f"sqlite:///{tmp_path / 'store.db'}")
    stored.add_spans([span(first.attempt.attempt_id, 0, 5)])
    stored.close()
    asyncio.run(journal(tmp_path / "gateway.journal", span(first.attempt.attempt_id, 1, 7)))
    with launch(tmp_path, POLICY, admin_key="a", runner_key="r") as serving:
        store = HttpStore(serving.url, "a")
        assert store.state()["models"]["policy"]["tokens_received"] == 12
        assert store.rollout("r1.run").status == "running"
        store.begin_run("run", "policy", 60)
        trace = store.traces(["r1.run"])["r1.run"]
        assert (trace.rollout.status, trace.attempts[0].attempt.status) == ("queued", "lost")
        assert trace.attempts[0].attempt.error.type == "SessionEnded"
        assert len(trace.attempts[0].spans) == 2
        assert store.claim("w") == [], "nobody has asked for it since"
        store.enqueue([request])
        (second,) = store.claim("w")
    with launch(tmp_path, POLICY, admin_key="a", runner_key="r") as serving:
        store = HttpStore(serving.url, "a")
        assert store.state()["models"]["policy"]["tokens_received"] == 12
        store.finish("r1.run", second.attempt.attempt_id, Finish(status="succeeded", reward=1.0))


def test_two_servers_on_one_sqlite_file_are_refused(tmp_path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    (two / "store.db").symlink_to(one / "store.db")
    with launch(one, POLICY, admin_key="a", runner_key="r"):
        told = refusal(two)
    assert "has a server already, and a file has one: give this one a --store of its own" in told


def test_a_journal_is_stored_where_it_was_written_for_or_nowhere(tmp_path) -> None:
    with launch(tmp_path, POLICY, admin_key="a", runner_key="r") as serving:
        store = HttpStore(serving.url, "a")
        store.enqueue([RolloutRequest(task=1, rollout_id="r1.run")])
        (claim,) = store.claim("w")
        os.kill(serving.pid, signal.SIGKILL)
    waiting = tmp_path / "gateway.journal"
    asyncio.run(journal(waiting, span(claim.attempt.attempt_id, 0, 5)))
    held = waiting.read_bytes()
    own = [file.rename(tmp_path / f"own-{file.name}") for file in tmp_path.glob("store.db*")]
    assert refusal(tmp_path).startswith(f"{waiting} holds calls that wait for another store than sqlite:///{tmp_path}")
    assert waiting.read_bytes() == held
    for file in tmp_path.glob("store.db*"):
        file.unlink()
    for file in own:
        file.rename(tmp_path / file.name.removeprefix("own-"))
    with launch(tmp_path, POLICY, admin_key="a", runner_key="r") as serving:
        assert len(HttpStore(serving.url, "a").traces(["r1.run"])["r1.run"].attempts[0].spans) == 1
    (tmp_path / "store.db").unlink()
    with launch(tmp_path, POLICY, admin_key="a", runner_key="r"):  # nothing waits: a folder may be used again
        pass
    assert "is another one than that of the last server" in (tmp_path / "server.log").read_text()


def test_a_server_that_is_started_anew_hands_out_nothing_of_a_run_until_it_attaches_again(tmp_path, eventually) -> None:
    def claimed(store: HttpStore) -> list[str]:
        return [claim.rollout.rollout_id for claim in store.claim("w", limit=9)]

    def asked(*names: str) -> list[RolloutRequest]:
        return [RolloutRequest(task=1, rollout_id=name) for name in names]

    with launch(tmp_path, POLICY, admin_key="a", runner_key="r") as serving:
        store = HttpStore(serving.url, "a")
        store.begin_run("run", "policy", 4)
        store.enqueue(asked("r0.run", "r1.run"))
        failed, _ = store.claim("w", limit=2)
        store.enqueue(asked("r2.run", "r1.other"))
        os.kill(serving.pid, signal.SIGKILL)
    with launch(tmp_path, POLICY, admin_key="a", runner_key="r") as serving:
        store = HttpStore(serving.url, "a")
        assert claimed(store) == ["r1.other"]
        with pytest.raises(Conflict, match="run run is not attached here"):
            store.enqueue(asked("r2.run"))
        lost = Finish(status="failed", error=ErrorInfo(type="Lost", message="", infrastructure=True))
        store.finish("r0.run", failed.attempt.attempt_id, lost)
        assert store.rollout("r0.run").status == "queued", "for a second, and then it could be claimed"
        assert store.claim("w", wait_seconds=2.5) == []
        assert store.rollout("r1.run").status == "running", "its trainer may be there again within its lease"
        eventually(lambda: store.rollout("r1.run").status != "running")
        assert claimed(store) == [], "nobody has asked for them since"
        store.begin_run("run", "policy", 60)
        store.enqueue(asked("r2.run"))
        assert claimed(store) == ["r2.run"]
        store.end_run("run")
        store.enqueue(asked("r3.run"))
    with launch(tmp_path, POLICY, admin_key="a", runner_key="r") as serving:
        assert claimed(HttpStore(serving.url, "a")) == ["r3.run"], "the run had ended before"


def span(attempt_id: str, number: int, tokens: int):
    return to_span(
        Call(
            call_id=f"c{number}",
            rollout_id="r1.run",
            attempt_id=attempt_id,
            number=number,
            model="policy",
            prompt_ids=[1],
            response_ids=[2] * tokens,
            logprobs=None,
            versions=[],
            temperature=1.0,
            finish_reason="stop",
        )
    )


async def journal(path: Path, record) -> None:
    """A journal with one record that reached no store."""

    class Gone:
        async def add_spans(self, spans) -> None:
            await asyncio.sleep(1000)

    recorder = Recorder(path, Gone())
    await recorder.start()
    recorder.record(record)
    assert path.stat().st_size > 0


@pytest.mark.parametrize("how", ["eof", "sigterm"])
def test_it_stops_cleanly_on_sigterm_and_at_the_end_of_stdin(tmp_path, how) -> None:
    settings = {"store": f"sqlite:///{tmp_path / 'run.db'}", "run_dir": str(tmp_path), "admin_key": "a"}
    settings |= {"runner_key": "r", "model": "m", "tokenizer": str(TOKENIZER), "renderer": "qwen3"}
    with subprocess.Popen(
        [sys.executable, "-m", "lightning_rl.control_plane.process"],
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


def test_the_server_loads_nothing_of_training_and_of_configurations() -> None:
    code = (
        "import sys, lightning_rl.control_plane.process\n"
        "heavy = 'torch', 'transformers', 'pydantic_ai', 'litellm', 'hydra', 'openai'\n"
        "print([module for module in heavy if module in sys.modules])\n"
        "from openai import OpenAI; from openai.types.chat import ChatCompletion; print(OpenAI.__module__)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert answer.stdout.split() == [b"[]", b"openai"]


def test_where_another_thread_could_meet_its_stand_in_the_whole_package_is_loaded() -> None:
    code = (
        "import sys, threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "import lightning_rl_proxy.rendering.load\n"
        "from openai import AsyncOpenAI; print(AsyncOpenAI is sys.modules['renderers.client'].AsyncOpenAI)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert answer.stdout.split() == [b"True"]
