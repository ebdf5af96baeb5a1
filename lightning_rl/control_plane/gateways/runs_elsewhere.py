"""The training runs whose trainers speak to other gateways of the store.

Invariant: a trainer that dies together with its gateway costs what it costs alone: calls wait here while the engines of
its run are away, and when the gateway has been gone for as long as the run's lease, the run is given up, unless it is
attached again. Where the gateway is gone and the run's models were never heard of here, since all servers of the store
were started anew, it is given up at once: its attempts could but fail.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from lightning_rl.control_plane.gateways.cluster_rpc import Peers
from lightning_rl.control_plane.gateways.gateway_control import PauseRequest, Pauses, ResumeRequest
from lightning_rl.control_plane.gateways.membership import Membership
from lightning_rl.store.contract import Overdue, Rollout
from lightning_rl.store.errors import StoreError
from lightning_rl.store.sql import SqlStore
from lightning_rl.store.sql_thread import SqlThread
from lightning_rl_proxy.recording.alerts import ALARMS

_LOOK_SECONDS = 0.5
_NOTICED_SECONDS = 30.0  # at most, until a gateway that is gone is known to be
_log = logging.getLogger(__name__)


class _Run(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed of a `RunRequest`, which a gateway of another version may have written."""

    model: str
    lease_seconds: float = 60.0
    more_models: list[str] = []

    @property
    def models(self) -> list[str]:
        return [self.model, *self.more_models]


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
        self._gone_since: dict[tuple[str, str], float] = {}  # by gateway and run, by the loop's clock

    async def watch(self) -> None:
        """Look after the runs until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await self.look()
            except (StoreError, SQLAlchemyError) as error:  # the store, or another gateway: it is tried again
                _log.info("the runs of other gateways are looked after later: %s", error)
            except Exception:  # noqa: BLE001 - whatever it is: nobody else looks after them here
                _log.exception("the runs of other gateways could not be looked after; trying again")

    async def look(self) -> None:
        """Let calls wait, or go on, and give up what is to be."""
        attached = await self._sql.run(self._store.runs_elsewhere, self._together.gateway_id)
        runs = {name: msgspec.json.decode(request, type=_Run) for name, request in attached.items()}
        await self._go_on({model for run in runs.values() for model in run.models})
        for run in runs.values():
            for model in run.models:
                await self._let_wait(model, run.lease_seconds + _NOTICED_SECONDS)
        known_models = self._together.model_pauses().keys()
        live = {each.gateway_id for each in await self._fleet.live()} if runs else set()
        gone = [name for name in runs if name[0] not in live]
        sure = gone if self._fleet.knows_who_is_gone else []
        self._gone_since = {name: self._gone_since.get(name, self._now()) for name in sure}
        for name in gone:
            gone_for = self._now() - self._gone_since.get(name, self._now())
            if gone_for > runs[name].lease_seconds or known_models.isdisjoint(runs[name].models):
                try:
                    await self._give_up(*name)
                except StoreError as error:  # another gateway does not seal an attempt, say
                    _log.warning("run %s is given up later: %s", name[1], error)

    async def _let_wait(self, model: str, lease_seconds: float) -> None:
        """Pause the calls of a model whose engines are all away: its trainer may be gone, too."""
        if self._is_deserted(model) and not self._pauses.is_paused(model):
            self._paused[model] = PauseRequest(model=model, mode="keep", lease_seconds=lease_seconds)
            await self._pauses.pause(self._paused[model])

    async def _go_on(self, models: Collection[str]) -> None:
        """End the pauses that nothing needs any more."""
        for model, pause in list(self._paused.items()):
            if model not in models or not self._is_deserted(model):
                del self._paused[model]
                if self._pauses.holds(pause):
                    await self._pauses.resume(ResumeRequest(model=model))

    def _is_deserted(self, model: str) -> bool:
        engines = [self._together.engine(info) for info in self._together.engines_of(model)]
        return bool(engines) and all(each.away for each in engines)

    async def _give_up(self, gateway_id: str, run_id: str) -> None:
        running = await self._sql.run(self._store.abandon_run, gateway_id, run_id)
        if running is None:
            return
        ALARMS.error("run %s is not attached again, and its gateway is gone: it is given up", run_id)
        for attempt in running:
            await self._together.seal(attempt.rollout_id, attempt.attempt_id)
        await self._end(running)
        await self._sql.run(self._store.abandon_run, gateway_id, run_id, forget=True)  # with what that has queued again

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
