"""Looks after the engines of a model: asks how they are and how busy, freezes them, says who has which weights.

Invariant: an engine that was away takes calls again only after a check in which it answered, and only with the model's
current weights, as far as its own word, or else somebody who gave them to it, says so.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Collection

from lightning_rl_proxy.engines.base import Engine, EngineRefused, EngineUnavailable
from lightning_rl_proxy.recording.alerts import ALARMS
from lightning_rl_proxy.routing.load_balancer import EnginePool, Replica

_AWAY_SECONDS = 1.0  # between two checks of an engine that is away
_EVERY = 5  # so many times more seldom one that is well is checked
_SILENT_SECONDS = 30.0  # a busy engine may be that slow, and what it has computed would be lost
_ORDER_SECONDS = 30.0  # which an engine has to go on after a pause
_log = logging.getLogger(__name__)

EngineReplica = Replica[Engine]
Engines = EnginePool[Engine]


class EngineHealth:
    """Looks after all `pools`; calls `checked` whenever it has looked."""

    def __init__(self, pools: Collection[Engines], checked: Callable[[], None] = lambda: None) -> None:
        self._pools = pools
        self._checked = checked
        self._checks: dict[EngineReplica, asyncio.Task[str | None]] = {}
        self._probes: dict[EngineReplica, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Check the engines until cancelled: often those that are or may be away, now and then the others.

        How busy they are is asked of all that answer, every time.
        """
        for turn in itertools.count():
            for pool in list(self._pools):
                for replica in pool.replicas:
                    if turn % _EVERY == 0 or replica.strikes or pool.away(replica) is not None:
                        self._checking(pool, replica)
                    if replica.trouble is None:
                        self._ask_load(replica)
                _free_calls(pool)
            self._checked()
            await asyncio.sleep(_AWAY_SECONDS)

    def close(self) -> None:
        """End the checks."""
        for task in [*self._checks.values(), *self._probes.values()]:
            task.cancel()

    async def check(self, pool: Engines, replica: EngineReplica) -> str | None:
        """What is wrong with an engine now; all who ask at once hear the same answer."""
        return await asyncio.shield(self._checking(pool, replica))

    def lost(self, pool: Engines, replica: EngineReplica, why: str) -> None:
        """An engine did not answer a call."""
        self._note(pool, replica, lambda: replica.lose(why))

    def sampled_with(self, pool: Engines, replica: EngineReplica, version: int, expected: int | None) -> None:
        """A call that began when an engine was known by `expected` was sampled with weights that it calls `version`."""
        if expected is not None and version < expected == replica.reported:
            self._note(pool, replica, lambda: pool.fingerprint_of(replica, version))

    async def confirm_weights(self, pool: Engines, replica: EngineReplica) -> None:
        """Believe that an engine has the current weights.

        Raises EngineUnavailable where it does not answer, or says otherwise itself.
        """
        pool.fingerprint_of(replica, await replica.engine.check())
        await self._go_on(pool, replica, pool.version)
        if (why := pool.away(replica)) is not None:
            raise EngineUnavailable(why)
        _log.warning("engine %s is well again", replica.name)

    async def expect_pause(self, pool: Engines) -> None:
        """Ask those that are away, once more, since who answers by now gets the weights for which the pause is made."""
        away = [replica for replica in pool.replicas if replica.trouble is not None]
        await asyncio.gather(*(self.check(pool, replica) for replica in away))
        for replica in pool.replicas:
            replica.absent = replica.trouble is not None

    async def freeze(self, pool: Engines, resumed: asyncio.Event) -> None:
        """Freeze what is in flight, unless that is over; all engines are told together. One that does not answer is
        away, while another is well.

        Raises EngineUnavailable or EngineRefused where an engine cannot be frozen.
        """
        if not resumed.is_set():
            told = [replica for replica in pool.replicas if replica.in_flight and not replica.frozen]
            failed = await asyncio.gather(*(self._freeze(pool, replica) for replica in told), return_exceptions=True)
            for error in failed:
                if isinstance(error, EngineUnavailable) and pool.well():
                    continue
                if error is not None:
                    raise error

    async def _freeze(self, pool: Engines, replica: EngineReplica) -> None:
        replica.frozen = True
        try:
            async with asyncio.timeout(_ORDER_SECONDS):
                await replica.engine.pause()
        except (EngineUnavailable, TimeoutError) as error:
            why = str(error) or f"engine {replica.name} does not answer in {_ORDER_SECONDS:g} s"
            self.lost(pool, replica, why)
            raise EngineUnavailable(why) from error

    async def go_on(self, pool: Engines, version: int | None, *, paused: bool, outdated: Collection[str] = ()) -> None:
        """Let the frozen engines go on; with a `version`, as those that have its weights, each that was not absent, or
        says itself that it has them; not those whose names are in `outdated`.

        The version is the model's as soon as each of them goes on; the others are away until they have it too.
        """
        if version is not None and paused:  # what goes on where it was frozen is of the weights that are there now
            await asyncio.gather(*(self.check(pool, each) for each in pool.replicas if each.absent and each.frozen))
        running = [
            each
            for each in pool.replicas
            if each.trouble is None
            and each.name not in outdated
            and not (paused and each.absent and each.reported != version)
        ]
        going_on = [each for each in pool.replicas if each.frozen or (version is not None and each in running)]
        await asyncio.gather(*(self._go_on(pool, each, version if each in running else None) for each in going_on))
        if version is not None:
            pool.version = version
            for replica in pool.replicas:
                if replica.name in outdated:
                    replica.engine.policy_version = min(replica.engine.policy_version, version - 1)
                if pool.outdated(replica):
                    ALARMS.error("%s", pool.away(replica))

    async def release(self, replica: EngineReplica) -> None:
        """Let an engine that was taken out go on with what is frozen there."""
        if replica.frozen:
            with contextlib.suppress(EngineUnavailable, EngineRefused):
                await replica.engine.resume()

    async def _go_on(self, pool: Engines, replica: EngineReplica, version: int | None) -> None:
        engine, before = replica.engine, replica.engine.policy_version
        replica.frozen = False
        reported = None if version is None else await self._reported_version(replica)
        if pool.restarted(replica, reported):  # so whatever it was given is gone
            self._note(pool, replica, lambda: pool.fingerprint_of(replica, reported))
            version, before = None, engine.policy_version
        try:
            async with asyncio.timeout(_ORDER_SECONDS):
                if version is not None:
                    engine.policy_version = version
                await engine.resume()
        except (EngineUnavailable, EngineRefused, TimeoutError) as error:
            engine.policy_version = before
            why = str(error) or f"no answer within {_ORDER_SECONDS:g} s"
            self.lost(pool, replica, why)
            ALARMS.error("engine %s did not go on after the pause: %s", replica.name, why)
        else:
            if version is not None:
                pool.confirm_weights(replica, version, await self._reported_version(replica))

    async def _reported_version(self, replica: EngineReplica) -> int | None:
        try:
            return await replica.engine.check()
        except EngineUnavailable as error:
            replica.strike(str(error))
            return None

    def _ask_load(self, replica: EngineReplica) -> None:
        """Ask how busy it is, unless it has not answered yet."""
        if replica not in self._probes:
            self._probes[replica] = task = asyncio.create_task(self._load(replica))
            task.add_done_callback(lambda _: self._probes.pop(replica))

    async def _load(self, replica: EngineReplica) -> None:
        with contextlib.suppress(EngineUnavailable):  # the checks find out, and what it said last is as good as any
            replica.hear_load(await replica.engine.load())
            self._checked()

    def _checking(self, pool: Engines, replica: EngineReplica) -> asyncio.Task[str | None]:
        if replica not in self._checks:
            self._checks[replica] = task = asyncio.create_task(self._check(pool, replica))
            task.add_done_callback(lambda _: self._checks.pop(replica))
        return self._checks[replica]

    async def _check(self, pool: Engines, replica: EngineReplica) -> str | None:
        epoch = replica.epoch
        try:
            reported = await replica.engine.check()
        except EngineUnavailable as error:
            why = str(error)
            self._note(pool, replica, lambda: replica.strike(why))
            return why
        # What it said before somebody spoke for its weights may no longer be so.
        self._note(pool, replica, lambda: pool.fingerprint_of(replica, reported if epoch == replica.epoch else None))
        return pool.away(replica)

    def _note(self, pool: Engines, replica: EngineReplica, change: Callable[[], None]) -> None:
        """Change what is known of an engine, and tell where it leaves or comes back by that."""
        before = pool.away(replica)
        change()
        now = pool.away(replica)
        if (before is None) != (now is None):
            _log.warning("engine %s is %s", replica.name, "well again" if now is None else f"away: {now}")


def _free_calls(pool: Engines) -> None:
    """Let calls that wait for the first token of an engine that has long been silent go on to one that is well."""
    latest = time.monotonic() - _SILENT_SECONDS
    for replica in pool.replicas if pool.well() else ():
        while replica.trouble is not None and replica.silent_since < latest and replica.without_token:
            replica.without_token.pop().reschedule(0)
