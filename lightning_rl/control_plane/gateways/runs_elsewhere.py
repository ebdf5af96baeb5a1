"""The training runs whose trainers speak to other gateways of the store.

Invariant: a trainer that dies together with its gateway costs what it costs alone: calls wait here while the engines of
its run are away, and when the gateway has been gone for as long as the run's lease, the run is given up, unless it is
attached again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from lightning_rl.control_plane.gateways.cluster_rpc import Peers
from lightning_rl.control_plane.gateways.gateway_control import PauseRequest, Pauses, ResumeRequest
from lightning_rl.control_plane.gateways.membership import Membership
from lightning_rl.store.contract import Overdue, Rollout, RunElsewhere
from lightning_rl.store.errors import StoreError, StoreUnwritable
from lightning_rl.store.sql import SqlStore
from lightning_rl.store.sql_thread import SqlThread
from lightning_rl_proxy.recording.alerts import ALARMS

_LOOK_SECONDS = 0.5
_DOUBT_SECONDS = 7.0  # until a gateway that is gone has missed renewals of its lease
_NOTICED_SECONDS = 30.0  # at most, until a gateway that is gone is known to be
_log = logging.getLogger(__name__)


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed of a `RunRequest`, which a gateway of another version may have written."""

    model: str
    lease_seconds: float = 60.0
    more_models: list[str] = []


class RunsElsewhere:
    """Looks after them, as one of several gateways; each does, and what was done already is left.

    Args:
        end: ends running attempts.
    """

    def __init__(
        self,
        store: SqlStore,
        sql: SqlThread,
        pauses: Pauses,
        together: Peers,
        fleet: Membership,
        *,
        end: Callable[[Sequence[Overdue]], Awaitable[list[Rollout]]],
    ) -> None:
        self._store = store
        self._sql = sql
        self._pauses = pauses
        self._together = together
        self._fleet = fleet
        self._end = end
        self._paused: dict[str, PauseRequest] = {}  # by model
        self._deserted_since: dict[str, float] = {}  # by model, by the loop's clock
        self._gone_since: dict[tuple[str, str], float] = {}  # by gateway and run, by the loop's clock
        self._to_end: dict[str, list[Overdue]] = {}  # attempts of runs that were given up

    async def watch(self) -> None:
        """Look after the runs until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await self.look()
            except StoreUnwritable:
                pass  # it was told
            except (StoreError, SQLAlchemyError) as error:  # the store, or another gateway: it is tried again
                _log.info("the runs of other gateways are looked after later: %s", error)
            except Exception:  # noqa: BLE001 - whatever it is: nobody else looks after them here
                _log.exception("the runs of other gateways could not be looked after; trying again")

    async def look(self) -> None:
        """Let calls wait, or go on, and give up what is to be."""
        await self._go_on(self._paused.keys())
        found = await self._sql.run(self._store.runs_elsewhere, self._together.gateway_id)
        runs = [(run, asked) for run in found if (asked := _asked(run)) is not None]
        waiting: dict[str, float] = {}  # by model, for how long
        for run, asked in runs:
            for model in (asked.model, *asked.more_models):
                if self._may_be_without_trainer(model, run.lease_left):
                    waiting[model] = asked.lease_seconds + _NOTICED_SECONDS
        await self._go_on(waiting)
        for model, lease_seconds in waiting.items():
            await self._let_wait(model, lease_seconds)
        await self._give_up(runs)

    def _may_be_without_trainer(self, model: str, lease_left: float) -> bool:
        """Whether the engines of a model are all away, and its trainer may be gone with its gateway. At first that is
        believed, since an agent's call comes again but for a second or two."""
        if not self._together.is_deserted(model):
            self._deserted_since.pop(model, None)
            return False
        since = self._deserted_since.setdefault(model, self._now())
        return self._fleet.may_be_gone(lease_left) or self._now() - since < _DOUBT_SECONDS

    async def _let_wait(self, model: str, lease_seconds: float) -> None:
        """Pause the calls of a model, unless they wait already."""
        if not self._pauses.is_paused(model):
            self._paused[model] = PauseRequest(model=model, mode="keep", lease_seconds=lease_seconds)
            try:
                await self._pauses.pause(self._paused[model])
            except StoreError as error:  # an engine that hangs cannot be frozen yet
                _log.info("calls of model %s wait later: %s", model, error)

    async def _go_on(self, models: Collection[str]) -> None:
        """End the pauses that nothing needs any more."""
        for model, pause in list(self._paused.items()):
            if model not in models or not self._together.is_deserted(model):
                del self._paused[model]
                if self._pauses.holds(pause):
                    await self._pauses.resume(ResumeRequest(model=model))

    async def _give_up(self, runs: "Sequence[tuple[RunElsewhere, _Asked]]") -> None:
        now, gone = self._now(), await self._gone(run for run, _ in runs)
        self._gone_since = {name: self._gone_since.get(name, now) for name in gone}
        for run, asked in runs:
            since = self._gone_since.get((run.gateway_id, run.run_id), now)
            if now - since > asked.lease_seconds:
                running = await self._sql.run(self._store.abandon_run, run.gateway_id, run.run_id)
                if running is not None:
                    ALARMS.error("run %s is not attached again, and its gateway is gone: it is given up", run.run_id)
                    self._to_end[run.run_id] = running
        for run_id in list(self._to_end):
            await self._end_attempts(run_id)

    async def _gone(self, runs: Iterable[RunElsewhere]) -> set[tuple[str, str]]:
        """Those whose gateway is gone, by gateway and id; none while nobody can say."""
        names = {(run.gateway_id, run.run_id) for run in runs}
        if not names or not self._fleet.knows_who_is_gone:
            return set()
        live = {each.gateway_id for each in await self._fleet.live()}
        return {name for name in names if name[0] not in live}

    async def _end_attempts(self, run_id: str) -> None:
        """End what ran of a run when it was given up; it may be attached again by now."""
        running = self._to_end[run_id]
        try:
            for attempt in running:
                await self._together.seal(attempt.rollout_id, attempt.attempt_id)
        except StoreError as error:  # its gateway does not answer: it is asked again
            _log.info("attempts of run %s are ended later: %s", run_id, error)
            return
        await self._end(running)
        await self._sql.run(self._store.shelve_abandoned, run_id)  # what that has queued again
        del self._to_end[run_id]

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _asked(run: RunElsewhere) -> _Asked | None:
    try:
        return msgspec.json.decode(run.request, type=_Asked)
    except msgspec.DecodeError as error:  # of a release whose requests are others
        _log.debug("run %s at gateway %s is left to it: %s", run.run_id, run.gateway_id, error)
        return None
