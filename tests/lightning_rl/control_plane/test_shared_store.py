"""Two servers on one database: a long poll hears what the other did, and what the other ended is closed here."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import urllib3

from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Finish, RolloutConfig, RolloutRequest
from lightning_rl.store.sql import SqlStore
from tests.lightning_rl.store.backends import served

Pair = tuple[HttpStore, HttpStore]


@pytest.fixture
def pair(postgres_url: str, tmp_path: Path) -> Iterator[Pair]:
    """Clients of two servers."""
    with ExitStack() as opened:
        clients = []
        for name in ("one", "two"):
            store = SqlStore(postgres_url)
            opened.callback(store.close)
            (tmp_path / name).mkdir()
            url = opened.enter_context(served(store, tmp_path / name, sweep_seconds=0.05))
            clients.append(HttpStore(url, "admin"))
        yield clients[0], clients[1]


def answer_of(call: Any) -> tuple[threading.Thread, list[Any]]:
    """A call in a thread of its own, and its answer when that has ended."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    return thread, answers


def test_a_claim_hears_of_rollouts_that_were_enqueued_elsewhere(pair: Pair) -> None:
    one, two = pair
    thread, claimed = answer_of(lambda: one.claim("w", wait_seconds=120))
    thread.join(0.5)  # it waits
    two.enqueue([RolloutRequest(task=1, rollout_id="r1")])
    thread.join()
    assert [claim.rollout.rollout_id for claim in claimed[0]] == ["r1"]


def test_a_wait_hears_of_rollouts_that_ended_elsewhere(pair: Pair) -> None:
    one, two = pair
    claim = two.start(RolloutRequest(task=1, rollout_id="r1"))
    thread, ended = answer_of(lambda: one.wait(["r1"], 120))
    thread.join(0.5)  # it waits
    two.finish("r1", claim.attempt.attempt_id, Finish(status="succeeded", reward=1.0))
    thread.join()
    assert [(rollout.rollout_id, rollout.reward) for rollout in ended[0]] == [("r1", 1.0)]


def test_an_attempt_that_is_tried_again_elsewhere_is_closed_here(pair: Pair, eventually: Any) -> None:
    one, two = pair
    two.enqueue([RolloutRequest(task=1, rollout_id="r1")])
    [first] = one.claim("w.0")
    two.workers_died(["w.0"])
    [second] = two.claim("w.1", wait_seconds=30)
    eventually(lambda: one.state()["open_attempts"] == 0)
    assert two.state()["open_attempts"] == 1
    assert first.attempt.attempt_id != second.attempt.attempt_id


def test_an_attempt_past_its_deadline_is_left_to_the_server_that_has_its_calls(
    pair: Pair, postgres_url: str, eventually: Any
) -> None:
    """The other would end it without the records that are still on their way."""
    one, two = pair
    config = RolloutConfig(timeout_seconds=0.1, max_attempts=1)
    foreign = SqlStore(postgres_url)  # whose attempt no server holds: its own may be restarting
    foreign.start(RolloutRequest(task=1, rollout_id="r1", config=config), "w")
    one.start(RolloutRequest(task=1, rollout_id="r2", config=config))
    eventually(lambda: two.rollout("r2").status == "failed")
    assert two.rollout("r2").error.type == "DeadlineExceeded"
    assert two.rollout("r1").status == "running"
    earlier = sa.text("UPDATE attempts SET deadline_at = deadline_at - 60")
    foreign._database.write(lambda connection: connection.execute(earlier))
    foreign.close()
    eventually(lambda: two.rollout("r1").status == "failed")
    ended = two.rollout("r1")
    assert (ended.error.type, ended.error.infrastructure, ended.counting_attempt_id) == ("ServerGone", True, None)


def test_an_attempt_that_was_ended_elsewhere_is_closed_here(pair: Pair, eventually: Any) -> None:
    one, two = pair
    one.publish({"main_llm": {"type": "proxy_llm", "model": "m"}})
    llm = one.start(RolloutRequest(task=1, rollout_id="r1")).resources["main_llm"]
    headers = {"authorization": f"Bearer {llm['api_key']}", "content-type": "application/json"}

    def call() -> int:
        body = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
        url = f"{llm['base_url']}/chat/completions"
        return urllib3.request("POST", url, json=body, headers=headers, retries=False).status

    assert call() != 409
    assert one.state()["open_attempts"] == 1
    two.cancel("r1")
    eventually(lambda: one.state()["open_attempts"] == 0)
    assert call() == 409
