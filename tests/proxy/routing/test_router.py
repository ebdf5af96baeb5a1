"""Several engines of one model: who gets a call, who is away, who comes back, and no token counted twice."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl_adapters.call import VersionRange
from lightning_rl_proxy.engines.base import (
    EngineFinish,
    EngineRefused,
    EngineTokens,
    EngineUnavailable,
    Load,
    TokenRequest,
)
from lightning_rl_proxy.errors import PromptTooLong
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from lightning_rl_proxy.routing import engine_health
from lightning_rl_proxy.routing.load_balancer import ModelLoad, Replica, choose
from lightning_rl_proxy.routing.router import Generation, Router
from lightning_rl_proxy.sampling import Sampling
from tests.proxy.conftest import ScriptedEngine, Served

PARTS = [EngineTokens([1, 2], [-0.5, -0.25]), EngineTokens([3], [-1.0])]
HELD = "held"  # a request that ends when it is cancelled


class Engine:
    """Says three tokens in two parts, of a request HELD one part alone.

    `dies` after that many parts; `label` is what it says of its weights.
    """

    model = "m"
    abilities = frozenset[str]()
    context = None

    def __init__(self, version: int = 0, *, label: int | None = None) -> None:
        self.policy_version = version
        self.label = label
        self.well = True
        self.dies: int | None = None
        self.error: Exception = EngineUnavailable("it died")
        self.reason = "stop"
        self.calls = 0
        self.closed = False
        self.frozen = False
        self.hold: asyncio.Event | None = None
        self.never = asyncio.Event()
        self.pausing: asyncio.Event | None = None
        self.resuming: asyncio.Event | None = None
        self.checking: asyncio.Event | None = None
        self.checks = 0
        self.said_load: Load | None = None

    async def generate(self, request: TokenRequest) -> AsyncGenerator[EngineTokens | EngineFinish]:
        self.calls += 1
        version = self.policy_version if self.label is None else self.label
        for index, part in enumerate(PARTS):
            if self.dies == index:
                raise self.error
            yield part
            if request.request_id == HELD:
                await self.never.wait()
            if self.hold is not None:
                await self.hold.wait()
        yield EngineFinish(self.reason, None, [VersionRange(version, 0, 3)])

    async def check(self) -> int | None:
        self.checks += 1
        said = self.label
        if self.checking is not None:
            await self.checking.wait()
        if not self.well:
            raise EngineUnavailable("it is gone")
        return said

    async def load(self) -> Load | None:
        return self.said_load

    async def pause(self) -> None:
        if self.pausing is not None:
            await self.pausing.wait()
        if not self.well:
            raise EngineUnavailable("it is gone")
        self.frozen = True

    async def resume(self) -> None:
        if self.resuming is not None:
            await self.resuming.wait()
        if not self.well:
            raise EngineUnavailable("it is gone")
        self.frozen = False

    def logprob_kind(self, sampling: Sampling) -> str:
        return "sampled"

    async def close(self) -> None:
        self.closed = True


class Labelled(Engine):
    """Labels its tokens with the version that it is told, as vLLM does; `restart` forgets it."""

    def __init__(self, version: int = 0) -> None:
        super().__init__(version, label=version)

    async def resume(self) -> None:
        await super().resume()
        self.label = self.policy_version

    def restart(self) -> None:
        self.label = 0


def routing(*engines: Engine) -> Router:
    router = Router("m")
    for engine in engines:
        router.register(engine)
    return router


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def call() -> None:
        await asyncio.wait_for(work(), 20)

    asyncio.run(call())


async def sample(
    router: Router, generation: Generation | None = None, *, stream: bool = False, **more: Any
) -> Generation:
    generation = Generation() if generation is None else generation
    await router.generate("m", TokenRequest([5], Sampling(), "r", stream=stream), generation, **more)
    return generation


async def fail(router: Router, **more: Any) -> str:
    with pytest.raises(EngineUnavailable) as error:
        await sample(router, **more)
    return str(error.value)


class Held:
    """A call that has begun, and ends when it is told to."""

    def __init__(self, router: Router, home: Engine | None = None) -> None:
        self.generation = Generation()
        self._begun = asyncio.Event()
        self._work = router.generate(
            "m", TokenRequest([5], Sampling(), HELD), self.generation, home=home, take=self._take
        )
        self._task: asyncio.Task[None] | None = None

    def _take(self, _: EngineTokens) -> bool:
        self._begun.set()
        return True

    async def begin(self) -> Engine:
        self._task = asyncio.create_task(self._work)
        await self._begun.wait()
        engine = self.generation.served_by
        assert isinstance(engine, Engine)
        return engine

    async def end(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def holding(router: Router, *homes: Engine | None) -> list[Held]:
    """Calls that have begun, each at the engine that is named; None: at any."""
    held = [Held(router, home) for home in homes]
    for call in held:
        await call.begin()
    return held


def away(router: Router) -> list[str | None]:
    return [told["away"] for told in router.engines().values()]


# Who gets a call


@pytest.mark.parametrize("k", range(1, 8))
def test_concurrent_new_conversations_differ_by_one_at_most(k: int) -> None:
    async def work() -> None:
        router = routing(*(Engine() for _ in range(k)))
        counts = Counter([await Held(router).begin() for _ in range(40)])
        assert len(counts) == k
        assert max(counts.values()) - min(counts.values()) <= 1

    run(work)


def test_calls_that_come_one_after_the_other_go_round() -> None:
    async def work() -> None:
        engines = [Engine() for _ in range(3)]
        router = routing(*engines)
        for _ in range(9):
            await sample(router)
        assert [engine.calls for engine in engines] == [3, 3, 3]

    run(work)


@given(st.integers(1, 5), st.lists(st.tuples(st.sampled_from(["new", "stay", "end"]), st.integers(0, 50))))
def test_a_new_call_goes_to_a_least_busy_one_however_calls_begin_and_end(k: int, steps: list[tuple[str, int]]) -> None:
    async def work() -> None:
        engines = [Engine() for _ in range(k)]
        router = routing(*engines)
        held: list[tuple[Held, Engine]] = []
        for step, which in steps:
            busy = Counter(engine for _, engine in held)
            if step == "end":
                if held:
                    await held.pop(which % len(held))[0].end()
                continue
            home = engines[which % k] if step == "stay" else None
            call = Held(router, home)
            engine = await call.begin()
            held.append((call, engine))
            least = min(busy[each] for each in engines)
            if home is not None and busy[home] <= 2 * least + 8:
                assert engine is home
            else:
                assert busy[engine] == least
        in_flight = [told["in_flight"] for told in router.engines().values()]
        assert in_flight == [sum(engine is each for _, engine in held) for each in engines]

    run(work)


def test_a_conversation_stays_until_its_engine_is_clearly_busier() -> None:
    replicas = [Replica("a", "a"), Replica("b", "b")]
    replicas[0].in_flight, replicas[1].in_flight = 18, 5
    assert choose(replicas, "a").name == "a"
    replicas[0].in_flight = 19
    assert choose(replicas, "a").name == "b"
    assert choose(replicas, "somebody who was taken out").name == "b"


# A call whose engine fails


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_dies_before_its_first_token_is_answered_by_another_engine(stream: bool) -> None:
    async def work() -> None:
        dead, well = Engine(), Engine(0)
        dead.dies = 0
        router = routing(dead, well)
        generation = await sample(router, stream=stream)
        assert (generation.token_ids, generation.logprobs) == ([1, 2, 3], [-0.5, -0.25, -1.0])
        assert generation.versions == [VersionRange(0, 0, 3)]
        assert generation.served_by is well
        assert router.received["m"] == 3
        assert router.state()["m"]["in_flight"] == 0
        assert away(router) == ["it died", None]

    run(work)


def test_a_call_without_a_token_leaves_an_engine_that_stays_silent_for_one_that_is_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_health, "_AWAY_SECONDS", 0.001)
    monkeypatch.setattr(engine_health, "_SILENT_SECONDS", 0.0)

    class Silent(Engine):
        async def generate(self, request: TokenRequest) -> AsyncGenerator[EngineTokens | EngineFinish]:
            if request.request_id != HELD:
                await self.never.wait()
            async for part in super().generate(request):
                yield part

    async def work() -> None:
        silent, other = Silent(), Engine()
        router = routing(silent, other)
        has_a_token = Held(router, silent)
        await has_a_token.begin()
        waits = asyncio.create_task(sample(router, home=silent))
        silent.well = other.well = False
        watching = asyncio.create_task(router.watch())
        await asyncio.sleep(0.02)
        assert not waits.done(), "no other engine is well"
        other.well = True
        generation = await waits
        assert (generation.served_by, generation.token_ids) == (other, [1, 2, 3])
        assert [told["in_flight"] for told in router.engines().values()] == [1, 0]
        assert router.received["m"] == 5
        watching.cancel()
        await has_a_token.end()

    run(work)


def test_a_call_that_is_broken_off_without_a_token_begins_anew_elsewhere() -> None:
    class Empty(Engine):
        async def generate(self, *args: Any, **more: Any) -> AsyncGenerator[EngineTokens | EngineFinish]:
            yield EngineTokens([], None)
            yield EngineFinish("abort", None, [])

    async def work() -> None:
        router = routing(Empty(), Engine())
        generation = await sample(router)
        assert (generation.finish_reason, generation.logprobs) == ("stop", [-0.5, -0.25, -1.0])
        assert away(router) == [None, None]

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_has_a_token_is_never_moved(stream: bool) -> None:
    async def work() -> None:
        dead, well = Engine(), Engine()
        dead.dies = 1
        router = routing(dead, well)
        generation = Generation()
        assert await fail(router, generation=generation, stream=stream) == "it died"
        assert generation.token_ids == [1, 2]
        assert well.calls == 0
        assert router.received["m"] == 2

    run(work)


@pytest.mark.parametrize("error", [EngineRefused("no"), PromptTooLong(5, 4)])
def test_what_an_engine_refuses_is_asked_of_no_other(error: Exception) -> None:
    async def work() -> None:
        first, other = Engine(), Engine()
        first.dies, first.error = 0, error
        router = routing(first, other)
        with pytest.raises(type(error)):
            await sample(router)
        assert other.calls == 0
        assert away(router) == [None, None]

    run(work)


def test_each_engine_is_tried_once_and_the_last_ones_error_is_told() -> None:
    async def work() -> None:
        engines = [Engine() for _ in range(3)]
        for index, engine in enumerate(engines):
            engine.dies, engine.error = 0, EngineUnavailable(f"engine {index} died")
        router = routing(*engines)
        assert await fail(router) == "engine 2 died"
        assert [engine.calls for engine in engines] == [1, 1, 1]
        assert router.received["m"] == 0
        assert router.state()["m"]["in_flight"] == 0

    run(work)


@given(st.lists(st.sampled_from([None, 0, 1]), min_size=1, max_size=4), st.integers(1, 12))
def test_what_is_received_is_what_the_generations_hold(deaths: list[int | None], calls: int) -> None:
    async def work() -> None:
        engines = [Engine() for _ in deaths]
        for engine, dies in zip(engines, deaths, strict=True):
            engine.dies = dies
        router = routing(*engines)
        generations = [Generation() for _ in range(calls)]
        await asyncio.gather(*(sample(router, each) for each in generations), return_exceptions=True)
        assert router.received["m"] == sum(len(each.token_ids) for each in generations)

    run(work)


def test_an_answer_with_a_part_without_logprobs_has_none() -> None:
    generation = Generation()
    for part in (PARTS[0], EngineTokens([3], None), EngineTokens([4], [-1.0])):
        generation.add(part, 0)
    assert (generation.token_ids, generation.logprobs) == ([1, 2, 3, 4], None)


# Away, and back


def test_an_engine_that_is_away_gets_no_call_until_a_check_finds_it_well() -> None:
    async def work() -> None:
        one, other = Engine(), Engine()
        router = routing(one, other)
        one.dies, one.well = 0, False
        for _ in range(4):
            await sample(router, home=one)
        assert (one.calls, other.calls) == (1, 4)
        assert await router.check() == {"m 0": "it is gone", "m 1": None}
        one.dies, one.well = None, True
        await router.check()
        assert away(router) == [None, None]
        assert (await sample(router, home=one)).served_by is one

    run(work)


def test_an_engine_that_says_nothing_is_away_after_the_second_check_that_fails() -> None:
    async def work() -> None:
        one, other = Engine(), Engine()
        router = routing(one, other)
        one.well = False
        assert (await router.check())["m 0"] == "it is gone"
        assert away(router) == [None, None]
        await router.check()
        assert away(router) == ["it is gone", None]

    run(work)


def test_engines_are_looked_after_without_being_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_health, "_AWAY_SECONDS", 0.001)

    async def work() -> None:
        one, other = Engine(), Engine()
        router = routing(one, other)
        watching = asyncio.create_task(router.watch())
        one.well = False
        while away(router)[0] is None:
            await asyncio.sleep(0.001)
        one.checks = other.checks = 0
        while other.checks < 3:
            await asyncio.sleep(0.001)
        assert one.checks > other.checks
        one.well = True
        while away(router)[0] is not None:
            await asyncio.sleep(0.001)
        watching.cancel()
        await router.close()

    run(work)


def test_when_all_are_away_a_call_has_them_asked_once_more() -> None:
    async def work() -> None:
        engines = [Engine(), Engine()]
        router = routing(*engines)
        for engine in engines:
            engine.dies = 0
        await fail(router)
        engines[1].dies = None
        assert (await sample(router)).served_by is engines[1]

    run(work)


def test_when_all_are_gone_the_error_names_the_cause() -> None:
    async def work() -> None:
        engines = [Engine(), Engine()]
        router = routing(*engines)
        for engine in engines:
            engine.dies, engine.well = 0, False
        await fail(router)
        assert await fail(router) == "it died"
        assert sum(engine.calls for engine in engines) == 3

    run(work)


def test_calls_that_wait_for_one_check_share_it() -> None:
    async def work() -> None:
        engine = Engine()
        router = routing(engine)
        engine.dies = 0
        await fail(router)
        engine.dies, engine.checking = None, asyncio.Event()
        calls = [asyncio.create_task(sample(router)) for _ in range(5)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        engine.checking.set()
        await asyncio.gather(*calls)
        assert (engine.checks, engine.calls) == (1, 6)

    run(work)


# The weights of those that come back


def test_an_engine_that_was_restarted_stays_away_until_somebody_says_that_it_has_the_weights() -> None:
    async def work() -> None:
        one, other = Labelled(), Labelled()
        router = routing(one, other)
        await router.resume(None, 8)
        one.restart()
        await router.check()
        [why, well] = away(router)
        assert why is not None
        assert "m 0 has weights of policy version 0, not 8" in why
        assert "POST /api/v1/engines" in why
        assert well is None
        for _ in range(3):
            assert (await sample(router, home=one)).served_by is other
        with pytest.raises(ValueError, match="at policy version 8, not 7"):
            await router.confirm_weights("m 0", 7)
        await router.confirm_weights("m 0", 8)
        assert away(router) == [None, None]
        assert one.label == 8

    run(work)


def test_an_engine_whose_tokens_have_older_weights_than_it_was_known_by_is_away_from_then_on() -> None:
    async def work() -> None:
        one, other = Labelled(), Labelled()
        router = routing(one, other)
        await router.resume(None, 8)
        one.restart()
        generation = await sample(router, home=one)
        assert generation.versions == [VersionRange(0, 0, 3)]
        assert "policy version 0, not 8" in str(away(router)[0])

    run(work)


@pytest.mark.parametrize(
    ("version", "give_weights"),
    [
        pytest.param(1, lambda router: router.resume(None, 2), id="by an update"),
        pytest.param(8, lambda router: router.confirm_weights("m 0", 8), id="the same anew"),
    ],
)
def test_tokens_of_a_call_that_began_before_an_engine_was_given_weights_say_nothing_of_these(
    version: int, give_weights: Callable[[Router], Awaitable[None]]
) -> None:
    async def work() -> None:
        engine = Labelled()
        router = routing(engine)
        await router.resume(None, version)
        engine.restart()
        engine.hold = asyncio.Event()
        call = asyncio.create_task(sample(router))
        while not engine.calls:
            await asyncio.sleep(0)
        await router.check()
        await give_weights(router)
        engine.hold.set()
        assert (await call).versions == [VersionRange(0, 0, 3)]
        assert away(router) == [None]

    run(work)


def test_old_weights_are_not_tried_even_where_all_are_away() -> None:
    async def work() -> None:
        engine = Labelled()
        router = routing(engine)
        await router.resume(None, 8)
        engine.restart()
        await router.check()
        assert "policy version 0, not 8" in await fail(router)
        assert engine.calls == 0

    run(work)


def test_an_engine_that_was_away_during_an_update_lacks_it_until_it_says_otherwise() -> None:
    async def work() -> None:
        one, other = Engine(label=0), Engine(label=0)
        router = routing(one, other)
        await router.check()
        await router.pause(None)
        one.well = False
        await router.check()
        await router.check()
        other.label = 1
        await router.resume(None, 1)
        one.well = True
        await router.check()
        assert "policy version 0, not 1" in str(away(router)[0])
        assert router.state()["m"]["policy_version"] == 1
        one.label = 1
        await router.check()
        assert away(router) == [None, None]
        assert one.policy_version == 1

    run(work)


def test_an_engine_that_is_said_to_lack_the_weights_goes_on_with_its_own_and_gets_no_call_until_it_has_them() -> None:
    async def work() -> None:
        updated, missed = Labelled(), Labelled()
        router = routing(updated, missed)
        await router.check()
        held = Held(router, home=missed)
        await held.begin()
        for version in (1, 1):  # also where these weights are told once more
            await router.pause(None)
            assert missed.frozen
            await router.resume(None, version, outdated=["m 1"])
            assert not missed.frozen
            assert [(each.label, each.policy_version) for each in (updated, missed)] == [(1, 1), (0, 0)]
            assert [why is None for why in away(router)] == [True, False]
        await held.end()
        missed.label = 1  # it is given them later
        await router.check()
        assert away(router) == [None, None]
        assert missed.policy_version == 1
        await router.pause(None)
        missed.restart()
        await router.resume(None, 1, outdated=["m 1"])  # of the same weights: it has lost them
        assert [why is None for why in away(router)] == [True, False]

    run(work)


def test_an_engine_that_came_back_before_an_update_gets_it_and_one_that_came_back_in_it_does_not() -> None:
    async def work() -> None:
        before, within = Engine(), Engine()
        router = routing(before, within, Engine())
        for engine in (before, within):
            engine.dies, engine.well = 0, False
        await sample(router)
        before.well = True
        await router.pause(None)
        within.well = True
        await router.check()
        await router.resume(None, 1)
        assert [why is None for why in away(router)] == [True, False, True]
        await router.pause(None)
        await router.resume(None, 2)
        assert away(router) == [None, None, None]

    run(work)


def test_an_engine_that_says_older_weights_than_the_update_brought_is_away() -> None:
    async def work() -> None:
        updated, missed = Engine(label=0), Engine(label=0)
        router = routing(updated, missed)
        updated.label = 1
        await router.resume(None, 1)
        assert away(router)[0] is None
        assert "policy version 0, not 1" in str(away(router)[1])
        with pytest.raises(EngineUnavailable, match="policy version 0, not 1"):
            await router.confirm_weights("m 1", 1)

    run(work)


def test_an_engine_that_was_restarted_within_an_update_does_not_pass_for_updated() -> None:
    async def work() -> None:
        one, other = Labelled(), Labelled()
        router = routing(one, other)
        await router.resume(None, 7)
        await router.pause(None)
        one.restart()
        await router.resume(None, 8)
        assert "policy version 0, not 8" in str(away(router)[0])
        assert one.label != 8
        assert away(router)[1] is None

    run(work)


def test_a_check_that_was_under_way_during_an_update_does_not_undo_it() -> None:
    async def work() -> None:
        engine = Labelled()
        router = routing(engine)
        await router.check()
        engine.checking = asyncio.Event()
        asked = asyncio.create_task(router.check())
        while engine.checks < 2:
            await asyncio.sleep(0)
        held, engine.checking = engine.checking, None
        await router.resume(None, 1)
        held.set()
        await asked
        assert away(router) == [None]

    run(work)


def test_the_first_word_of_an_engine_is_what_its_registration_meant() -> None:
    async def work() -> None:
        router = routing(Engine(5, label=0))
        assert await router.check() == {"m 0": None}
        assert router.state()["m"]["policy_version"] == 5

    run(work)


def test_an_engine_that_is_registered_with_older_weights_than_the_others_waits_for_them() -> None:
    async def work() -> None:
        router = routing(Engine(3), Engine(2))
        assert [why is None for why in away(router)] == [True, False]
        await router.confirm_weights("m 1", 3)
        assert away(router) == [None, None]

    run(work)


# Pauses


def test_the_version_rises_when_every_engine_that_is_well_goes_on() -> None:
    async def work() -> None:
        quick, slow = Engine(), Engine()
        router = routing(quick, slow)
        slow.resuming = asyncio.Event()
        await router.pause(None)
        resuming = asyncio.create_task(router.resume(None, 1))
        waiting = asyncio.create_task(sample(router))
        for _ in range(10):
            await asyncio.sleep(0)
        assert router.state()["m"]["policy_version"] == 0
        assert quick.calls + slow.calls == 0
        slow.resuming.set()
        await resuming
        assert router.state()["m"]["policy_version"] == 1
        assert (await waiting).versions == [VersionRange(1, 0, 3)]

    run(work)


def test_an_engine_that_does_not_go_on_is_away_with_its_old_version_and_the_others_serve(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        one, other = Engine(), Engine()
        router = routing(one, other)
        await router.pause(None)
        one.well = False
        await router.resume(None, 1)
        assert (one.policy_version, other.policy_version) == (0, 1)
        assert (await sample(router, home=one)).served_by is other
        assert "engine m 0 did not go on after the pause: it is gone" in caplog.text

    run(work)


def test_a_dead_engine_does_not_hold_up_a_pause_while_another_is_well() -> None:
    async def work() -> None:
        one, other = Engine(), Engine()
        router = routing(one, other)
        held = await holding(router, one, other)
        one.well = False
        await router.pause(None)
        assert (one.frozen, other.frozen) == (False, True)
        assert [why is None for why in away(router)] == [False, True]
        other.well = False
        await router.resume(None, None)
        with pytest.raises(EngineUnavailable):
            await router.pause(None)
        for call in held:
            await call.end()

    run(work)


def test_all_engines_are_told_to_freeze_at_once() -> None:
    async def work() -> None:
        one, other = Engine(), Engine()
        router = routing(one, other)
        held = await holding(router, one, other)
        one.pausing = asyncio.Event()  # the first hangs, and holds up the other no more than itself
        pausing = asyncio.create_task(router.pause(None))
        while not other.frozen:
            await asyncio.sleep(0)
        assert not one.frozen
        one.pausing.set()
        await pausing
        assert one.frozen
        await router.resume(None, None)
        for call in held:
            await call.end()

    run(work)


def test_a_pause_that_is_over_before_it_has_drained_freezes_nothing() -> None:
    async def work() -> None:
        engine = Engine()
        router = routing(engine)
        held = await holding(router, None, None)
        pausing = asyncio.create_task(router.pause(None, 20))
        while router._ended is None:
            await asyncio.sleep(0)
        await router.resume(None, None)
        await held[0].end()
        await pausing
        assert not engine.frozen
        await held[1].end()

    run(work)


def test_a_pause_that_comes_while_engines_are_told_to_go_on_holds_and_freezes_them_after_that() -> None:
    async def work() -> None:
        engine = Engine()
        router = routing(engine)
        held = Held(router)
        await held.begin()
        await router.pause(None)
        engine.resuming = asyncio.Event()
        resuming = asyncio.create_task(router.resume(None, None))
        await asyncio.sleep(0)
        pausing = asyncio.create_task(router.pause(None))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not pausing.done()  # else the engine would be told to go on after it was told to freeze
        engine.resuming.set()
        await resuming
        await pausing
        assert (engine.frozen, router.is_paused("m")) == (True, True)
        await router.resume(None, None)
        assert (engine.frozen, router.is_paused("m")) == (False, False)
        await held.end()

    run(work)


def test_a_pause_of_one_model_holds_while_all_are_told_to_go_on() -> None:
    async def work() -> None:
        first, second = Engine(), Engine()
        first.model, second.model = "a", "b"
        router = routing(first, second)
        calls = [
            asyncio.create_task(router.generate(name, TokenRequest([5], Sampling(), HELD, stream=False), Generation()))
            for name in ("a", "b")
        ]
        while first.calls + second.calls < 2:
            await asyncio.sleep(0)
        await router.pause(None)
        first.resuming = asyncio.Event()
        resuming = asyncio.create_task(router.resume(None, None))
        await asyncio.sleep(0)
        pausing = asyncio.create_task(router.pause("b"))  # which is frozen still
        for _ in range(10):
            await asyncio.sleep(0)
        first.resuming.set()
        await resuming
        await pausing
        assert (first.frozen, second.frozen, router.is_paused("b")) == (False, True, True)
        for call in calls:
            call.cancel()

    run(work)


def test_a_pause_holds_that_comes_while_absent_engines_are_checked_before_they_go_on() -> None:
    async def work() -> None:
        one, other = Engine(), Engine()
        router = routing(one, other)
        held = await holding(router, one, other)
        await router.pause(None)
        router._engines["m"].replicas[0].absent = True
        one.checking = asyncio.Event()
        resuming = asyncio.create_task(router.resume(None, 1))
        while not one.checks:
            await asyncio.sleep(0)
        pausing = asyncio.create_task(router.pause(None))
        for _ in range(10):
            await asyncio.sleep(0)
        one.checking.set()
        await resuming
        await pausing
        assert (one.frozen, other.frozen, router.is_paused("m")) == (True, True, True)
        await router.resume(None, None)
        for call in held:
            await call.end()

    run(work)


def test_an_engine_that_is_taken_out_while_it_is_told_to_freeze_goes_on() -> None:
    async def work() -> None:
        engine = Engine()
        router = routing(engine, Engine())
        held = Held(router, engine)
        await held.begin()
        engine.pausing = asyncio.Event()
        pausing = asyncio.create_task(router.pause(None))
        for _ in range(10):
            await asyncio.sleep(0)
        await router.detach("m 0")
        engine.pausing.set()
        await pausing
        await held.end()
        assert not engine.frozen

    run(work)


def test_an_engine_that_is_taken_out_and_hangs_holds_up_no_pause() -> None:
    async def work() -> None:
        engine, other = Engine(), Engine()
        router = routing(engine, other)
        held = Held(router, engine)
        await held.begin()
        await router.pause(None)
        engine.resuming = asyncio.Event()
        await router.detach("m 0")
        await asyncio.sleep(0)
        await router.resume(None, None)
        await router.pause(None)
        engine.resuming.set()
        await held.end()

    run(work)


def test_a_pause_that_begins_while_engines_are_checked_holds_the_call() -> None:
    async def work() -> None:
        engine = Engine()
        router = routing(engine)
        engine.dies = 0
        await fail(router)
        engine.dies, engine.checking = None, asyncio.Event()
        call = asyncio.create_task(sample(router))
        while not engine.checks:
            await asyncio.sleep(0)
        pausing = asyncio.create_task(router.pause(None))
        while not router.is_paused("m"):
            await asyncio.sleep(0)
        engine.checking.set()
        await pausing
        while not router.state()["m"]["parked"] and engine.calls == 1:
            await asyncio.sleep(0)
        await router.resume(None, 1)
        assert (await call).versions == [VersionRange(1, 0, 3)]

    run(work)


# Taken out


def test_an_engine_that_is_taken_out_ends_its_calls_and_gets_no_more() -> None:
    async def work() -> None:
        one, other = Engine(), Engine()
        router = routing(one, other)
        held = Held(router, one)
        await held.begin()
        await router.detach("m 0")
        for _ in range(3):
            assert (await sample(router, home=one)).served_by is other
            await asyncio.sleep(0)
        assert not one.closed
        await held.end()
        for _ in range(5):
            await asyncio.sleep(0)
        assert one.closed
        with pytest.raises(KeyError, match=r"no engine 'm 0'; there are \['m 1'\]"):
            await router.detach("m 0")
        assert router.register(one) == "m 2"
        await router.detach("m 1")
        await router.detach("m 2")
        assert "no engine serves model 'm'" in await fail(router)
        assert router.state()["m"]["tokens_received"] == 11

    run(work)


def test_what_is_frozen_in_an_engine_that_is_taken_out_goes_on() -> None:
    async def work() -> None:
        engine = Engine()
        router = routing(engine)
        held = Held(router)
        await held.begin()
        await router.pause(None)
        assert engine.frozen
        await router.detach("m 0")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not engine.frozen
        await held.end()

    run(work)


# Through the gateway


def two(served: Served, tokenizer: FastTokenizer) -> list[ScriptedEngine]:
    other = ScriptedEngine(tokenizer)
    served.run(lambda: _register(served, other))
    return [served.engine, other]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("checked", [False, True])
def test_an_engine_that_was_given_the_weights_of_a_pause_in_which_it_was_away_has_them(
    *, frozen: bool, checked: bool
) -> None:
    async def work() -> None:
        engine, other = Labelled(2), Labelled(2)
        router = routing(engine, other)
        pool = router._engines["m"]
        held = Held(router, engine) if frozen else None
        if held is not None:
            await held.begin()
        await router._watch.check(pool, pool.replicas[0])
        await router._watch.check(pool, pool.replicas[1])
        engine.well = False
        pool.replicas[0].lose("it is gone")
        await router.pause("m")
        engine.well = True
        engine.label = other.label = 3  # as the trainer's update has them
        if checked:
            await router._watch.check(pool, pool.replicas[0])
        await router.resume("m", 3)
        await router._watch.check(pool, pool.replicas[0])
        assert [pool.away(each) for each in pool.replicas] == [None, None]
        assert (engine.label, engine.policy_version) == (3, 3)
        if held is not None:
            await held.end()

    run(work)


def test_a_pause_does_not_wait_for_an_engine_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_health, "_ORDER_SECONDS", 0.05)

    class Silent(Engine):
        async def pause(self) -> None:
            await self.never.wait()

    async def work() -> None:
        engine = Silent()
        router = routing(engine, Engine())
        held = Held(router, engine)
        await held.begin()
        await router.pause("m")
        assert "does not answer in 0.05 s" in str(router._engines["m"].away(router._engines["m"].replicas[0]))
        await held.end()

    run(work)


async def _register(served: Served, engine: ScriptedEngine) -> None:
    served.gateway.router.register(engine)


def ask(served: Served, messages: list[Any], agent: str | None = None, **more: Any) -> Any:
    client = openai.OpenAI(base_url=served.base_url(agent=agent), api_key=served.key(), max_retries=0)
    return client.chat.completions.create(model="policy", messages=messages, **more)


def test_a_conversation_stays_where_its_cache_is_and_new_ones_go_round(
    served: Served, tokenizer: FastTokenizer
) -> None:
    engines = two(served, tokenizer)
    talks: list[list[Any]] = [[{"role": "user", "content": f"task {i}"}] for i in range(2)]
    for _ in range(3):
        for i, talk in enumerate(talks):
            answer = ask(served, talk, agent=f"agent{i}").choices[0].message
            talk += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "and now?"}]
        talks.reverse()
    for engine in engines:
        first, *later = engine.prompts
        assert len(later) == 2
        assert all(prompt[: len(first)] == first for prompt in later)


def test_samples_of_one_prompt_are_new_conversations(served: Served, tokenizer: FastTokenizer) -> None:
    engines = two(served, tokenizer)
    talk: list[Any] = [{"role": "user", "content": "one"}]
    answer = ask(served, talk).choices[0].message
    talk += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "two"}]
    before = [len(engine.prompts) for engine in engines]
    assert len(ask(served, talk, n=6).choices) == 6
    assert [len(engine.prompts) - n for engine, n in zip(engines, before, strict=True)] == [3, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine_is_no_error_of_the_agents_and_is_recorded_once(
    served: Served, tokenizer: FastTokenizer, stream: bool
) -> None:
    two(served, tokenizer)
    served.engine.fail = 1
    answer = ask(served, [{"role": "user", "content": "one"}], stream=stream)
    if stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices) == "ok"
    else:
        assert answer.choices[0].message.content == "ok"
    served.seal()
    [call] = served.ledger.calls()
    state = served.gateway.state()
    assert state["models"]["policy"]["tokens_received"] == len(call.response_ids)
    assert "status_503" not in state["counters"]


# How busy they are


def heard(router: Router, *loads: Load | None) -> None:
    """Each engine has said how busy it is."""
    for replica, load in zip(router._engines["m"].replicas, loads, strict=True):
        replica.hear_load(load)


def test_the_engines_bear_what_those_bear_that_are_well() -> None:
    async def work() -> None:
        one, other = Engine(), Engine()
        router = routing(one, other)
        assert router.loads()["m"] == ModelLoad(engines=2, calls=0, waiting=0, capacity=None)
        heard(router, Load(0, 8), None)
        assert router.loads()["m"].capacity is None
        heard(router, Load(0, 8), Load(0, 16))
        assert router.loads()["m"].capacity == 24
        one.dies = 0
        await sample(router)
        assert router.loads()["m"] == ModelLoad(engines=1, calls=0, waiting=0, capacity=16)
        other.dies = 0
        await fail(router)
        # None is well: they are taken as they were, so that calls that wait for them are no more than they will bear.
        assert router.loads()["m"] == ModelLoad(engines=0, calls=0, waiting=0, capacity=24)

    run(work)


def test_an_engine_bears_what_does_not_wait_and_is_tried_with_more_while_nothing_does() -> None:
    async def work() -> None:
        router = routing(Engine())
        [replica] = router._engines["m"].replicas
        replica.in_flight = 20
        heard(router, Load(12, 16))
        assert router.loads()["m"] == ModelLoad(engines=1, calls=0, waiting=12, capacity=8)
        replica.in_flight = 8
        heard(router, Load(0, 16))
        assert router.loads()["m"].capacity == 10
        replica.in_flight = 14  # so many, and none waits
        heard(router, Load(0, 16))
        assert router.loads()["m"].capacity == 16
        replica.in_flight = 0
        heard(router, Load(9, 16))  # others' requests say nothing of ours
        assert router.loads()["m"].capacity == 16

    run(work)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=30), st.none() | st.integers(1, 40))
def test_an_engine_always_bears_one_call_and_never_more_than_it_says(
    heard: list[tuple[int, int]], capacity: int | None
) -> None:
    replica = Replica("m 0", Engine())
    for in_flight, waiting in heard:
        replica.in_flight = in_flight
        replica.hear_load(Load(waiting, capacity))
        borne = replica.capacity
        assert borne is None if capacity is None and not borne else borne is not None and borne >= 1
        if borne is not None and capacity is not None:
            assert borne <= capacity
        if borne is not None and 0 < waiting < in_flight:
            assert borne <= in_flight - waiting
    for _ in range(40):
        replica.hear_load(Load(0, capacity))
    assert capacity is None or replica.capacity == capacity


def test_calls_that_wait_at_the_gateway_count_and_their_ends_are_told() -> None:
    async def work() -> None:
        router = routing(Engine())
        told: list[int] = []
        router.capacity_freed = lambda: told.append(router.loads()["m"].calls)
        await router.pause("m")
        waiting = [asyncio.create_task(sample(router)) for _ in range(3)]
        await asyncio.sleep(0)
        assert router.loads()["m"].calls == 3
        assert router.state()["m"]["in_flight"] == 0
        await router.resume("m", None)
        await asyncio.gather(*waiting)
        assert told == [2, 1, 0]

    run(work)


def test_engines_are_asked_how_busy_they_are_and_one_that_does_not_answer_keeps_its_last_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_health, "_AWAY_SECONDS", 0.001)

    class Silent(Engine):
        async def load(self) -> Load | None:
            if self.said_load is None:
                raise EngineUnavailable("it is late")
            return self.said_load

    async def work() -> None:
        engine = Silent()
        router = routing(engine)
        told = asyncio.Event()
        router.capacity_freed = told.set
        engine.said_load = Load(0, 5)
        watching = asyncio.create_task(router.watch())
        while router.loads()["m"].capacity != 5:
            await told.wait()
            told.clear()
        engine.said_load = None
        for _ in range(20):
            told.clear()
            await told.wait()
        assert router.loads()["m"].capacity == 5
        watching.cancel()
        await router.close()

    run(work)
