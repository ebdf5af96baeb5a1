"""New weights come while calls wait at the gateway, and calls wait no longer than the engine is away."""

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rl.config import compose
from lightning_rl.inference.servers.replicas import Member, Replicas
from lightning_rl.inference.sglang import SGLangPolicy, _Control
from lightning_rl.inference.vllm.control import Control
from lightning_rl.inference.vllm.policy import VllmPolicy
from lightning_rl.ppo.weight_sync import WeightSync
from lightning_rl.store.errors import StoreUnwritable


class Told:
    """What a store and a model are told, in order."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def pause(self, model: str, *, mode: str = "keep", deadline_seconds: float | None = None, lease_seconds: float):
        assert lease_seconds > 60
        self.told.append(("pause", model, mode))

    def resume(self, model: str, version: int | None = None, *, outdated: Callable[[], Sequence[str]] = tuple) -> None:
        self.told.append(("resume", model, version, *outdated()))

    def send_weights(self, version: int) -> None:
        self.told.append(("weights", version))


def sync(told: Any, schedule: str = "sync", policy: Any = None) -> WeightSync:
    models: Any = SimpleNamespace(policy=policy or SimpleNamespace(name="m"), send_weights=told.send_weights)
    return WeightSync(compose({"trainer": {"schedule": schedule}}), told, models)


@pytest.mark.parametrize(("schedule", "mode"), [("sync", "drain"), ("one_step_off", "keep"), ("async", "keep")])
def test_weights_are_sent_between_a_pause_and_its_end(schedule: str, mode: str) -> None:
    told = Told()
    sync(told, schedule).publish(4)
    assert told.told == [("pause", "m", mode), ("weights", 4), ("resume", "m", 4)]


def test_calls_wait_while_an_engine_starts_again_and_go_on_when_it_is_there() -> None:
    told, engine = Told(), VllmPolicy.__new__(VllmPolicy)
    engine.name = "m"
    sync(told, policy=engine).watch_outages()
    engine.on_outage(True)
    engine.on_outage(False)
    assert told.told == [("pause", "m", "keep"), ("resume", "m", None)]


@pytest.mark.parametrize("served", ["vllm", "sglang"])
def test_a_pause_for_an_outage_waits_for_no_call(served: str) -> None:
    deadlines: list[float | None] = []
    told, engine = Told(), vllm("http://a") if served == "vllm" else sglang("http://a")
    told.pause = lambda *_, deadline_seconds=None, **__: deadlines.append(deadline_seconds)  # type: ignore[method-assign]
    sync(told, policy=engine).watch_outages()
    engine.on_outage(True)
    assert deadlines == [0]


def test_an_outage_that_lasts_over_an_update_is_paused_again_behind_it() -> None:
    told, engine = Told(), vllm("http://a")
    synced = sync(told, policy=engine)
    synced.watch_outages()
    engine.on_outage(True)
    synced._hold("drain")
    synced._let_through(4)
    assert told.told[-2:] == [("resume", "m", 4), ("pause", "m", "keep")]


def test_sglang_servers_without_the_weights_are_named_and_compared_where_nobody_could_before() -> None:
    told, engine, proved = Told(), sglang("http://a", "http://b"), threading.Event()
    engine.replicas.members[1].away = True
    engine.prove = proved.set  # type: ignore[method-assign]
    synced = sync(told, policy=engine)
    synced.publish(4)
    assert told.told[2:] == [("resume", "m", 4, "http://b")]
    synced.wake()
    assert proved.is_set()


def test_an_outage_while_the_trainer_holds_calls_goes_on_behind_it_and_a_pause_that_failed_is_tried_again() -> None:
    told, engine = Told(), vllm("http://a", "http://b")
    synced = sync(told, policy=engine)
    synced.watch_outages()
    synced._hold("drain")
    engine.on_outage(True)
    synced._let_through(None)
    assert told.told[1:] == [("resume", "m", None), ("pause", "m", "keep")]
    engine.on_outage(True)  # it is told again and again
    engine.on_outage(False)
    assert told.told[3:] == [("resume", "m", None)]
    pause = told.pause
    told.pause = lambda *_, **__: (_ for _ in ()).throw(StoreUnwritable("later"))  # type: ignore[assignment, method-assign]
    engine.on_outage(True)
    told.pause = pause  # type: ignore[method-assign]
    engine.on_outage(True)
    assert told.told[4:] == [("pause", "m", "keep")]


def test_the_gateway_is_told_which_servers_have_not_taken_the_weights() -> None:
    told, engine = Told(), vllm("http://a", "http://b")
    engine.replicas.members[1].away = True
    sync(told, policy=engine).publish(4)
    assert told.told[2:] == [("resume", "m", 4, "http://b")]


def sglang(*urls: str) -> SGLangPolicy:
    engine = SGLangPolicy.__new__(SGLangPolicy)
    engine.name, engine.replicas = "m", Replicas([Member(_Control(url)) for url in urls])
    return engine


def vllm(*urls: str) -> VllmPolicy:
    engine = VllmPolicy.__new__(VllmPolicy)
    engine.name, engine.replicas = "m", Replicas([Member(Control(url)) for url in urls])
    return engine


def test_a_store_that_is_away_does_not_end_an_engine(caplog: pytest.LogCaptureFixture) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise StoreUnwritable("it is away")

    engine = VllmPolicy.__new__(VllmPolicy)
    engine.name = "m"
    sync(SimpleNamespace(pause=away, resume=away, send_weights=None), policy=engine).watch_outages()
    engine.on_outage(True)
    assert "calls do not wait for the engine that starts again: it is away" in caplog.text
