"""`lightning-rl rollouts` on a run's folder, its run alive or over, and at a running server."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lightning_rl.cli import app
from lightning_rl.cli.rollouts import ADMIN_KEY, KEY_FILE, REPEATS, URL_FILE
from lightning_rl.control_plane.launch import launch
from lightning_rl.errors import Explained
from lightning_rl.files import owned
from lightning_rl.inspect.rollout_source import PagedStore, RolloutFolder, RolloutServer, RolloutServers, Which, tail
from lightning_rl.store.contract import ErrorInfo, Finish, Rollout, RolloutConfig, RolloutRequest
from lightning_rl.store.errors import Unreachable
from lightning_rl.store.sql import SqlStore
from tests.adapters.words import say
from tests.lightning_rl.inspect.runs import TALK, open_store, record
from tests.lightning_rl.runner.conftest import policy_of

BUG = ErrorInfo(type="KeyError", message="'gold'", traceback="Traceback\n  File agent.py\nKeyError: 'gold'")
LATE = 30.0  # seconds, after which a test that waits has failed


def run(*words: str, **environment: str) -> str:
    done = CliRunner().invoke(app, ["rollouts", *words], catch_exceptions=False, env={ADMIN_KEY: "", **environment})
    assert done.exit_code == 0, done.output
    return done.stdout


def lines(*words: str, **environment: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run(*words, "--json", **environment).splitlines()]


def ids(found: list[dict[str, Any]]) -> list[str]:
    return [rollout["rollout_id"] for rollout in found]


def refusal(*words: str, **environment: str) -> str:
    with pytest.raises(Explained) as told:
        run(*words, **environment)
    assert "\n" not in str(told.value)
    return str(told.value)


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """A run that goes on: its store is open."""
    with open_store(tmp_path / "run") as store:
        record(store, "train-1-0", TALK, reward={"reward": 0.5, "polite": 1.0})
        record(store, "train-1-1", [say(1, "a", "b")], error=BUG)
        record(store, "val-1-0", [say(1, "how many", "three")], mode="val")
        store.enqueue([RolloutRequest(task="waits", rollout_id="train-2-0", group_id="train-2.4f")])
        yield tmp_path / "run"


def test_the_newest_are_listed_last_and_filters_narrow_them(run_dir: Path) -> None:
    where = ("--run-dir", str(run_dir))
    assert ids(lines("list", *where)) == ["train-1-0", "train-1-1", "val-1-0", "train-2-0"]
    assert ids(lines("list", *where, "--limit", "2")) == ["val-1-0", "train-2-0"]
    assert ids(lines("list", *where, "--mode", "train", "--status", "failed")) == ["train-1-1"]
    for group, there in (("train-2", ["train-2-0"]), ("train-2.4f", ["train-2-0"]), ("train", []), ("train-2.4", [])):
        assert ids(lines("list", *where, "--group", group)) == there
    head, first, second, *_ = run("list", *where).splitlines()
    assert head.split() == ["rollout", "status", "mode", "group", "tries", "reward", "seconds", "error", "and", "task"]
    assert first.split()[:6] == ["train-1-0", "succeeded", "train", "-", "1", "0.5"]
    assert "KeyError: 'gold'" in second
    assert second.rstrip().endswith('{"q":"train-1-1"}')
    for limit, told in (("3", "these are the newest 3; more with --limit 30\n"), ("4", "")):
        assert CliRunner().invoke(app, ["rollouts", "list", *where, "--limit", limit]).stderr == told
    assert run("list", *where, "--status", "running") == "no such rollouts\n"
    assert CliRunner().invoke(app, ["rollouts", "list", *where, "--status", "fail"]).exit_code == 2


def test_an_address_that_is_no_url_is_refused_at_once() -> None:
    assert refusal("list", "--url", "foo") == "--url foo is no URL; give http://... or https://..."


@pytest.mark.parametrize("columns", [40, 80, 100, 120])
def test_in_a_narrow_terminal_the_task_alone_is_cut(run_dir: Path, columns: int, monkeypatch: Any) -> None:
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    told = run("list", "--run-dir", str(run_dir), COLUMNS=str(columns)).splitlines()
    assert [line.split()[:6] for line in told[1:3]] == [
        ["train-1-0", "succeeded", "train", "-", "1", "0.5"], ["train-1-1", "failed", "train", "-", "1", "-"],
    ]  # fmt: skip
    assert max(map(len, told[1:])) <= max(columns, 80)


def test_a_rollout_is_shown_with_its_attempts_rewards_calls_and_traceback(run_dir: Path) -> None:
    where = ("--run-dir", str(run_dir))
    shown = run("show", "train-1-0", *where)
    assert "rewards   reward 0.5, polite 1" in shown
    assert "  call 2: policy, +1 prompt, 1 sampled, stop" in shown
    assert "    asked     d\n    answered  e\n" in shown
    assert f"Next: lightning-rl explain train-1-0 --run-dir {run_dir}" in shown
    assert f"lightning-rl replay {run_dir} train-1-0" in shown
    failed = run("show", "1-1", *where)
    assert "failed" in failed
    assert "  error     KeyError: 'gold'\n    Traceback\n      File agent.py\n    KeyError: 'gold'" in failed
    [told] = lines("show", "train-1-1", *where)
    assert told["attempts"][0]["attempt"]["error"]["traceback"] == BUG.traceback
    assert told["attempts"][0]["calls"][0]["answered"] == "b"
    waits = run("show", "train-2-0", *where)
    assert "queued" in waits
    assert "replay" not in waits


def test_tail_of_a_folder_tells_each_that_ends_once_old_and_new(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for number in range(4):
            record(store, f"old-{number}", [])
        store.enqueue([RolloutRequest(task=1, rollout_id="first"), RolloutRequest(task=2, rollout_id="second")])
        ended = tail(RolloutFolder(tmp_path), Which(), before=2)
        assert [next(ended).rollout_id, next(ended).rollout_id] == ["old-2", "old-3"]
        one, two = store.claim("worker", limit=2)
        store.finish("second", two.attempt.attempt_id, Finish(status="succeeded", reward=1.0))
        assert next(ended).rollout_id == "second"
        store.enqueue([RolloutRequest(task=3, rollout_id="third")])
        store.cancel("third")
        store.finish("first", one.attempt.attempt_id, Finish(status="succeeded", reward=1.0))
        assert {next(ended).rollout_id, next(ended).rollout_id} == {"first", "third"}


def test_tail_goes_on_until_ctrl_c(run_dir: Path) -> None:
    command = [sys.executable, "-m", "lightning_rl", "rollouts", "tail", "--run-dir", str(run_dir), "--mode", "train"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline().split()[0] == "train-1-0"
        assert process.stdout.readline().split()[0] == "train-1-1"
        with closing(SqlStore(f"sqlite:///{run_dir / 'store.db'}")) as store:
            store.cancel("train-2-0")
        assert process.stdout.readline().split()[:2] == ["train-2-0", "cancelled"]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130
        assert errors == "nobody works on this run now; what goes on with it is waited for, until Ctrl-C\n"
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def test_a_folder_whose_run_is_over_takes_no_orders(run_dir: Path) -> None:
    for order in ("cancel", "retry"):
        assert "this needs a running server" in refusal(order, "train-2-0", "--run-dir", str(run_dir))
    (run_dir / KEY_FILE).write_text("secret")
    (run_dir / URL_FILE).write_text("http://127.0.0.1:9")
    assert "no run goes on in" in refusal("cancel", "train-2-0", "--run-dir", str(run_dir))


# At a server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A server whose engine is gone, and its folder, which a run holds."""
    folder = tmp_path_factory.mktemp("server")
    gone = {"model": "policy", "kind": "embedded", "url": "http://127.0.0.1:9"}
    with owned(folder), launch(folder, policy_of(engines=[gone]), admin_key="admin", runner_key="runner") as serving:
        (folder / KEY_FILE).write_text("admin")
        (folder / URL_FILE).write_text(serving.url)
        yield serving.url, folder


@pytest.fixture
def store(server: tuple[str, Path]) -> Iterator[PagedStore]:
    with closing(PagedStore(server[0], "admin")) as store:
        yield store


def test_a_server_is_read_with_its_admin_key(server: tuple[str, Path], store: PagedStore) -> None:
    url, folder = server
    store.enqueue([RolloutRequest(task=i, rollout_id=f"read-{i}", group_id="read") for i in range(3)])
    asked = ("list", "--url", url, "--group", "read", "--limit", "2")
    assert ids(lines(*asked, **{ADMIN_KEY: "admin"})) == ["read-1", "read-2"]
    assert ids(lines(*asked, "--run-dir", str(folder))) == ["read-1", "read-2"]
    store.enqueue(
        [RolloutRequest(task=1, rollout_id=f"read-0.{name}", group_id=f"group.{name}") for name in ("a", "b")]
    )
    of_run = RolloutServer(store, "b")
    for group in ("group", "group.b"):
        assert [each.rollout_id for each in of_run.newest(Which(group_id=group), 5)] == ["read-0.b"]
    assert "rollout read-0: queued" in run("show", "read-0", "--url", url, **{ADMIN_KEY: "admin"})
    assert "give its whole id" in refusal("show", "read", "--url", url, **{ADMIN_KEY: "admin"})
    assert ADMIN_KEY in refusal(*asked)
    assert f"the admin key in {ADMIN_KEY} is not that server's" in refusal(*asked, **{ADMIN_KEY: "wrong"})


def test_rollouts_are_cancelled_at_the_server_of_a_run_that_lives(server: tuple[str, Path], store: PagedStore) -> None:
    _, folder = server
    store.enqueue([RolloutRequest(task=1, rollout_id="c-0"), RolloutRequest(task=1, rollout_id="c-1")])
    claim = store.start(RolloutRequest(task=2, rollout_id="c-2"))
    store.finish("c-2", claim.attempt.attempt_id, Finish(status="succeeded", reward=1.0))
    told = run("cancel", "c-0", "c-2", "--run-dir", str(folder))
    assert told == "c-0: cancelled\nc-2: had ended before, succeeded\n"
    assert [store.rollout(f"c-{i}").status for i in range(3)] == ["cancelled", "queued", "succeeded"]
    store.cancel("c-1")


def test_a_retry_is_a_new_rollout_of_the_same_and_the_old_one_stays(
    server: tuple[str, Path], store: PagedStore
) -> None:
    url, _ = server
    config = RolloutConfig(max_attempts=2, timeout_seconds=7)
    asked = RolloutRequest(
        task={"q": 1}, mode="val", rollout_id="again", group_id="g", agent="mine", config=config, metadata={"a": 1}
    )
    claim = store.start(asked)
    assert "wait for its end" in refusal("retry", "again", "--url", url, **{ADMIN_KEY: "admin"})
    store.finish("again", claim.attempt.attempt_id, Finish(status="failed", error=BUG))
    before = store.rollout("again")
    made = run("retry", "again", "--url", url, **{ADMIN_KEY: "admin"}).split()
    assert made[1:] == ["repeats", "again"]
    new = store.rollout(made[0])
    assert (new.status, new.task, new.mode, new.agent, new.config) == ("queued", {"q": 1}, "val", "mine", config)
    assert (new.resources_id, new.group_id, new.metadata) == (before.resources_id, None, {"a": 1, REPEATS: "again"})
    assert store.rollout("again") == before
    store.cancel(new.rollout_id)


def test_what_a_training_step_asked_for_is_not_retried(server: tuple[str, Path], store: PagedStore) -> None:
    store.enqueue([RolloutRequest(task=1, rollout_id="t-0", metadata={"step": 7})])
    store.cancel("t-0")
    told = refusal("retry", "t-0", "--url", server[0], **{ADMIN_KEY: "admin"})
    assert "of step 7 of a training run" in told
    assert "lightning-rl explain t-0" in told


def test_tail_at_a_server_waits_and_misses_none(server: tuple[str, Path], store: PagedStore) -> None:
    store.enqueue([RolloutRequest(task=1, rollout_id="e-0"), RolloutRequest(task=1, rollout_id="e-1", mode="val")])
    with closing(PagedStore(server[0], "admin")) as other:
        ended = tail(RolloutServer(other), Which(mode="train"))

        def end_some() -> None:
            time.sleep(0.5)
            store.cancel("e-1")
            store.cancel("e-0")
            store.enqueue([RolloutRequest(task=1, rollout_id="e-2")])
            store.cancel("e-2")

        thread = threading.Thread(target=end_some)
        thread.start()
        # In which order depends on when it looks: what is new and has ended is told before what was waited for.
        assert {next(ended).rollout_id, next(ended).rollout_id} == {"e-0", "e-2"}
        thread.join(LATE)


def test_tail_waits_for_a_server_that_is_started_again(
    server: tuple[str, Path], store: PagedStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lightning_rl.inspect.rollout_source._AWAY_SECONDS", 0.01)
    store.enqueue([RolloutRequest(task=1, rollout_id="f-0")])
    ended = tail(RolloutServer(store), Which())
    there = store.page
    answers = iter([there, None, None])

    def page(cursor: str | None, limit: int) -> Any:
        if (answer := next(answers, there)) is not None:
            return answer(cursor, limit)
        store.cancel("f-0")
        raise Unreachable("nobody is there")

    monkeypatch.setattr(store, "page", page)
    assert next(ended).rollout_id == "f-0"
    assert [log for log in caplog.messages if "away" in log] == [
        "waiting for the server, which is away: nobody is there"
    ]


class AwayServer(RolloutServer):
    def arrived(self) -> Iterator[Rollout]:
        raise Unreachable("nobody is there")

    ended = newest = lambda self, *_: next(self.arrived())


def test_of_several_servers_one_that_is_away_hides_none_of_the_others(
    store: PagedStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.enqueue([RolloutRequest(task=1, rollout_id="g-0")])
    place = RolloutServers([AwayServer(store), RolloutServer(store)])
    assert "g-0" in {rollout.rollout_id for rollout in place.arrived()}
    store.cancel("g-0")
    assert [rollout.rollout_id for rollout in place.ended(["g-0"])] == ["g-0"]
    assert caplog.messages == ["going on without a server that is away: nobody is there"]
    with pytest.raises(Unreachable):
        list(RolloutServers([AwayServer(store), AwayServer(store)]).arrived())


def test_a_page_that_was_not_full_is_gone_on_with(
    server: tuple[str, Path], store: PagedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_rl.inspect.rollout_source._PAGE", 3)
    place = RolloutServer(store)
    before = len(list(place.arrived()))
    assert before == len(list(store.rollouts()))
    told = []
    for number in range(7):
        store.enqueue([RolloutRequest(task=1, rollout_id=f"p-{number}")])
        told.append([rollout.rollout_id for rollout in place.arrived()])
    assert told == [[f"p-{number}"] for number in range(7)]
    assert list(place.arrived()) == []


def test_frozen_calls_are_marked(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        record(store, "r", [say(1, "a", "b", trainable=False)])
    assert "call 1: policy, +1 prompt, 1 sampled, stop, frozen" in run("show", "r", "--run-dir", str(tmp_path))
    assert not (tmp_path / "store.db-wal").exists()
    assert os.access(tmp_path / "store.db", os.R_OK)
