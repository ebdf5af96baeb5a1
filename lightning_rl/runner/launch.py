"""Starting runner processes from another one.

The agent travels by cloudpickle through a pipe, so one that is defined in a script or a notebook works as it is, and
the script is never run again. Keys travel the same way, never in the environment.

A process that dies (memory ran out, a crash in a C extension) is started anew, and its attempts are lost at once. One
that retires, since an agent in it hangs, is followed by another at once, and ends when its other rollouts have.

A runner that is given a number of rollouts ends when so many have ended in it.

Invariant: all processes of a runner together have the slots that it was given, so no more rollouts run at once.
"""

import contextlib
import logging
import os
import pickle
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lightning_rl.agents.agent import Agent
from lightning_rl.errors import Explained
from lightning_rl.processes.child import Child, ChildDied
from lightning_rl.processes.cores import cores
from lightning_rl.runner.agent_pickle import pickled
from lightning_rl.runner.payload import LENGTH, ONE_MORE_SLOT, Isolation, Payload
from lightning_rl.sandboxes.local import remove_left_behind
from lightning_rl.store.client import HttpStore
from lightning_rl.store.errors import NotAllowed, StoreError

MOST = 64  # rollouts at once in a process where no number is given, and in all where each starts processes of its own
FOR_SERVICES = 8  # the same where only services answer, of whose queues nothing is known
_RESTARTS = 3  # of one process, without a rollout that ended in between
_log = logging.getLogger(__name__)


class CannotIsolate(Explained, OSError):
    """This system cannot run rollouts in processes of their own."""


class Working:
    """Running runner processes."""

    def __init__(self, runners: "list[_Runner]") -> None:
        self._runners = runners

    @property
    def pids(self) -> list[int]:
        """Of the processes that take rollouts now."""
        return [runner.child.process.pid for runner in self._runners]

    @property
    def retiring_pids(self) -> list[int]:
        """Of the processes that wait for the end of their last rollouts, since an agent in them hangs."""
        return [pid for runner in self._runners for pid in runner.retiring_pids]

    @property
    def worker_ids(self) -> list[str]:
        """The names under which all these processes claim."""
        return [worker_id for runner in self._runners for worker_id in runner.worker_ids]

    @property
    def finished(self) -> bool:
        """Whether a rollout has ended in a process that takes them now."""
        return any("finished" in runner.child.reported for runner in self._runners)

    @property
    def done(self) -> bool:
        """Whether as many rollouts have ended as were to be run; never where no number was given."""
        return all(runner.done for runner in self._runners)

    def check(self) -> None:
        """Start anew what has died, with a warning. Raises ChildDied, with the end of its log, when that is of no use:
        the process could not start, or dies again and again."""
        for runner in self._runners:
            runner.check()


class _RunnerChild:
    """One process of a runner, with the slots that it was given. Not yet started when made."""

    def __init__(self, name: str, payload: Payload, log: Path, changed: Callable[[], None]) -> None:
        # Each process has a worker id of its own, so that the claims of a dead one are told from everybody else's; it
        # names the machine, for whoever looks for one whose attempts fail.
        self.worker_id = f"{name.replace(' ', '-')}-{socket.gethostname()}-{secrets.token_hex(4)}"
        self.slots = payload["slots"]
        frame = pickle.dumps(payload | {"worker_id": self.worker_id})
        self.child = Child(
            "lightning_rl.runner.process", name=name, log=log, first=LENGTH.pack(len(frame)) + frame, heard=changed
        )

    @property
    def held(self) -> int:
        """The slots that it has not freed."""
        return self.slots - int(self.child.reported.get("freed", 0))

    @property
    def retires(self) -> bool:
        return "freed" in self.child.reported

    @property
    def ended(self) -> bool:
        return self.child.process.poll() is not None

    def give(self, slots: int) -> None:
        """Let it run more at once."""
        self.slots += slots
        self.child.write(ONE_MORE_SLOT * slots)


class _Runner:
    """One process after another; safe to share between threads. None is started when it is made."""

    def __init__(self, name: str, payload: Payload, log: Path, store: HttpStore) -> None:
        self._name = name
        self._payload = payload
        self._log = log
        self._store = store
        self._remaining = payload["most"]
        self._in_vain = 0
        self._lock = threading.RLock()
        self._stopped = False
        self._retiring: list[_RunnerChild] = []
        self._changed = threading.Event()
        self._present = self._made(payload["slots"])

    @property
    def child(self) -> Child:
        """The process that takes rollouts."""
        return self._present.child

    @property
    def retiring_pids(self) -> list[int]:
        with self._lock:
            return [process.child.process.pid for process in self._retiring if not process.ended]

    @property
    def worker_ids(self) -> list[str]:
        with self._lock:
            return [process.worker_id for process in [*self._retiring, self._present]]

    @property
    def done(self) -> bool:
        """Whether the rollouts that it was to run have ended."""
        return self._remaining is not None and self._remaining <= 0

    def start(self) -> None:
        """Start the process, and the thread that follows it."""
        self._start()
        threading.Thread(target=self._follow, name=f"following {self._name}", daemon=True).start()

    def ask_to_stop(self) -> None:
        """See `Child`."""
        with self._lock:
            self._stopped = True
            self._changed.set()
            for process in [*self._retiring, self._present]:
                process.child.ask_to_stop()

    def stop(self) -> None:
        """See `Child`."""
        with self._lock:
            processes = [*self._retiring, self._present]
            for process in processes:
                process.child.stop()
        remove_left_behind()
        with contextlib.suppress(StoreError):  # claims that were on their way to a process that ended
            self._store.workers_died([process.worker_id for process in processes])

    def check(self) -> None:
        """Start it anew when it has died. Raises ChildDied."""
        with self._lock:
            if self.done or not self._present.ended:
                return
            if self._remaining is not None:
                self._present.child.stop()  # it has told all that it had to tell
                self._remaining -= int(self._present.child.reported.get("ended", 0))
                if self.done:
                    return
                if self._present.retires and self._present.child.process.returncode == 0:
                    self._warn_of_hanging()
                    self._next()
                    return
            elif self._present.retires:  # as it should; the thread that follows it may not have seen it yet
                self._replace()
                return
            died = self.child.died()
            if "started" not in self.child.reported:
                raise died
            self._in_vain = 0 if "finished" in self.child.reported else self._in_vain + 1
            if self._in_vain > _RESTARTS:
                raise ChildDied(f"a runner died {self._in_vain} times and no rollout ended meanwhile: {died}")
            ended = self._lose_claims(self._present)
            if self._remaining is not None:
                self._remaining -= ended
            if self.done:
                _log.warning("a runner died, and with it the last try of its last rollout%s. %s", self._hint(), died)
                return
            _log.warning("a runner died; it is started anew, and its rollouts are retried%s. %s", self._hint(), died)
            self._next()

    def _hint(self) -> str:
        killed = self.child.process.returncode == -signal.SIGKILL
        return " (lower n_runners, or what the agent holds, where memory runs out)" if killed else ""

    def _made(self, slots: int) -> _RunnerChild:
        payload = Payload(**(self._payload | {"slots": slots, "most": self._remaining}))
        return _RunnerChild(self._name, payload, self._log, self._changed.set)

    def _start(self) -> None:
        self.child.start()
        self.child.listen()

    def _next(self) -> None:
        self._present = self._made(self._share())
        self._start()

    def _share(self) -> int:
        """The slots that are not held by processes which retire."""
        return self._payload["slots"] - sum(process.held for process in self._retiring)

    def _follow(self) -> None:
        while not self._stopped:
            self._changed.wait()
            self._changed.clear()
            with self._lock, contextlib.suppress(ChildDied):  # of which `check` tells
                if not self._stopped:
                    self._replace()

    def _replace(self) -> None:
        """Let another process follow one that retires, and have what such a one has freed."""
        if self._present.retires and self._remaining is None:  # else it is known only when that has ended: `check`
            self._warn_of_hanging()
            self._retiring.append(self._present)
            self._next()
        for process in [process for process in self._retiring if process.ended]:
            self._retiring.remove(process)
            process.child.stop()
            if process.child.process.returncode != 0:
                self._lose_claims(process)
        more = self._share() - self._present.slots
        if more > 0:
            self._present.give(more)

    def _warn_of_hanging(self) -> None:
        _log.warning(
            "an agent in %s goes on although its time is over, and cannot be ended: another process takes its "
            "place, and this one ends when its other rollouts have. Give the agent's requests and tools a "
            "time-out, or run each rollout in a process of its own (isolation=process)",
            self._name,
        )

    def _lose_claims(self, process: _RunnerChild) -> int:
        """Have the rollouts of a process that died retried; how many have ended, since this was their last try. Raises
        ChildDied where the server refuses the key: whoever comes next would be refused, too."""
        try:
            moved = self._store.workers_died([process.worker_id])
        except NotAllowed as error:
            raise ChildDied(
                f"the server at {self._store.url} takes the key of {self._name} no longer: {error}"
            ) from error
        except StoreError as error:
            _log.warning("the rollouts of %s are retried only when their leases are over: %s", self._name, error)
            return 0
        return sum(rollout.ended_at is not None for rollout in moved)


@contextmanager
def launch(
    n_runners: int,
    agent: Agent,
    url: str,
    key: str,
    *,
    log_dir: Path,
    isolation: Isolation = "thread",
    most: int | None = None,
) -> Iterator[Working]:
    """Up to `n_runners` concurrent rollouts in at most as many processes as there are cores, while the block runs.

    There are fewer while the server holds rollouts back because the engines bear no more (`server.admission`).
    `key` is a runner key of the server at `url`. Each process logs to `log_dir`/runner-<number>.log. With `isolation`
    "process" each rollout runs in a process of its own, forked from these. `most` rollouts end here in all where it is
    given. Raises CannotIsolate where isolation cannot be.
    """
    payload = payload_of(pickled(agent), url, key, isolation=isolation)
    processes = cores() if most is None else min(cores(), most)
    slots = shares(n_runners, processes)
    with running(payload, slots, log_dir=log_dir, most=most) as working:
        yield working


def at_once(asked_for: int | None, *, start_processes: bool) -> int:
    """How many rollouts run at once at most where no number is given, of so many that are asked for (None: any)."""
    most = MOST if start_processes else MOST * cores()
    return min(asked_for or most, most)


def payload_of(agent: bytes, url: str, key: str, *, isolation: Isolation) -> Payload:
    """What every process of a pickled agent is told; `running` gives each its slots."""
    return Payload(
        sys_path=sys.path, url=url, key=key, worker_id="", slots=0, most=None, isolation=isolation, agent=agent
    )


@contextmanager
def running(
    payload: Payload, slots: Sequence[int], *, log_dir: Path, most: int | None = None, name: str = "runner"
) -> Iterator[Working]:
    """A process for each of `slots`, that runs so many rollouts at once, while the block runs. Messages, and the
    worker ids, begin with `name`. Raises CannotIsolate."""
    if payload["isolation"] == "process" and not hasattr(os, "waitid"):
        raise CannotIsolate("isolation=process needs Linux: leave it at thread")
    mosts = [None] * len(slots) if most is None else shares(most, len(slots))
    with ExitStack() as parts:
        store = HttpStore(payload["url"], payload["key"], connections=1, patience_seconds=0)
        parts.callback(store.close)
        runners = [
            _Runner(f"{name} {number}", Payload(**(payload | {"slots": at_once, "most": of_it})), log, store)
            for number, (at_once, of_it) in enumerate(zip(slots, mosts, strict=True))
            for log in [log_dir / f"runner-{number}.log"]
        ]
        # All are asked first, then each is waited for, whatever becomes of the others; none of them runs yet.
        for runner in runners:
            parts.callback(runner.stop)
        for runner in runners:
            parts.callback(runner.ask_to_stop)
        for runner in runners:
            runner.start()
        yield Working(runners)


def shares(n_runners: int, cores: int) -> list[int]:
    """How many rollouts each process runs at a time: as even as can be, none without any."""
    processes = min(n_runners, cores)
    return [n_runners // processes + (number < n_runners % processes) for number in range(processes)]


def log_dirs(folder: Path, servers: int) -> list[Path]:
    """Where the runners of each server log: in the folder, of several servers each in one of its own there."""
    folders = [folder] if servers == 1 else [folder / f"runners-{number}" for number in range(servers)]
    for each in folders:
        each.mkdir(parents=True, exist_ok=True)
    return folders
