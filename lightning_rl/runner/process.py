"""A runner process: `python -m lightning_rl.runner.process`.

Reads an 8-byte length and a pickled payload from stdin, then runs a number of workers in threads. It stops on SIGTERM
or when stdin ends, which it does when the parent dies: rollouts under way are given back, and no child of an agent
outlives it. It tells its parent on stdout that its agent is there (`started`), that a rollout ended (`finished`), and
what is wrong.
"""

import logging
import os
import pickle
import signal
import struct
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import BinaryIO, TypedDict

from lightning_rl.runner.active import ActiveClaims
from lightning_rl.runner.async_agents import AsyncAgents
from lightning_rl.runner.crew import Crew
from lightning_rl.runner.delivery import Delivery
from lightning_rl.runner.worker import Worker
from lightning_rl.server.child import TellAlarms, tell
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import RUNNER_STOPPED, Claim, ErrorInfo, Finish
from lightning_rl.store.errors import StoreError, Unreachable
from lightning_rl_proxy.alarm import ALARMS

LENGTH = struct.Struct(">Q")
_STOPPED = ErrorInfo(type=RUNNER_STOPPED, message="the runner was stopped", infrastructure=True)
_FINISH_SECONDS = 5.0  # for results that are on their way when the process is stopped
_log = logging.getLogger(__name__)


class Payload(TypedDict):
    """What a runner needs to know. `agent` is pickled by itself: it needs `sys_path` to be set first."""

    sys_path: list[str]
    url: str
    key: str
    worker_id: str
    workers: int
    agent: bytes


def worker_ids(process_id: str, workers: int) -> list[str]:
    """The ids under which a process's workers claim."""
    return [f"{process_id}.{number}" for number in range(workers)]


def main() -> None:
    """Run until told to stop."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for client in ("httpx", "httpx2"):  # they log a line for every call of the agent
        logging.getLogger(client).setLevel(logging.WARNING)
    _follow_agents_into_threads()
    payload: Payload = pickle.loads(_read_frame(sys.stdin.buffer))
    sys.path[:] = payload["sys_path"]
    agent = pickle.loads(payload["agent"])
    # Agents print where the log is, not into the parent's pipe.
    parent = os.dup(1)
    os.dup2(2, 1)
    ALARMS.addHandler(TellAlarms(parent))
    stop, failed = threading.Event(), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    threading.Thread(target=_wait_for_end_of_stdin, args=(stop,), daemon=True).start()
    store = HttpStore(payload["url"], payload["key"], connections=payload["workers"] + 1)
    active = ActiveClaims()
    _start("heartbeats", lambda: active.keep_leases(store), stop, failed)
    async_agents = AsyncAgents()
    crew = Crew(lambda name, work: _start(name, work, stop, failed), before=async_agents.leave_blocked_loop)
    tell({"started": True}, parent)
    for worker_id in worker_ids(payload["worker_id"], payload["workers"]):
        worker = Worker(
            store=store,
            agent=agent,
            worker_id=worker_id,
            active=active,
            stop=stop,
            submit=async_agents.submit,
            deliver=Delivery(payload["url"], payload["key"]),
            replace=lambda lost: crew.replace(lost.worker_id, lost.work),
            finished=cache(lambda: tell({"finished": True}, parent)),
        )
        crew.start(worker.worker_id, worker.work)
    stop.wait()
    store.patience_seconds = 0
    _give_back(store, active.take_running())
    if not active.wait_until_finished(_FINISH_SECONDS):
        _log.warning("stopped before every result was taken")
    _end_process_group()
    # Threads of agents may hang for ever; they must not keep the process.
    os._exit(1 if failed.is_set() else 0)


def _follow_agents_into_threads() -> None:
    """What threads emit that an agent starts, or executors that it uses, belongs to its rollout."""
    from opentelemetry.instrumentation.threading import ThreadingInstrumentor  # this module is the trainer's too

    ThreadingInstrumentor().instrument()


def _start(name: str, work: Callable[[], None], stop: threading.Event, failed: threading.Event) -> None:
    """Run `work` in a thread; an error in it is a bug or a refused key, and ends the process."""

    def run() -> None:
        try:
            work()
        except BaseException:
            _log.exception("%s ended", name)
            failed.set()
            stop.set()
            raise

    threading.Thread(target=run, name=name, daemon=True).start()


def _give_back(store: HttpStore, claims: list[Claim]) -> None:
    """Let rollouts under way be retried now, not only when their leases are over."""
    finish = Finish(status="failed", error=_STOPPED)
    for claim in claims:
        try:
            store.finish(claim.rollout.rollout_id, claim.attempt.attempt_id, finish)
        except Unreachable as error:
            _log.warning("rollouts were not given back: %s", error)
            return
        except StoreError as error:
            _log.info("rollout %s was not given back: %s", claim.rollout.rollout_id, error)


def _end_process_group() -> None:
    """End what agents have started; only where this process leads a group of its own."""
    if os.getpgrp() == os.getpid():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)


def _read_frame(stream: BinaryIO) -> bytes:
    (length,) = LENGTH.unpack(stream.read(LENGTH.size))
    return stream.read(length)


def _wait_for_end_of_stdin(stop: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    stop.set()


if __name__ == "__main__":
    main()
