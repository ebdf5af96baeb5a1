"""Sessions over the control plane: for each prompt n of them, each created, run by an agent of this process, finalized.

Invariant: a session that was created is finalized once, whatever its runner does, also when it is cancelled; what one
session meets costs no other anything.
"""

import asyncio
import contextlib
import inspect
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from lightning_rl.agents.agent import Agent, as_agent, call_agent
from lightning_rl.agents.emitted import Emitted
from lightning_rl.agents.task_fields import check_names, name_of
from lightning_rl.compat.agent_framework_names import METHODS_INSTEAD
from lightning_rl.compat.session_batch import EndedSession, SessionBatch, SessionStats, batch_of, short_reason
from lightning_rl.compat.session_leases import Leases
from lightning_rl.compat.session_sampling import published
from lightning_rl.runner import outcome
from lightning_rl.runner.delivery import SpanDelivery
from lightning_rl.runner.error_classification import error_info
from lightning_rl.runner.outcome import Outcome
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Claim, Finish, Mode, RolloutConfig, RolloutRequest
from lightning_rl.store.errors import Conflict, Invalid, NotFound, StoreError
from lightning_rl.tools.threads import in_thread
from lightning_rl.trajectories.trajectory import Trajectory, trajectory_of
from lightning_rl_adapters.ids import new_id

__all__ = ["AgentFramework", "Session", "SessionBatch", "SessionStats"]

T = TypeVar("T")
_LEASE_SECONDS = 30.0
_REQUESTS = 16  # to the control plane at once
_SYNC_RUNNERS = 64  # at once; async ones as many as there are sessions. A session is created when one is free.
_DEADLINE_GRACE_SECONDS = 30.0  # beyond a session's own time, until the server ends it
_ALONE = "runner"  # the name of the one that has none


@dataclass(frozen=True)
class Session:
    """An open session: the rollout and the attempt that it is, and the URL and the key of its own."""

    claim: Claim
    runner: str

    @property
    def session_id(self) -> str:
        return self.claim.rollout.rollout_id

    @property
    def base_url(self) -> str:
        return str(self.claim.resources["main_llm"]["base_url"])

    @property
    def api_key(self) -> str:
        return str(self.claim.resources["main_llm"]["api_key"])


class AgentFramework:
    """Runs sessions against a server (`lightning-rl serve`, or that of a run); an async context manager.

    Args:
        url: the server.
        admin_key: its admin key.
        runners: who runs a session: an agent (a function of `task` and `llm`, an `Agent`, an `AgentLoop` class, of
            which every session gets an object of its own), or several by name. A task's `agent_name` chooses.
        default: the name for tasks that have none; with one runner, that one.
        max_concurrent_sessions: open at once, at most; 0: no bound.
        sampling_defaults: how calls are sampled. Requests override temperature, top_p, top_k, max_tokens and stop of
            them, and nothing else: penalties and min_p are those given here, or off. They are published as the latest
            resources of the server. None: what the server has.
        model: the policy's name, where the server has several.
        min_successful_sessions: a group with fewer is left out of training (its rows are excluded as `few_successes`).
        timeout_seconds: what a session may take; None: no limit. A runner that blocks runs on in its thread, and its
            session has ended.
        agent_failure: the reward of a session that failed or was given none; None: it has none.
    """

    def __init__(
        self,
        url: str,
        admin_key: str,
        runners: Any,
        *,
        default: str | None = None,
        max_concurrent_sessions: int = 0,
        sampling_defaults: Mapping[str, Any] | None = None,
        model: str | None = None,
        min_successful_sessions: int = 0,
        timeout_seconds: float | None = None,
        agent_failure: float | None = 0.0,
    ) -> None:
        if max_concurrent_sessions < 0:
            raise ValueError(f"max_concurrent_sessions is {max_concurrent_sessions}; it is a number, or 0 for no bound")
        named = dict(runners) if isinstance(runners, Mapping) else {_ALONE: runners}
        self._makers: dict[str, Callable[[], Agent]] = {name: _maker(runner) for name, runner in named.items()}
        self._default = default or (next(iter(named)) if len(named) == 1 else "")
        self._url = url
        self._key = admin_key
        self._most = max_concurrent_sessions
        self._sampling = sampling_defaults
        self._model = model
        self._least = min_successful_sessions
        self._timeout = timeout_seconds
        self._agent_failure = agent_failure

    if not TYPE_CHECKING:  # type checkers report the names that are not there

        def __getattr__(self, name: str) -> NoReturn:
            """Raises AttributeError, which for a method of verl's says what does its work."""
            instead = f": {METHODS_INSTEAD[name]}" if name in METHODS_INSTEAD else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{instead}")

    async def __aenter__(self) -> Self:
        self._store = HttpStore(self._url, self._key)
        self._deliver = SpanDelivery(self._url, self._key, connections=_REQUESTS)
        self._requests = ThreadPoolExecutor(_REQUESTS, thread_name_prefix="sessions")
        self._threads = asyncio.Semaphore(_SYNC_RUNNERS)
        self._leases = Leases(self._store, _LEASE_SECONDS)
        self._slots = asyncio.Semaphore(self._most) if self._most else contextlib.nullcontext()
        self._resources: str | None = None
        try:
            if self._sampling is not None:
                self._resources = await self._ask(published, self._store, self._sampling, self._model)
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        self._leases.close()
        self._requests.shutdown()
        self._store.close()

    async def generate_sequences(self, tasks: Sequence[Any], n: int = 1, *, mode: Mode = "train") -> SessionBatch:
        """`n` sessions of every task, which make a group; returns when all have ended.

        Raises LoopTaskError, before any is created, for a task that names a runner that there is not. Cancelled, it
        cancels what is open, and returns when that is finalized.
        """
        check_names(tasks, sorted(self._makers), self._default)
        batch = f"sessions-{secrets.token_hex(6)}"
        requests = [
            (RolloutRequest(
                task=task,
                mode=mode,
                rollout_id=f"{batch}-{index}-{number}",
                group_id=f"{batch}-{index}",
                resources_id=self._resources,
                config=self._rollout_config(),
                metadata={"task_index": f"{index}-{number}"},
            ), name_of(task, self._default))
            for index, task in enumerate(tasks)
            for number in range(n)
        ]  # fmt: skip
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self._session(request, runner)) for request, runner in requests]
        return batch_of([task.result() for task in running], self._least)

    async def create_session(self, task: Any, *, mode: Mode = "train", group_id: str | None = None) -> Session:
        """An open session, for those who run it themselves; to be finalized, or aborted."""
        check_names([task], sorted(self._makers), self._default)
        request = RolloutRequest(
            task=task,
            mode=mode,
            rollout_id=new_id("session-"),
            group_id=group_id,
            resources_id=self._resources,
            config=self._rollout_config(),
        )
        return await self._create(request, name_of(task, self._default))

    async def finalize_session(self, session: Session, reward: float | dict[str, float] | None = None) -> Trajectory:
        """Close the session; its trajectory. What it sampled is durable."""
        made = Outcome([], Finish(status="succeeded", reward=reward), [])
        await self._finalize(session, made)
        return await self._trajectory(session.claim)

    async def abort_session(self, session: Session) -> None:
        """End the session as cancelled: nothing of it is trained."""
        self._leases.release(session.claim)
        await self._ask(self._store.cancel, session.session_id)

    async def _session(self, request: RolloutRequest, runner: str) -> EndedSession:
        """Create, run, finalize: one session's whole life."""
        ended = partial(EndedSession, str(request.rollout_id), str(request.group_id), request.task, runner)
        async with self._slots, contextlib.AsyncExitStack() as thread:
            await thread.enter_async_context(self._threads)
            try:
                session = await self._create(request, runner)
            except StoreError as error:
                return ended(short_reason(type(error).__name__, str(error)), None)
            try:
                made = await self._run(session, thread)
                await self._finalize(session, made)
                trajectory = await self._trajectory(session.claim)
            except asyncio.CancelledError:
                await self.abort_session(session)
                raise
            except StoreError as error:
                return ended(short_reason(type(error).__name__, str(error)), None)
            failed = trajectory.error or made.finish.error
            return ended(None if failed is None else short_reason(failed.type, failed.message), trajectory)

    async def _create(self, request: RolloutRequest, runner: str) -> Session:
        try:
            claim: Claim = await self._ask(self._store.start, request)
        except asyncio.CancelledError:
            with contextlib.suppress(NotFound):  # where it was never created
                await self._ask(self._store.cancel, str(request.rollout_id))
            raise
        self._leases.hold(claim, lambda: None)
        return Session(claim, runner)

    async def _run(self, session: Session, thread: contextlib.AsyncExitStack) -> Outcome:
        """What the runner comes to; whatever it raises is data. `thread`: another session's, once it has returned."""
        claim = session.claim
        emitted = Emitted(claim.rollout.rollout_id, claim.attempt.attempt_id)
        loop, running = asyncio.get_running_loop(), asyncio.create_task(self._returned(session, emitted, thread))
        self._leases.hold(claim, lambda: loop.call_soon_threadsafe(running.cancel))
        try:
            await asyncio.wait({running}, timeout=self._timeout)
        finally:  # its time is over, or that of all sessions
            in_time = running.done()
            running.cancel()
            await asyncio.wait({running})
        if not in_time:
            late = TimeoutError(f"the session took longer than {self._timeout:g} s")
            return outcome.of_error(claim, emitted, late)
        if running.cancelled():
            return outcome.of_error(claim, emitted, RuntimeError("the session was cancelled from outside"))
        error = running.exception()
        if error is not None:
            return outcome.of_error(claim, emitted, error)
        return outcome.of_return(claim, emitted, running.result())

    async def _returned(self, session: Session, emitted: Emitted, thread: contextlib.AsyncExitStack) -> Any:
        with emitted.collecting():
            async with thread:
                returned = await in_thread(call_agent, self._makers[session.runner](), session.claim)
            return await returned if inspect.isawaitable(returned) else returned

    async def _finalize(self, session: Session, made: Outcome) -> None:
        try:
            await self._ask(self._finish, session.claim, made)
        finally:  # of one that cannot be finished the lease runs out
            self._leases.release(session.claim)

    def _finish(self, claim: Claim, made: Outcome) -> None:
        """Make the outcome durable. One that was lost meanwhile is over already."""
        place = (claim.rollout.rollout_id, claim.attempt.attempt_id)
        self._deliver([(place[0], batch) for batch in made.spans])
        with contextlib.suppress(Conflict):
            if made.rewards:
                self._store.add_rewards(*place, made.rewards)
            try:
                self._store.finish(*place, made.finish)
            except Invalid as error:
                self._store.finish(*place, Finish(status="failed", error=error_info(error, claim)))

    async def _trajectory(self, claim: Claim) -> Trajectory:
        traces = await self._ask(self._store.traces, [claim.rollout.rollout_id])
        model = claim.resources["main_llm"]["model"]
        return trajectory_of(traces[claim.rollout.rollout_id], agent_failure=self._agent_failure, model=model)

    def _rollout_config(self) -> RolloutConfig:
        timeout = None if self._timeout is None else self._timeout + _DEADLINE_GRACE_SECONDS
        return RolloutConfig(max_attempts=1, timeout_seconds=timeout, unresponsive_seconds=_LEASE_SECONDS)

    async def _ask(self, ask: Callable[..., T], *arguments: Any) -> T:
        """Ask the control plane from a thread. Cancelled, it waits for the answer first: nothing is left half-done."""
        answer = asyncio.get_running_loop().run_in_executor(self._requests, partial(ask, *arguments))
        cancelled: asyncio.CancelledError | None = None
        while not answer.done():
            try:
                await asyncio.wait({answer})
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            answer.exception()
            raise cancelled
        return answer.result()


def _maker(runner: Any) -> Callable[[], Agent]:
    """What makes the agent of a session: a class an object for each, anything else itself."""
    if isinstance(runner, type) and issubclass(runner, Agent):
        return runner
    agent = as_agent(runner)
    return lambda: agent
