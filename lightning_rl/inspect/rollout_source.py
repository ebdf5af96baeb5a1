"""Where rollouts are looked at: in a run's folder, or at the server that runs it.

Invariant: a folder is only read, a page or a moment at a time, so that a run that goes on is never held up.
"""

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode

import msgspec
import sqlalchemy as sa

from lightning_rl.inspect import recorded
from lightning_rl.store import queries, schema
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Rollout, RolloutTrace
from lightning_rl.store.errors import Unreachable
from lightning_rl.store.life_cycle import ENDED
from lightning_rl.store.records import rollout_of
from lightning_rl.store.run_store import rank_of

_PAGE = 500  # rollouts
_POLL_SECONDS = 1.0  # between two looks into a file
_AWAY_SECONDS = 1.0  # between two tries to reach a server
_WAIT_SECONDS = 2.0  # at a server: rollouts that are new are heard of by then
_WAITED_FOR = 1000  # rollouts that one long poll names
_log = logging.getLogger(__name__)


class Which(msgspec.Struct, frozen=True, kw_only=True):
    """Which rollouts are asked for; None leaves a field open. A group may be named without the run's id at its end."""

    status: str | None = None
    mode: str | None = None
    group_id: str | None = None

    def fits(self, rollout: Rollout) -> bool:
        """Whether it is one of them."""
        group = rollout.group_id or ""
        return (
            self.status in (None, rollout.status)
            and self.mode in (None, rollout.mode)
            and (self.group_id in (None, group) or group.startswith(f"{self.group_id}."))
        )


class RolloutSource(Protocol):
    """Where rollouts are looked at."""

    def newest(self, which: Which, limit: int) -> list[Rollout]:
        """The `limit` newest of them, the newest last."""
        ...

    def trace(self, name: str) -> RolloutTrace:
        """All that was recorded in one rollout."""
        ...

    def arrived(self) -> Iterator[Rollout]:
        """The rollouts that were asked for since this was called last, oldest first; all, the first time."""
        ...

    def ended(self, rollout_ids: Sequence[str]) -> list[Rollout]:
        """Those of them that have ended; waits some moments where none has."""
        ...


def tail(place: RolloutSource, which: Which, *, before: int = 0) -> Iterator[Rollout]:
    """Rollouts as they end, for ever; at first the `before` newest of those that have ended already. A server that goes
    away afterwards is waited for."""
    waiting: dict[str, Rollout] = {}
    for rollout in _last_ended(place.arrived(), waiting, before, which):
        yield rollout
    is_away = False
    while True:
        try:
            for rollout in place.arrived():
                if rollout.status not in ENDED:
                    waiting[rollout.rollout_id] = rollout
                elif which.fits(rollout):
                    yield rollout
            for rollout in place.ended(list(waiting)):
                del waiting[rollout.rollout_id]
                if which.fits(rollout):
                    yield rollout
        except Unreachable as error:
            if not is_away:
                _log.warning("waiting for the server, which is away: %s", error)
            is_away = True
            time.sleep(_AWAY_SECONDS)
        else:
            is_away = False


def _last_ended(rollouts: Iterable[Rollout], waiting: dict[str, Rollout], n: int, which: Which) -> deque[Rollout]:
    """The last `n` that have ended; those that have not are put into `waiting`."""
    ended: deque[Rollout] = deque(maxlen=n)
    for rollout in rollouts:
        if rollout.status not in ENDED:
            waiting[rollout.rollout_id] = rollout
        elif which.fits(rollout):
            ended.append(rollout)
    return ended


def pages(connection: sa.Connection, which: Which, *, page: int = _PAGE, after: int = 0) -> Iterator[list[Rollout]]:
    """The rollouts in the order they were asked for, `page` at a time, from behind position `after`."""
    for rollouts, _ in _positioned(connection, which, page, after):
        yield rollouts


def resources_of(connection: sa.Connection, resources_id: str | None) -> dict[str, dict[str, Any]]:
    """What was published under this id; {} where nothing was."""
    table = schema.resources.c
    query = sa.select(table.resources).where(table.resources_id == resources_id)
    body = connection.execute(query).scalar_one_or_none()
    return {} if body is None else msgspec.json.decode(body, type=dict[str, dict[str, Any]])


def _positioned(connection: sa.Connection, which: Which, page: int, after: int) -> Iterator[tuple[list[Rollout], int]]:
    """Pages, each with the position of its last rollout."""
    position = schema.rollouts.c.position
    query = _selection(which).order_by(position).limit(page)
    while rows := connection.execute(query.where(position > after)).all():
        after = rows[-1].position
        yield [rollout_of(row) for row in rows], after


def _selection(which: Which) -> "sa.Select[tuple[object, ...]]":
    wanted = {"status": which.status, "mode": which.mode}
    query = queries.ROLLOUTS.where(*(schema.rollouts.c[name] == value for name, value in wanted.items() if value))
    if which.group_id is None:
        return query
    group = schema.rollouts.c.group_id
    return query.where((group == which.group_id) | group.startswith(f"{which.group_id}.", autoescape=True))


class RolloutFolder:
    """A run's folder, its run alive or over."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._after = 0

    def newest(self, which: Which, limit: int) -> list[Rollout]:
        """See `RolloutSource`."""
        query = _selection(which).order_by(schema.rollouts.c.position.desc()).limit(limit)
        with recorded.opened(self.run_dir) as connection:
            return [rollout_of(row) for row in connection.execute(query)][::-1]

    def trace(self, name: str) -> RolloutTrace:
        """See `RolloutSource`; how its id alone begins or ends is enough. Raises NotRecorded."""
        with recorded.opened(self.run_dir) as connection:
            return recorded.trace(connection, recorded.find(connection, name))

    def arrived(self) -> Iterator[Rollout]:
        """See `RolloutSource`."""
        with recorded.opened(self.run_dir) as connection:
            for rollouts, last in _positioned(connection, Which(), _PAGE, self._after):
                self._after = last
                yield from rollouts

    def ended(self, rollout_ids: Sequence[str]) -> list[Rollout]:
        """See `RolloutSource`."""
        time.sleep(_POLL_SECONDS)
        with recorded.opened(self.run_dir) as connection:
            return queries.ended(connection, rollout_ids)


class _Page(msgspec.Struct):
    rollouts: list[Rollout]
    cursor: str | None = None


class PagedStore(HttpStore):
    """A store that also gives single pages, so that a listing can be gone on with."""

    def page(self, cursor: str | None, limit: int) -> tuple[list[Rollout], str | None]:
        """A page of rollouts, and the cursor of the next one; None where there is none yet."""
        query = {"limit": str(limit)} | ({} if cursor is None else {"cursor": cursor})
        answer = self._call("GET", f"/rollouts?{urlencode(query)}", None, _Page)
        return answer.rollouts, answer.cursor


class RolloutServer:
    """A running server, by its admin key; with `run_id` the rollouts of that run alone."""

    def __init__(self, store: PagedStore, run_id: str | None = None) -> None:
        self.store = store
        self._ending = "" if run_id is None else f".{run_id}"
        self._cursor: str | None = None
        self._last_page: set[str] = set()  # rollout ids; empty where the page was full

    def newest(self, which: Which, limit: int) -> list[Rollout]:
        """See `RolloutSource`. The server lists from the oldest on, so all that fit are read, a page at a time."""
        listed = self.store.rollouts(**msgspec.structs.asdict(which), page=_PAGE)
        if which.group_id is not None and self._ending and not which.group_id.endswith(self._ending):
            whole = msgspec.structs.replace(which, group_id=which.group_id + self._ending)
            listed = chain(listed, self.store.rollouts(**msgspec.structs.asdict(whole), page=_PAGE))
        return list(deque((each for each in listed if each.rollout_id.endswith(self._ending)), maxlen=limit))

    def trace(self, name: str) -> RolloutTrace:
        """See `RolloutSource`; by its whole id. Raises NotRecorded."""
        rollout_trace = self.store.traces([name]).get(name)
        if rollout_trace is None:
            raise recorded.NotRecorded(f"the server knows no rollout {name!r}: give its whole id, as `list` shows it")
        return rollout_trace

    def arrived(self) -> Iterator[Rollout]:
        """See `RolloutSource`."""
        while True:
            rollouts, following = self.store.page(self._cursor, _PAGE)
            fresh = (rollout for rollout in rollouts if rollout.rollout_id not in self._last_page)
            yield from (rollout for rollout in fresh if rollout.rollout_id.endswith(self._ending))
            self._last_page = {rollout.rollout_id for rollout in rollouts} if following is None else set()
            if following is None:
                return
            self._cursor = following

    def ended(self, rollout_ids: Sequence[str]) -> list[Rollout]:
        """See `RolloutSource`: one long poll for those that run next, and a look at the others."""
        ended = self.store.wait(rollout_ids[:_WAITED_FOR], _WAIT_SECONDS)
        for start in range(_WAITED_FOR, len(rollout_ids), _WAITED_FOR):
            ended += self.store.wait(rollout_ids[start : start + _WAITED_FOR], 0)
        return ended


class RolloutServers:
    """The servers of one run, each with a store of its own, as one place. A rollout that was asked for at a second one,
    since the first was gone, is looked at where its record counts."""

    def __init__(self, servers: Sequence[RolloutServer]) -> None:
        self._servers = servers
        self._away: set[int] = set()  # numbers of servers
        self._at: dict[str, tuple[tuple[bool, float], int]] = {}  # of those that arrived: rank, and the server's number

    def newest(self, which: Which, limit: int) -> list[Rollout]:
        """See `RolloutSource`."""
        best: dict[str, Rollout] = {}
        for rollout in (rollout for server in self._servers for rollout in server.newest(Which(), sys.maxsize)):
            best[rollout.rollout_id] = max(rollout, best.get(rollout.rollout_id, rollout), key=rank_of)
        rollouts = [rollout for rollout in best.values() if which.fits(rollout)]
        return sorted(rollouts, key=lambda rollout: rollout.created_at)[-limit:]

    def trace(self, name: str) -> RolloutTrace:
        """See `RolloutSource`; by its whole id. Raises NotRecorded."""
        traces = [trace for server in self._servers if (trace := server.store.traces([name]).get(name)) is not None]
        if not traces:
            raise recorded.NotRecorded(f"no server knows a rollout {name!r}: give its whole id, as `list` shows it")
        return max(traces, key=lambda trace: rank_of(trace.rollout))

    def arrived(self) -> Iterator[Rollout]:
        """See `RolloutSource`; of each server's, the oldest first."""
        for number, rollout in self._of_each(lambda server, _: server.arrived()):
            rank = (rank_of(rollout), number)
            if rank >= self._at.get(rollout.rollout_id, rank):
                self._at[rollout.rollout_id] = rank
                yield rollout

    def ended(self, rollout_ids: Sequence[str]) -> list[Rollout]:
        """See `RolloutSource`: one long poll at each server after the other."""
        by_server = [
            [each for each in rollout_ids if self._at[each][1] == number] for number in range(len(self._servers))
        ]
        return [rollout for _, rollout in self._of_each(lambda server, number: server.ended(by_server[number]))]

    def _of_each(self, look: Callable[[RolloutServer, int], Iterable[Rollout]]) -> Iterator[tuple[int, Rollout]]:
        """What each server has, with its number. One that is away is told of and left out. Raises Unreachable where all
        are away."""
        failed = 0
        for number, server in enumerate(self._servers):
            try:
                for rollout in look(server, number):
                    yield number, rollout
            except Unreachable as error:
                failed += 1
                if failed == len(self._servers):
                    raise
                if number not in self._away:
                    _log.warning("going on without a server that is away: %s", error)
                self._away.add(number)
            else:
                self._away.discard(number)
