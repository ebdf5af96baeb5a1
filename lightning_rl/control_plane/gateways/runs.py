"""The training runs that are attached to a server, each under a lease that its trainer renews.

A rollout is a run's when its id ends with `.` and the run's id. Invariants: when a run begins, ends or is given up,
nothing of it runs on: attempts that run are lost, rollouts that are queued wait until they are asked for again (other
weights would sample them), and the engines of its model are out. A trainer that is silent, and its engines with it,
costs no rollout an attempt: calls wait until it is there again, or given up. A server that is started anew hands out
nothing of the runs that were attached before, until they attach again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from lightning_rl.control_plane.gateways.cluster_rpc import Alone
from lightning_rl.control_plane.gateways.gateway_control import GatewayDoor, PauseRequest, Pauses, ResumeRequest
from lightning_rl.control_plane.gateways.resolve import MAIN_LLM, policy_alone
from lightning_rl.store.contract import Overdue, Rollout
from lightning_rl.store.errors import Conflict, NotFound, StoreError
from lightning_rl.store.sql import SqlStore
from lightning_rl.store.sql_thread import SqlThread
from lightning_rl_proxy.recording.alerts import ALARMS

_LOOK_SECONDS = 0.5  # between two looks at the runs
_SILENT_SECONDS = 1.0  # after which a trainer whose engines are away is believed to be gone, too
_CONFIRM_SECONDS = 2.0  # between two looks whether another gateway of the store has a run
_LATEST = "latest"
_log = logging.getLogger(__name__)


class RunRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run that attaches: the model that its engines sample, and for how long it may be silent. A run of several
    policies has `more_models`. `sessions`: those that its folder knows of, the one that begins last; [] is not looked
    at."""

    model: str
    lease_seconds: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    more_models: list[str] = []
    sessions: list[str] = []

    @property
    def models(self) -> list[str]:
        """All models that its engines sample."""
        return [self.model, *self.more_models]


class RunSession(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trainer says that it lives, or leaves: that of the `session` of its run that it began."""

    session: str | None = None


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An attached run. Calls of earlier trainers of it ended before `began_ns`, since the epoch."""

    run_id: str
    model: str
    began_ns: int


class _Attached:
    """A run that is attached; `heard_at`, and `confirmed_at` in the store, are by the loop's clock. `before`: it was so
    to the server before this one, or is given up, and is to attach again."""

    def __init__(self, request: RunRequest, *, before: bool = False) -> None:
        self.request = request
        self.before = before
        self.given_up = False
        self.heard_at = self.confirmed_at = asyncio.get_running_loop().time()
        self.pauses: dict[str, PauseRequest] = {}  # by model, made since its trainer is silent

    def check_session(self, run_id: str, session: str | None) -> None:
        if session is not None and session not in self.request.sessions[-1:]:
            raise Conflict(f"run {run_id} goes on in another trainer, from another copy of its folder")

    def silent_seconds(self) -> float:
        return asyncio.get_running_loop().time() - self.heard_at


class Runs:
    """The runs that are attached to one server.

    Args:
        model: what `main_llm` is again when the model of a run is gone.
        end: ends running attempts.
        gateway: the gateway of the server.
    """

    def __init__(
        self,
        store: SqlStore,
        sql: SqlThread,
        gateway: GatewayDoor,
        pauses: Pauses,
        together: Alone,
        *,
        model: str,
        end: Callable[[Sequence[Overdue]], Awaitable[list[Rollout]]],
    ) -> None:
        self._store = store
        self._sql = sql
        self._gateway = gateway
        self._pauses = pauses
        self._together = together
        self._model = model
        self._end = end
        self._attached: dict[str, _Attached] = {}
        self._clearing = asyncio.Lock()  # a run that begins waits until what its last lease left is cleared away

    async def restore(self) -> None:
        """Before anything is handed out: what is queued of the runs that were attached to the server before waits."""
        remembered = await self._sql.run(self._store.remembered_runs, self._together.gateway_id)
        for run_id, request in remembered.items():
            await self._shelve(run_id)
            self._attached[run_id] = _Attached(msgspec.json.decode(request, type=RunRequest), before=True)

    async def begin(self, run_id: str, request: RunRequest) -> RunInfo:
        """Attach a run; what an earlier trainer of it left here is cleared away first.

        Raises Conflict where another copy of its folder has gone on here; nothing is changed then.
        """
        if request.sessions:
            await self._sql.run(self._store.enter_session, run_id, request.sessions)
        self._attached.pop(run_id, None)
        await self._clear(run_id, request.models)
        encoded = msgspec.json.encode(request).decode()
        await self._sql.run(self._store.remember_run, self._together.gateway_id, run_id, encoded)
        self._attached[run_id] = _Attached(request)
        _log.info("run %s is attached, with %s", run_id, ", ".join(request.models))
        return RunInfo(run_id=run_id, model=request.model, began_ns=self._gateway.now_ns())

    def check_attached(self, rollout_ids: Sequence[str | None]) -> None:
        """Raises Conflict for rollouts of a run that is to attach again first."""
        for run_id, run in self._attached.items():
            if run.before and any(
                rollout_id is not None and rollout_id.endswith(f".{run_id}") for rollout_id in rollout_ids
            ):
                raise _not_attached(run_id)

    async def heartbeat(self, run_id: str, session: str | None = None) -> None:
        """Renew the lease of a run. Raises Conflict where it is not attached, or is by another session."""
        run = self._attached.get(run_id)
        if run is None or run.before:
            raise _not_attached(run_id)
        run.check_session(run_id, session)
        run.heard_at = asyncio.get_running_loop().time()
        pauses, run.pauses = run.pauses, {}
        for pause in pauses.values():
            if self._pauses.holds(pause):
                await self._together.resume(ResumeRequest(model=pause.model))

    async def end(self, run_id: str, session: str | None = None) -> None:
        """Detach a run; one that is not attached stays so. Raises Conflict where it is attached by another session."""
        run = self._attached.get(run_id)
        if run is not None:
            run.check_session(run_id, session)
            del self._attached[run_id]
            await self._clear(run_id, run.request.models, run)
            _log.info("run %s has left", run_id)

    async def watch(self) -> None:
        """Look after the runs until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for run_id, run in list(self._attached.items()):
                try:
                    await self._look(run_id, run)
                    if self._together.gateway_id:
                        await self._confirm(run_id, run)
                except (StoreError, SQLAlchemyError) as error:  # the store, or another gateway: it is tried again
                    _log.warning("run %s: %s", run_id, error)
                except Exception:  # noqa: BLE001 - of one run: the others are still to be looked after
                    _log.exception("run %s could not be looked after; trying again in %g s", run_id, _LOOK_SECONDS)

    async def _look(self, run_id: str, run: _Attached) -> None:
        request = run.request
        remaining = request.lease_seconds - run.silent_seconds()
        if (remaining <= 0 or run.before) and not await self._is_remembered(run_id):
            self._drop(run_id, run)
        elif remaining <= 0:
            if not run.given_up:
                ALARMS.error("run %s was not heard of for %g s: it is given up", run_id, request.lease_seconds)
            run.given_up = run.before = True  # whatever is ended now: its trainer is to attach it again
            await self._clear(run_id, request.models, run)
            self._drop(run_id, run)
        elif run.before:
            await self._shelve(run_id)  # what is queued again, its runner is gone
        elif run.silent_seconds() > _SILENT_SECONDS:
            for model in request.models:
                if model not in run.pauses and await self._is_deserted(model):
                    await self._let_wait(run, model, remaining + 2 * _LOOK_SECONDS)

    async def _confirm(self, run_id: str, run: _Attached) -> None:
        """Drop a run that is attached to another gateway since, or was given up by one while nobody heard of this."""
        now = asyncio.get_running_loop().time()
        if now - run.confirmed_at > _CONFIRM_SECONDS:
            run.confirmed_at = now
            if not await self._is_remembered(run_id):
                self._drop(run_id, run)

    async def _is_remembered(self, run_id: str) -> bool:
        return run_id in await self._sql.run(self._store.remembered_runs, self._together.gateway_id)

    async def _shelve(self, run_id: str) -> bool:
        """Shelve a run that was attached here, unless it is attached to another gateway since; whether it was not."""
        return await self._sql.run(self._store.shelve, run_id, attached_at=self._together.gateway_id)

    def _drop(self, run_id: str, run: _Attached) -> None:
        if self._attached.get(run_id) is run:
            del self._attached[run_id]

    async def _let_wait(self, run: _Attached, model: str, lease_seconds: float) -> None:
        """Pause the calls of a model whose run is silent."""
        run.pauses[model] = PauseRequest(model=model, mode="keep", lease_seconds=lease_seconds)
        try:
            await self._together.pause(run.pauses[model])
        except StoreError:
            run.pauses.pop(model, None)  # a heartbeat may have taken them
            raise

    async def _is_deserted(self, model: str) -> bool:
        """Whether the engines of a model are all away, and its calls do not wait yet."""
        with contextlib.suppress(TimeoutError):  # one that hangs is found out by its checks
            async with asyncio.timeout(_LOOK_SECONDS):
                await self._gateway.check()
        return self._together.is_deserted(model) and not self._pauses.is_paused(model)

    async def _clear(self, run_id: str, models: Sequence[str], former: _Attached | None = None) -> None:
        """End what a run has here; of one that was attached as `former` unless it is so anew, here or elsewhere."""
        async with self._clearing:
            if former is None:
                await self._sql.run(self._store.shelve, run_id)
            elif self._attached.get(run_id) not in (None, former) or not await self._shelve(run_id):
                return
            running = await self._sql.run(self._store.running, why="session", run_id=run_id)
            for attempt in running:
                await self._together.seal(attempt.rollout_id, attempt.attempt_id)
            await self._end(running)
            if former is None:
                await self._sql.run(self._store.shelve, run_id)  # what that has queued again
            elif not await self._shelve(run_id):
                return
            others = [run for name, run in self._attached.items() if name != run_id and not run.before]
            for model in set(models).difference(*(other.request.models for other in others)):
                for engine in self._together.engines_of(model):
                    await self._together.remove_engine(engine.engine_id)
                if self._pauses.is_paused(model):
                    await self._together.resume(ResumeRequest(model=model))
                await self._sql.run(self._publish_own, model)
            await self._sql.run(self._store.forget_run, self._together.gateway_id, run_id)

    def _publish_own(self, removed_model: str) -> None:
        """Rollouts that name no resources get the server's own model again, where they would get one that is gone."""
        try:
            latest = self._store.resources(_LATEST).resources.get(MAIN_LLM, {})
        except NotFound:
            return
        if removed_model != self._model and latest.get("model") == removed_model:
            self._store.publish(policy_alone(self._model))


def _not_attached(run_id: str) -> Conflict:
    return Conflict(f"run {run_id} is not attached here: its lease was over, or the server was started anew")
