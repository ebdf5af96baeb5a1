"""A server that stands still for longer than a lease and a deadline; one that finds another at work in its folder."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from lightning_rl.control_plane import process
from lightning_rl.control_plane.launch import ServerNotStarted, launch
from lightning_rl.control_plane.process import CannotStart
from lightning_rl.files import owned
from lightning_rl.runner.leases import ActiveClaims
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Finish, RolloutConfig, RolloutRequest
from tests.lightning_rl.control_plane.test_process import policy_of


@pytest.mark.long
def test_no_attempt_is_lost_while_the_server_stands_still(tmp_path: Path) -> None:
    config = RolloutConfig(unresponsive_seconds=2, timeout_seconds=3)
    with launch(tmp_path, policy_of(), admin_key="a", runner_key="r") as serving:
        store = HttpStore(serving.url, "a")
        store.enqueue([RolloutRequest(task=1, rollout_id="r1", config=config)])
        (claim,) = store.claim("w")
        active = ActiveClaims()
        active.add(claim)
        threading.Thread(target=active.keep_leases, args=(HttpStore(serving.url, "r"),), daemon=True).start()
        os.kill(serving.pid, signal.SIGSTOP)
        time.sleep(5)
        os.kill(serving.pid, signal.SIGCONT)
        time.sleep(1.5)  # some sweeps
        store.finish("r1", claim.attempt.attempt_id, Finish(status="succeeded", reward=1.0))
        active.remove(claim)
        ended = store.rollout("r1")
        assert (ended.status, ended.attempt_count) == ("succeeded", 1)


def test_a_server_waits_for_an_earlier_one_in_its_folder(tmp_path: Path) -> None:
    """As after the death of a trainer, whose server still stores what it has recorded."""
    held = owned(tmp_path, lock="server.lock")
    held.__enter__()
    answers = threading.Event()

    def serve() -> None:
        with launch(tmp_path, policy_of(), admin_key="a", runner_key="r"):
            answers.set()

    serving = threading.Thread(target=serve)
    serving.start()
    assert not answers.wait(8)
    held.__exit__(None, None, None)
    assert answers.wait(60)
    serving.join()


def test_a_server_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_EARLIER_SERVER_SECONDS", 0.1)
    with (
        owned(tmp_path, lock="server.lock"),
        pytest.raises(CannotStart, match="another process is using the run folder"),
        process._alone_in(tmp_path),
    ):
        pass
    with (
        pytest.raises(ServerNotStarted, match="cannot be written"),
        launch(tmp_path / "nowhere", policy_of(), admin_key="a", runner_key="r"),
    ):
        pass
