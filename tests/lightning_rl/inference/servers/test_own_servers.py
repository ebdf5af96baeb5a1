"""Servers that are ours: one that ends or hangs is started again, given the present weights, and only then sampled."""

import threading
from collections.abc import Callable, Iterator

import pytest

from lightning_rl.inference.servers import replicas as module
from lightning_rl.inference.servers.errors import ServerEnded, Unreached, WeightsRefused
from lightning_rl.inference.servers.replicas import Member, Replicas
from lightning_rl.inference.vllm.control import Control
from tests.lightning_rl.inference.servers.test_replicas import GIVEN, Servers, until


class Own:
    """A server of ours; `told` what it was ordered to do."""

    def __init__(self, url: str, servers: Servers) -> None:
        self.url, self.servers = url, servers
        self.runs = True
        self.told: list[str] = []

    def start(self) -> None:
        self.told.append("start")
        self.runs = True
        self.servers.start(self.url)

    def wait(self) -> None: ...

    def why(self) -> str:
        return f"{self.url} ended"

    def ask_to_stop(self) -> None: ...

    def stop(self) -> None:
        self.end()

    def end(self) -> None:
        self.runs = False
        self.servers.end(self.url)


Ours = Callable[..., tuple[Servers, list[Own], Replicas]]


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ours]:
    monkeypatch.setattr(module, "WATCH_SECONDS", 0.001)
    made: list[Replicas] = []

    def watch(*urls: str) -> tuple[Servers, list[Own], Replicas]:
        servers = Servers(*urls)
        own = [Own(url, servers) for url in urls]
        replicas = Replicas([Member(Control(each.url), each) for each in own])
        replicas.policies.append(servers)
        made.append(replicas)
        replicas.start()
        for member in replicas.members:
            servers.forget(member.control)
            servers.give(member.control)
        return servers, own, replicas

    yield watch
    for replicas in made:
        replicas.close()


def test_weights_that_it_refuses_are_not_told_again(ours: Ours) -> None:
    servers, _, replicas = ours("http://a")
    tries: list[Control] = []

    def refuse(control: Control) -> None:
        tries.append(control)
        raise WeightsRefused("no")

    with pytest.raises(WeightsRefused):
        replicas.order(replicas.members[0], refuse, servers.forget)
    assert len(tries) == 1


def test_one_that_hangs_in_an_update_is_started_again(ours: Ours) -> None:
    servers, [own], replicas = ours("http://a")

    def hang(control: Control) -> None:
        raise Unreached("it hangs")

    with replicas.lock:
        replicas.order(replicas.members[0], hang, servers.forget)
    until(lambda: own.told == ["start", "start"] and not replicas.members[0].away)
    assert "renew http://a" in servers.told


def test_one_that_ends_too_often_ends_the_run(ours: Ours) -> None:
    _, [own], replicas = ours("http://a")
    for starts in (2, 3, 4):
        own.end()
        until(lambda starts=starts: len(own.told) == starts and not replicas.members[0].away)  # type: ignore[misc]
    own.end()
    with pytest.raises(ServerEnded, match="it ended 4 times; the last time: http://a ended"):
        until(lambda: replicas.check() is not None)


def test_calls_wait_while_it_starts_again_and_go_on_when_it_has_the_weights(ours: Ours) -> None:
    servers, [own], _ = ours("http://a")
    own.end()
    until(lambda: servers.told[-1:] == [False])
    assert servers.told == [True, "renew http://a", False]


def test_one_that_is_back_in_training_lets_no_call_through_before_the_update(ours: Ours) -> None:
    servers, [own], replicas = ours("http://a")
    servers.in_training = True
    own.end()
    until(lambda: servers.told.count("renew http://a") > 2)
    assert set(servers.told) == {True, "renew http://a"}
    servers.in_training = False
    replicas.updated(first=False)
    until(lambda: servers.told[-1] is False)
    assert servers.weights["http://a"] == GIVEN


def test_one_that_ends_while_it_is_given_weights_is_started_once_more(ours: Ours) -> None:
    servers, [own], _ = ours("http://a")
    renew, broken = servers.renew, threading.Event()

    def break_once(control: Control) -> bool:
        if not broken.is_set():
            broken.set()
            raise Unreached("the connection broke")
        return renew(control)

    servers.renew = break_once  # type: ignore[method-assign]
    own.end()
    until(lambda: servers.told[-1:] == [False])
    assert own.told == ["start"] * 3


def test_two_that_end_start_again_at_once(ours: Ours) -> None:
    _, own, replicas = ours("http://a", "http://b")
    both = threading.Barrier(2, timeout=10)
    for each in own:
        each.wait = both.wait  # type: ignore[method-assign, assignment]
        each.end()
    until(lambda: all(each.told == ["start", "start"] for each in own))
    until(lambda: not replicas.urls_away())


def test_one_that_starts_again_while_the_run_ends_ends_with_it(ours: Ours) -> None:
    _, [own], replicas = ours("http://a")
    starting, go_on, start = threading.Event(), threading.Event(), own.start

    def start_late() -> None:
        starting.set()
        go_on.wait(10)
        start()

    own.start = start_late  # type: ignore[method-assign]
    own.end()
    assert starting.wait(10)
    closing = threading.Thread(target=replicas.close)
    closing.start()
    until(replicas.over.is_set)
    go_on.set()
    closing.join(10)
    assert not own.runs


def test_when_a_run_begins_one_may_end_which_is_started_again(ours: Ours) -> None:
    _, _, replicas = ours("http://a", "http://b")
    replicas.over.set()
    replicas.members[1].away = True
    replicas.updated(first=True)
