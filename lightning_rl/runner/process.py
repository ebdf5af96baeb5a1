"""A runner process: `python -m lightning_rl.runner.process`.

Reads its payload from stdin, then runs rollouts, many at a time. It stops on SIGTERM or when stdin ends, which it does
when the parent dies: rollouts under way are given back, and no child of an agent outlives it. It tells its parent on
stdout that its agent is there (`started`), that a rollout ended (`finished`), and what is wrong.

A thread cannot be ended from outside. So when an agent hangs on past its time, the process *retires*: it takes no more
rollouts, frees its slots one by one as the others end (`freed`), and then ends, and the hanging thread with it. One
that is to run only so many rollouts retires with the last of them.
"""

import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from lightning_rl.processes.child import TellAlarms, tell
from lightning_rl.processes.exit_handlers import leave
from lightning_rl.runner import isolated, output_capture
from lightning_rl.runner.delivery import SpanDelivery
from lightning_rl.runner.executors import Executor, InProcess
from lightning_rl.runner.isolated import ForkServer
from lightning_rl.runner.leases import ActiveClaims
from lightning_rl.runner.payload import LENGTH, Payload
from lightning_rl.runner.results import Results
from lightning_rl.runner.slots import Slots
from lightning_rl.runner.worker import Worker
from lightning_rl.store.client import HttpStore
from lightning_rl.store.errors import NotAllowed
from lightning_rl_proxy.recording.alerts import ALARMS

_CONNECTIONS = 4  # of heartbeats, claims, results, and those of lost claims
_EXIT_HANDLERS_SECONDS = 5.0
_FINISH_SECONDS = 5.0  # for results that are on their way when the process is stopped
_MOST_THREADS = 100_000  # more than there are slots, and agents that hang until the process ends
_log = logging.getLogger(__name__)


def main() -> None:
    """Run until told to stop."""
    output_capture.route()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for client in ("httpx", "httpx2"):  # they log a line for every call of the agent
        logging.getLogger(client).setLevel(logging.WARNING)
    _follow_agents_into_threads()
    payload: Payload = pickle.loads(_read_frame())
    sys.path[:] = payload["sys_path"]
    if payload["isolation"] == "process":
        isolated.warm_up()
    agent = pickle.loads(payload["agent"])
    # Agents print where the log is, not into the parent's pipe.
    parent = os.dup(1)
    os.dup2(2, 1)
    forked = isolated.fork(agent, close=parent) if payload["isolation"] == "process" else None
    process = _Process(payload, parent)
    if forked is None:
        process.run(InProcess(agent, process.spawn))
    else:
        forked.begin(process.spawn, died=process.fail)
        process.run(forked)


class _Process:
    """The parts of this process, and its end. `parent` is the pipe to it."""

    def __init__(self, payload: Payload, parent: int) -> None:
        self._payload = payload
        self._parent = parent
        self._stop, self._failed = threading.Event(), threading.Event()
        self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="rollout")
        self._slots = Slots(
            payload["slots"],
            freed=lambda number: tell({"freed": number}, parent),
            empty=self._stop.set,
            most=payload["most"],
            ended=self._tell_ended,
        )
        ALARMS.addHandler(TellAlarms(parent))

    def _tell_ended(self, number: int) -> None:
        if self._payload["most"] is not None:
            tell({"ended": number}, self._parent)

    def spawn(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread; an error in it is a bug or a refused key, and ends the process."""
        self._threads.submit(self._guarded, work)

    def fail(self) -> None:
        """End this process: something of it is gone."""
        self._failed.set()
        self._stop.set()

    def run(self, runs: Executor | ForkServer) -> None:
        """Take rollouts until stopped, or until all slots are freed; does not return."""
        url, key = self._payload["url"], self._payload["key"]
        signal.signal(signal.SIGTERM, lambda *_: self._stop.set())
        threading.Thread(target=self._hear_parent, name="parent", daemon=True).start()
        store = HttpStore(url, key, connections=_CONNECTIONS)
        active = ActiveClaims()
        results = Results(store, active, self._stop, SpanDelivery(url, key))
        worker = Worker(
            store=store,
            worker_id=self._payload["worker_id"],
            slots=self._slots,
            active=active,
            results=results,
            runs=runs,
            stop=self._stop,
            finished=cache(lambda: tell({"finished": True}, self._parent)),
            hangs=self._slots.retire,
        )
        self._start("heartbeats", lambda: active.keep_leases(store))
        tell({"started": True}, self._parent)
        self._start("results", results.send)
        self._start("taker", worker.take)
        self._stop.wait()
        self._slots.close()
        store.patience_seconds = 0
        worker.give_back()
        if not active.wait_until_finished(_FINISH_SECONDS):
            _log.warning("stopped before every result was taken")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is sent to the group, which this process is in
        # Threads of agents may hang for ever; they must not keep the process.
        leave(1 if self._failed.is_set() else 0, seconds=_EXIT_HANDLERS_SECONDS, last=_end_process_group)

    def _start(self, name: str, work: Callable[[], None]) -> None:
        threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True).start()

    def _guarded(self, work: Callable[[], None]) -> None:
        name = threading.current_thread().name
        try:
            work()
        except NotAllowed as error:
            _log.error("%s ended: %s", name, error)
            self.fail()
        except BaseException:  # noqa: BLE001 - whatever ends a thread ends the process
            _log.exception("%s ended", name)
            self.fail()

    def _hear_parent(self) -> None:
        while more := os.read(0, 4096):
            self._slots.add(len(more))
        self._stop.set()


def _follow_agents_into_threads() -> None:
    """What threads emit and print that an agent starts, or executors that it uses, belongs to its rollout."""
    from opentelemetry.instrumentation.threading import ThreadingInstrumentor

    ThreadingInstrumentor().instrument()


def _end_process_group() -> None:
    """End what agents have started; only where this process leads a group of its own."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGTERM)


def _read_frame() -> bytes:
    """The first frame of stdin. Not through `sys.stdin`, which would read on into what comes after it."""
    (length,) = LENGTH.unpack(_read(LENGTH.size))
    return _read(length)


def _read(length: int) -> bytes:
    read = bytearray()
    while len(read) < length:
        more = os.read(0, length - len(read))
        if not more:
            raise EOFError("the parent ended before it had told what to run")
        read += more
    return bytes(read)


if __name__ == "__main__":
    main()
