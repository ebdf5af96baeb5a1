"""A run of the agent, as the worker sees it; and runs in this process: sync agents on threads, async ones as tasks.

Invariants: each run has an OpenTelemetry context and contextvars of its own, those of no other; it is over once, and
`done` is then called once.
"""

import asyncio
import contextvars
import inspect
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, Protocol

from lightning_rl.agents.agent import Agent, call_agent
from lightning_rl.agents.emitted import Emitted
from lightning_rl.processes.event_loop import AsyncAgents
from lightning_rl.runner import outcome
from lightning_rl.runner.outcome import Outcome
from lightning_rl.runner.output_capture import Printed
from lightning_rl.store.contract import Claim

_OURS = frozenset({__file__, call_agent.__code__.co_filename})
Spawn = Callable[[Callable[[], None]], None]  # runs what it is given in a thread, soon
Done = Callable[[Outcome], None]


class AgentRun(Protocol):
    """One run of the agent on a claimed rollout."""

    def start(self) -> None:
        """Begin; returns soon."""
        ...

    def stop(self) -> bool:
        """Its claim was lost or given back: end it as far as can be. Whether it was told to end."""
        ...

    @property
    def where(self) -> str:
        """Where it was when it was stopped, as a traceback; "" where that is not known."""
        ...


class Executor(Protocol):
    """Makes the runs of one process."""

    def run(self, claim: Claim, printed: Printed, done: Done) -> AgentRun:
        """A run that has not begun. `done` is called in a thread that may wait."""
        ...


class InProcess:
    """Runs in this process."""

    def __init__(self, agent: Agent, spawn: Spawn) -> None:
        self.agent = agent
        self.spawn = spawn
        self.async_agents = AsyncAgents()

    def run(self, claim: Claim, printed: Printed, done: Done) -> AgentRun:
        """See `Executor`."""
        return _InProcess(self, claim, printed, done)


class _InProcess:
    def __init__(self, runs: InProcess, claim: Claim, printed: Printed, done: Done) -> None:
        self._runs = runs
        self._claim = claim
        self._printed = printed
        self._done = done
        self._emitted = Emitted(claim.rollout.rollout_id, claim.attempt.attempt_id)
        self._context = contextvars.Context()
        self._inside = ExitStack()
        self._lock = threading.Lock()
        self._stopped = False
        self._thread: int | None = None  # in which the agent is
        self._task: Future[None] | None = None
        self.where = ""

    def start(self) -> None:
        """See `AgentRun`."""
        self._runs.spawn(self._call)

    def stop(self) -> bool:
        """See `AgentRun`. A thread cannot be ended from outside; a task can, where nobody blocks its loop."""
        with self._lock:
            self._stopped = True
            self.where = _stack_of(self._thread)
            task = self._task
        if task is not None:
            task.cancel()
            self._runs.async_agents.leave_blocked_loop()
        return task is not None

    def _call(self) -> None:
        self._context.run(self._enter)
        with self._lock:
            self._thread = threading.get_ident()
        try:
            returned = self._context.run(call_agent, self._runs.agent, self._claim)
        except BaseException as error:  # noqa: BLE001 - whatever an agent raises is data: Rust that panics, a cancellation
            self._end(outcome.of_error, error)
            return
        if not inspect.isawaitable(returned):
            self._end(outcome.of_return, returned)
            return
        with self._lock:  # the thread is another's from now on
            self._thread = None
            self._task = self._context.run(self._runs.async_agents.submit, self._awaited(returned))
            if self._stopped:
                self._task.cancel()

    async def _awaited(self, awaitable: Awaitable[Any]) -> None:
        try:
            returned = await awaitable
        except BaseException as error:  # noqa: BLE001 - as above; nothing may end the loop, which others run in
            if self._stopped and isinstance(error, asyncio.CancelledError):
                self.where = _agent_stack(traceback.extract_tb(error.__traceback__))
            failed = error
            self._runs.spawn(lambda: self._end(outcome.of_error, failed))
        else:
            self._runs.spawn(lambda: self._end(outcome.of_return, returned))

    def _enter(self) -> None:
        self._inside.enter_context(self._printed.collecting())
        self._inside.enter_context(self._emitted.collecting())

    def _end(self, made: Callable[[Claim, Emitted, Any], Outcome], result: Any) -> None:
        with self._lock:
            self._thread = None
        self._context.run(self._inside.close)
        self._done(made(self._claim, self._emitted, result))


def _stack_of(thread: int | None) -> str:
    frame = None if thread is None else sys._current_frames().get(thread)
    return "" if frame is None else _agent_stack(traceback.extract_stack(frame))


def _agent_stack(stack: traceback.StackSummary) -> str:
    """The agent's part of it."""
    runner_entries = [number for number, entry in enumerate(stack) if entry.filename in _OURS]
    agent_entries = traceback.StackSummary.from_list(stack[runner_entries[-1] + 1 :] if runner_entries else stack)
    return "".join(["The agent was here when its time was over (most recent call last):\n", *agent_entries.format()])
