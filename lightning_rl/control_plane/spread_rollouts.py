"""Which of several servers has which rollout of a run, and what of it is still to be asked for there.

Invariant: a rollout is at one server at a time. Its request is kept until it is read, so that it can be asked for
elsewhere; once it is read it stays where it is.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from lightning_rl.store.contract import Rollout, RolloutRequest, RolloutTrace
from lightning_rl.store.life_cycle import ENDED

S = TypeVar("S")  # a server


class SpreadRollouts(Generic[S]):
    """The rollouts of a run and their servers; safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._at: dict[str, S] = {}
        self._requests: dict[str, RolloutRequest] = {}  # of those that are not read
        self._running: set[str] = set()  # of these: not known to have ended
        self._to_ask: set[str] = set()  # of these: their server was not asked yet
        self._made: dict[str, Rollout] = {}  # that somebody waits for who asked for them

    def at(self, rollout_id: str) -> S | None:
        """The server of a rollout; None where none is known to have it."""
        with self._lock:
            return self._at.get(rollout_id)

    def add_existing(self, rollout_id: str, server: S) -> None:
        """A rollout of an earlier session is at this server."""
        with self._lock:
            self._at[rollout_id] = server

    def is_to_be_asked(self, rollout_id: str) -> bool:
        """Whether its server was not asked for it yet."""
        with self._lock:
            return rollout_id in self._to_ask

    def unread(self, rollout_ids: Iterable[str]) -> list[str]:
        """Those of the rollouts that were not read."""
        with self._lock:
            return [rollout_id for rollout_id in rollout_ids if rollout_id in self._requests]

    def by_server(self, rollout_ids: Iterable[str]) -> list[tuple[S, list[str]]]:
        """The rollouts by their servers, without those that none has."""
        ids_by_server: defaultdict[int, list[str]] = defaultdict(list)
        servers: dict[int, S] = {}
        with self._lock:
            for rollout_id in sorted(rollout_ids):
                if (server := self._at.get(rollout_id)) is not None:
                    servers[id(server)] = server
                    ids_by_server[id(server)].append(rollout_id)
        return [(servers[key], ids) for key, ids in ids_by_server.items()]

    def ask(self, requests: Mapping[str, RolloutRequest], servers: Sequence[S]) -> None:
        """Rollouts are to be asked for: where they are, else, a group at a time, at the server that has the fewest
        which run. `servers` are those that are there."""
        with self._lock:
            self._requests |= requests
            self._ask(
                {name: request for name, request in requests.items() if self._at.get(name) not in servers}, servers
            )
            self._running.update(requests)
            self._to_ask.update(requests)

    def _ask(self, requests: Mapping[str, RolloutRequest], servers: Sequence[S]) -> None:
        load = Counter(id(self._at[name]) for name in self._running if name in self._at)
        chosen: dict[str, S] = {}
        for name, request in requests.items():
            group = request.group_id or name
            if group not in chosen:
                chosen[group] = min(servers, key=lambda server: load[id(server)])
            self._at[name] = chosen[group]
            load[id(chosen[group])] += 1

    def move(self, server: S, servers: Sequence[S]) -> int:
        """What is at a server and not read is to be asked for at the others; how many these are."""
        with self._lock:
            moved = {name: request for name, request in self._requests.items() if self._at[name] is server}
            for name in moved:
                del self._at[name]
            self.ask(moved, servers)
        return len(moved)

    def ask_again(self, server: S) -> int:
        """What is at a server and not read is to be asked for there once more; how many these are."""
        with self._lock:
            again = [name for name in self._requests if self._at[name] is server]
            self._running.update(again)
            self._to_ask.update(again)
        return len(again)

    def to_ask(self, server: S) -> list[RolloutRequest]:
        """What a server is to be asked for."""
        with self._lock:
            return [self._requests[name] for name in sorted(self._to_ask) if self._at[name] is server]

    def enqueued(self, server: S, made: Sequence[Rollout]) -> None:
        """A server was asked, and answered with these."""
        with self._lock:
            for rollout in made:
                if self._at.get(rollout.rollout_id) is server:
                    self._to_ask.discard(rollout.rollout_id)
                    self._made[rollout.rollout_id] = rollout

    def made(self, rollout_ids: Sequence[str]) -> list[Rollout] | None:
        """The rollouts as their servers made them, told once; None until all were asked for."""
        with self._lock:
            if not self._to_ask.isdisjoint(rollout_ids):
                return None
            made = {rollout_id: self._made.pop(rollout_id) for rollout_id in dict.fromkeys(rollout_ids)}
        return [made[rollout_id] for rollout_id in rollout_ids]

    def ended(self, server: S, rollouts: Iterable[Rollout]) -> list[Rollout]:
        """Take note that a server says these have ended; without those that are another's now."""
        with self._lock:
            own_rollouts = [rollout for rollout in rollouts if self._at.get(rollout.rollout_id) is server]
            self._running.difference_update(rollout.rollout_id for rollout in own_rollouts)
        return own_rollouts

    def read(self, server: S, traces: Mapping[str, RolloutTrace]) -> dict[str, RolloutTrace]:
        """What a server has is read: those that have ended, without those that are another's now."""
        with self._lock:
            own_traces = {
                name: trace
                for name, trace in traces.items()
                if trace.rollout.status in ENDED and self._at.get(name) is server
            }
            for name in own_traces:
                self._requests.pop(name, None)
                self._made.pop(name, None)
            self._running.difference_update(own_traces)
            self._to_ask.difference_update(own_traces)
        return own_traces
