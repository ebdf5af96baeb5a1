"""Servers that are not ours: one that ends and is started anew, by whom it may be, has the present weights before it
takes calls, and calls wait where no other one is left."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_rl.inference.servers import replicas as module
from lightning_rl.inference.servers.errors import ServerRefused, Unreached, WeightsRefused
from lightning_rl.inference.servers.replicas import Member, Replicas
from lightning_rl.inference.vllm.control import Control

GIVEN, NONE_GIVEN = "given", "none given"


class Servers:
    """Servers by their address, and the policy that they sample."""

    def __init__(self, *urls: str) -> None:
        self.weights: dict[str, str] = dict.fromkeys(urls, GIVEN)
        self.down: set[str] = set()
        self.unknowing = set(urls)  # those that want to be told again what is sent
        self.in_training = False
        self.looks = 0
        self.told: list[Any] = []
        self.news = threading.Event()

    def end(self, url: str) -> None:
        self.down.add(url)

    def start(self, url: str) -> None:
        self.weights[url] = NONE_GIVEN
        self.unknowing.add(url)
        self.down.discard(url)

    def ask(self, control: Control) -> str:
        if control.url in self.down:
            raise Unreached(f"vLLM at {control.url} does not answer")
        return self.weights[control.url]

    def give(self, control: Control) -> None:
        self.ask(control)
        if control.url in self.unknowing:
            raise WeightsRefused("it was not told what comes")
        self.weights[control.url] = GIVEN

    def forget(self, control: Control) -> None:
        self.unknowing.discard(control.url)  # it is told when it is given weights

    def hang(self, *urls: str) -> threading.Event:
        """From now on these servers answer when the event is set; one was asked already."""
        ask, asked, ends = self.ask, threading.Event(), threading.Event()

        def wait(control: Control) -> str:
            if control.url in urls:
                asked.set()
                ends.wait(10)
            return ask(control)

        self.ask = wait  # type: ignore[method-assign]
        assert asked.wait(10)
        return ends

    # As a policy.

    def has_weights(self, control: Control) -> bool:
        self.looks += 1
        return self.ask(control) == GIVEN

    def renew(self, control: Control) -> bool:
        self.told.append(f"renew {control.url}")
        self.forget(control)
        if not self.in_training:
            self.give(control)
        return not self.in_training

    def tell_outage(self, away: bool) -> None:
        if away not in self.told[-1:]:  # that none is left is told again and again
            self.told.append(away)
            self.news.set()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WATCH_SECONDS", 0.001)
    monkeypatch.setattr(module, "_REFUSED_SECONDS", 0.001)


Watched = Callable[..., tuple[Servers, Replicas]]


@pytest.fixture
def watched() -> Iterator[Watched]:
    made: list[Replicas] = []

    def watch(*urls: str) -> tuple[Servers, Replicas]:
        servers, replicas = Servers(*urls), Replicas([Member(Control(url)) for url in urls])
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
    assert servers.told == ["renew http://b"]  # the other one was there: no call waited


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
    assert set(servers.told) == {True, "renew http://a"}
    with replicas.lock:
        servers.in_training = False
        replicas.order(replicas.members[0], servers.give, servers.forget)
        assert servers.weights["http://a"] == NONE_GIVEN  # the watcher gives it those of all policies
    until(lambda: servers.told[-1] is False)
    assert not replicas.members[0].away


def test_an_update_does_not_wait_for_a_server_that_ends_which_is_given_the_weights_when_it_is_back(
    watched: Watched,
) -> None:
    servers, replicas = watched("http://a", "http://b")
    with replicas.lock:
        servers.end("http://b")
        for member in replicas.members:
            servers.forget(member.control)
            replicas.order(member, servers.give, servers.forget)
    assert [member.away for member in replicas.members] == [False, True]
    servers.start("http://b")
    until(lambda: not replicas.members[1].away)
    assert servers.weights["http://b"] == GIVEN


def test_a_server_whose_update_was_broken_off_is_given_the_weights_again_whatever_it_says(watched: Watched) -> None:
    """It labels them before it forgets what older ones have computed."""
    servers, replicas = watched("http://a")

    def give(control: Control) -> None:
        servers.forget(control)
        servers.give(control)
        raise Unreached("the connection broke")

    with replicas.lock:
        replicas.order(replicas.members[0], give, servers.forget)
        assert servers.weights["http://a"] == GIVEN
    until(lambda: not replicas.members[0].away)
    assert "renew http://a" in servers.told


def test_an_update_tries_a_server_that_was_missed_just_now(watched: Watched) -> None:
    servers, replicas = watched("http://a", "http://b")
    with replicas.lock:
        servers.end("http://b")
        until(lambda: replicas.members[1].away)
        servers.down.clear()  # a connection was reset: it has its weights, and its calls
        servers.weights = dict.fromkeys(servers.weights, NONE_GIVEN)  # new ones are there
        for member in replicas.members:
            servers.forget(member.control)
            replicas.order(member, servers.give, servers.forget)
        assert not replicas.urls_away()
    assert "renew http://b" not in servers.told


def test_an_update_that_was_broken_off_is_not_tried_again_by_the_next(watched: Watched) -> None:
    """Its connection may break again and again, each time after long."""
    servers, replicas = watched("http://a", "http://b")
    member, tries = replicas.members[1], list[Control]()

    def break_off(control: Control) -> None:
        tries.append(control)
        raise Unreached("the connection broke")

    with replicas.lock:
        for _ in range(2):
            replicas.order(member, break_off, servers.forget)
    assert len(tries) == 1


def test_a_server_that_answers_with_an_error_is_away_and_ends_no_run(watched: Watched) -> None:
    servers, replicas = watched("http://a", "http://b")
    ask, member = servers.ask, replicas.members[1]

    def refuse(control: Control) -> str:
        if control.url == "http://b":
            raise ServerRefused("HTTP status 500", 500)
        return ask(control)

    servers.ask = refuse  # type: ignore[method-assign]
    until(lambda: member.away)
    with replicas.lock:
        replicas.order(member, lambda _: None, servers.forget)  # which it takes
    assert member.away
    replicas.check()
    servers.ask = ask  # type: ignore[method-assign]
    until(lambda: not member.away and member.silent_since is None)


def test_a_server_that_kept_its_weights_is_not_given_them_again(watched: Watched) -> None:
    servers, replicas = watched("http://a")
    servers.end("http://a")
    until(lambda: replicas.members[0].away)
    servers.down.clear()  # it was the network
    until(lambda: not replicas.members[0].away)
    assert "renew http://a" not in servers.told


def test_a_server_that_waits_for_weights_in_training_is_not_silent(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AWAY_SECONDS", 0.05)
    servers, replicas = watched("http://a")
    servers.in_training = True
    servers.start("http://a")
    until(lambda: servers.told.count("renew http://a") > 2)
    threading.Event().wait(0.1)
    assert replicas.members[0].silent_since is None
    replicas.check()


def test_an_update_does_not_wait_for_a_look_at_a_server_that_hangs(watched: Watched) -> None:
    servers, replicas = watched("http://a", "http://b")
    servers.end("http://b")
    until(lambda: replicas.members[1].away)
    hangs = servers.hang("http://a", "http://b")
    assert replicas.lock.acquire(timeout=5)
    replicas.lock.release()
    hangs.set()


def test_a_look_that_fails_says_nothing_of_weights_that_came_meanwhile(watched: Watched) -> None:
    servers, replicas = watched("http://a")
    [member], ask = replicas.members, servers.ask
    fails, asked = threading.Event(), threading.Event()

    def hang(control: Control) -> str:
        if threading.current_thread() is threading.main_thread():
            return ask(control)
        asked.set()
        fails.wait(10)
        servers.ask = ask  # type: ignore[method-assign]
        raise Unreached("it was busy loading them")

    servers.ask = hang  # type: ignore[method-assign]
    assert asked.wait(10)
    with replicas.lock:
        servers.forget(member.control)
        replicas.order(member, servers.give, servers.forget)
    looks = servers.looks
    fails.set()
    until(lambda: servers.looks > looks + 2)
    assert servers.told == []
    assert not member.away


def test_a_server_that_never_takes_the_weights_ends_the_run(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AWAY_SECONDS", 0.05)
    servers, replicas = watched("http://a")

    def renew(control: Control) -> bool:
        raise Unreached("HTTP status 504")

    servers.renew = renew  # type: ignore[method-assign]
    servers.start("http://a")
    with pytest.raises(Unreached, match="504; it was waited for"):
        until(lambda: replicas.check() is not None)


def test_weights_that_one_server_refuses_when_it_was_started_anew_end_no_run_that_has_another(watched: Watched) -> None:
    servers, replicas = watched("http://a", "http://b")
    renew = servers.renew

    def refuse(control: Control) -> bool:
        servers.told.append(f"renew {control.url}")
        raise WeightsRefused("it was started with other flags")

    servers.renew = refuse  # type: ignore[method-assign]
    servers.start("http://b")
    until(lambda: servers.told.count("renew http://b") > 2)
    replicas.check()
    assert replicas.urls_away() == ["http://b"]
    servers.renew = renew  # type: ignore[method-assign]  # it is started once more
    until(lambda: not replicas.urls_away())
    assert servers.weights["http://b"] == GIVEN

    servers.renew = refuse  # type: ignore[method-assign]
    for url in ("http://a", "http://b"):
        servers.start(url)
    with pytest.raises(WeightsRefused, match="other flags"):
        until(lambda: replicas.check() is not None)


def test_a_run_whose_only_server_refuses_ends_when_the_other_has_been_away_for_long(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AWAY_SECONDS", 0.05)
    servers, replicas = watched("http://a", "http://b")

    def refuse(control: Control) -> bool:
        raise WeightsRefused("it was started with other flags")

    servers.renew = refuse  # type: ignore[method-assign]
    servers.start("http://a")
    until(lambda: replicas.members[0].away)
    servers.end("http://b")
    with pytest.raises(Unreached, match="b does not answer; it was waited for"):
        until(lambda: replicas.check() is not None)


@pytest.mark.parametrize("happened", ["end", "start"])
def test_a_look_that_ends_after_the_run_tells_nobody(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, happened: str
) -> None:
    monkeypatch.setattr(module, "_HANGS_SECONDS", 0.01)
    servers, replicas = watched("http://a")
    hangs = servers.hang("http://a")
    getattr(servers, happened)("http://a")
    replicas.close()
    hangs.set()
    until(lambda: not any(watcher.is_alive() for watcher in replicas._watchers))
    assert servers.told == []


def test_while_one_server_hangs_the_end_of_another_is_seen(watched: Watched) -> None:
    servers, replicas = watched("http://a", "http://b", "http://c")
    hangs = servers.hang("http://a")
    servers.end("http://c")
    until(lambda: replicas.urls_away() == ["http://c"])
    hangs.set()


def test_a_server_that_was_started_anew_unseen_when_an_update_comes_is_told_again_what_is_sent(
    watched: Watched,
) -> None:
    servers, replicas = watched("http://a", "http://b")
    with replicas.lock:
        servers.start("http://a")
        replicas.order(replicas.members[0], servers.give, servers.forget)
    assert servers.weights["http://a"] == GIVEN


def test_weights_that_a_server_refuses_twice_are_refused(watched: Watched) -> None:
    servers, replicas = watched("http://a")
    servers.unknowing.add("http://a")
    with pytest.raises(WeightsRefused):
        replicas.order(replicas.members[0], servers.give, lambda _: None)


def test_a_server_that_stays_away_ends_the_run(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AWAY_SECONDS", 0.01)
    servers, replicas = watched("http://a")
    servers.end("http://a")
    advice = "vLLM at http://a does not answer; it was waited for, .*: start the server again, and then resume the run"
    with pytest.raises(Unreached, match=advice):
        until(lambda: replicas.check() is not None)


def test_a_server_that_stays_away_ends_no_run_that_has_another(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AWAY_SECONDS", 0.01)
    servers, replicas = watched("http://a", "http://b")
    servers.end("http://b")
    until(lambda: replicas.members[1].away)
    threading.Event().wait(0.02)
    looks = servers.looks
    until(lambda: servers.looks > looks + 10)
    replicas.check()


def test_a_server_that_is_missed_while_another_has_been_away_for_long_ends_no_run(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AWAY_SECONDS", 5.0)
    servers, replicas = watched("http://a", "http://b")
    servers.end("http://b")
    until(lambda: replicas.members[1].away)
    replicas.members[1].silent_since = -1e9
    servers.end("http://a")
    until(lambda: replicas.members[0].away)
    looks = servers.looks
    until(lambda: servers.looks > looks + 10)
    replicas.check()


def until(holds: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if holds():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it never came so")
