"""Servers that are not ours: one that ends and is started anew, by whom it may be, has the present weights before it
takes calls, and calls wait where no other one is left."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_rl.inference.vllm import replicas as module
from lightning_rl.inference.vllm.control import Control, Unreached
from lightning_rl.inference.vllm.replicas import Member, Replicas

GIVEN, NONE_GIVEN = "given", "none given"


class Servers:
    """Servers by their address, and the policy that they sample."""

    def __init__(self, *urls: str) -> None:
        self.weights: dict[str, str] = dict.fromkeys(urls, GIVEN)
        self.down: set[str] = set()
        self.in_training = False
        self.told: list[Any] = []
        self.news = threading.Event()

    def end(self, url: str) -> None:
        self.down.add(url)

    def start(self, url: str) -> None:
        self.weights[url] = NONE_GIVEN
        self.down.discard(url)

    def ask(self, control: Control) -> str:
        if control.url in self.down:
            raise Unreached(f"vLLM at {control.url} does not answer")
        return self.weights[control.url]

    def give(self, control: Control) -> None:
        self.ask(control)
        self.weights[control.url] = GIVEN

    # As a policy.

    def has_weights(self, control: Control) -> bool:
        return self.ask(control) == GIVEN

    def renew(self, control: Control) -> bool:
        self.told.append(f"renew {control.url}")
        if not self.in_training:
            self.give(control)
        return not self.in_training

    def tell_outage(self, away: bool) -> None:
        self.told.append(away)
        self.news.set()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("WATCH_SECONDS", 0.001), ("_SILENT_SECONDS", 0.0), ("_AGAIN_SECONDS", 0.001)):
        monkeypatch.setattr(module, name, seconds)


Watched = Callable[..., tuple[Servers, Replicas]]


@pytest.fixture
def watched() -> Iterator[Watched]:
    made: list[Replicas] = []

    def watch(*urls: str) -> tuple[Servers, Replicas]:
        servers, replicas = Servers(*urls), Replicas([Member(url, None) for url in urls])
        replicas.policies.append(servers)
        made.append(replicas)
        replicas.start()
        return servers, replicas

    yield watch
    for replicas in made:
        replicas.close()


def test_a_server_that_was_started_anew_is_given_the_present_weights(watched: Watched) -> None:
    servers, replicas = watched("http://a", "http://b")
    servers.end("http://b")
    until(lambda: replicas.members[1].away)
    servers.start("http://b")
    until(lambda: not replicas.members[1].away)
    assert servers.weights["http://b"] == GIVEN
    assert servers.told == ["renew http://b"]  # the other one had calls: none waited


def test_a_server_that_came_back_before_anybody_missed_it_is_given_them_too(watched: Watched) -> None:
    servers, _ = watched("http://a", "http://b")
    servers.start("http://b")
    until(lambda: servers.weights["http://b"] == GIVEN)


def test_calls_wait_while_none_is_left_and_go_on_with_the_first_that_has_the_weights(watched: Watched) -> None:
    servers, _ = watched("http://a")
    servers.end("http://a")
    assert servers.news.wait(10)
    assert servers.told == [True]
    servers.news.clear()
    servers.start("http://a")
    assert servers.news.wait(10)
    assert servers.told == [True, "renew http://a", False]


def test_weights_in_training_are_not_given_and_calls_wait_for_the_update(watched: Watched) -> None:
    servers, replicas = watched("http://a")
    servers.in_training = True
    servers.start("http://a")
    until(lambda: servers.told.count("renew http://a") > 2)
    assert [each for each in servers.told if isinstance(each, bool)] == [True]
    with replicas.lock:
        servers.in_training = False
        replicas.order(replicas.members[0], servers.give, lambda _: None)
    replicas.recovered()
    until(lambda: not replicas.members[0].away)
    assert [each for each in servers.told if isinstance(each, bool)] == [True, False]


def test_an_update_waits_for_a_server_that_ended_and_forgets_what_it_was_told_before(watched: Watched) -> None:
    servers, replicas = watched("http://a")
    servers.end("http://a")
    forgotten: list[str] = []

    def forget(control: Control) -> None:
        forgotten.append(control.url)
        if len(forgotten) == 3:
            servers.start("http://a")

    replicas.order(replicas.members[0], servers.give, forget)
    assert forgotten == ["http://a"] * 3
    assert servers.weights["http://a"] == GIVEN


def test_a_server_that_stays_away_ends_the_run_and_the_update(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AWAY_SECONDS", 0.01)
    servers, replicas = watched("http://a")
    servers.end("http://a")
    advice = "vLLM at http://a does not answer; it was waited for, .*: start the server again, and then resume the run"
    with pytest.raises(Unreached, match=advice):
        replicas.order(replicas.members[0], servers.give, lambda _: None)
    with pytest.raises(Unreached, match=advice):
        until(lambda: replicas.check() is not None)


def test_a_server_that_stays_away_ends_no_run_that_has_another(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AWAY_SECONDS", 0.01)
    servers, replicas = watched("http://a", "http://b")
    servers.end("http://b")
    until(lambda: replicas.members[1].away)
    asked = threading.Event()
    servers.has_weights = lambda control: asked.set() or Servers.has_weights(servers, control)  # type: ignore[func-returns-value, method-assign]
    assert asked.wait(10)
    replicas.check()


def until(holds: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if holds():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it never came so")
