"""Where the viewer reads rollouts: the store in a run's folder, or a running server over its control plane.

Invariant: nothing is changed at either place. A folder is read as one moment of its store; a server is asked with the
admin key, which never leaves this process.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import sqlalchemy as sa

from lightning_rl.inspect import recorded
from lightning_rl.inspect.explain import words_of
from lightning_rl.inspect.rollout_source import PagedStore
from lightning_rl.store import queries, schema
from lightning_rl.store.contract import Rollout, RolloutTrace
from lightning_rl.store.life_cycle import ENDED
from lightning_rl.store.records import rollout_of
from lightning_rl.store.run_store import rank_of
from lightning_rl.viewer.index import Called
from lightning_rl_adapters import semconv
from lightning_rl_adapters.span import unpacked

Placed = tuple[int, Rollout]  # a rollout with its position in the run
_CHUNK = 2000
_SPANS = sa.text("SELECT rowid, record FROM spans WHERE rowid > :after AND rowid <= :last ORDER BY rowid LIMIT :most")
_SPANS_NOW = sa.text("SELECT coalesce(max(rowid), 0) FROM spans")


class Source(Protocol):
    """Where the rollouts of a run are."""

    def moment(self) -> "Any":
        """A context in which what follows is read of one moment."""
        ...

    def arrived(self) -> Iterator[list[Placed]]:
        """The rollouts that were asked for since this was called last; all, the first time."""
        ...

    def changed(self, open_rollouts: dict[str, int]) -> Iterator[list[Placed]]:
        """Those of the `open_rollouts` that may have become something else, and those with late rewards."""
        ...

    def calls(self, most: int) -> tuple[list[Called], float]:
        """At most about `most` calls that were not told yet, oldest first, and which share of all is told now."""
        ...

    def trace(self, rollout_id: str) -> RolloutTrace:
        """All that was recorded in a rollout. Raises NotRecorded."""
        ...

    def close(self) -> None:
        """Leave the place."""
        ...


class _CallAttributes(msgspec.Struct):
    cause: str | None = msgspec.field(name=semconv.FORK_CAUSE, default=None)
    reported: int = msgspec.field(name=semconv.OUTPUT_TOKENS, default=0)
    ids: bytes = msgspec.field(name=semconv.RESPONSE_IDS, default=b"")
    input_messages: list[dict[str, Any]] | None = msgspec.field(name=semconv.INPUT_MESSAGES, default=None)
    output_messages: list[dict[str, Any]] | None = msgspec.field(name=semconv.OUTPUT_MESSAGES, default=None)


class _CallSpan(recorded.Named):
    attributes: _CallAttributes


_CALL = msgspec.msgpack.Decoder(_CallSpan)
_NAME = msgspec.msgpack.Decoder(recorded.Named)


def called(record: bytes) -> Called | None:
    """The call that a span's record, as a map, tells of; None for another span."""
    if _NAME.decode(record).name != semconv.CALL_SPAN:
        return None
    span = _CALL.decode(record)
    attributes = span.attributes
    messages = [*(attributes.input_messages or ()), *(attributes.output_messages or ())]
    return Called(
        rollout_id=span.rollout_id,
        ids=len(attributes.ids) // 4,
        reported=attributes.reported,
        forked=attributes.cause is not None,
        text="\n".join(words_of(message) for message in messages),
    )


class FolderSource:
    """The store in a run's folder, its run alive or over."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._newest = 0
        self._span = self._last_span = 0
        self._reward = -1
        self._connection: sa.Connection | None = None

    @contextmanager
    def moment(self) -> Iterator[None]:
        """See `Source`. Raises NotRecorded."""
        with recorded.opened(self.run_dir) as connection:
            self._connection = connection
            try:
                yield
            finally:
                self._connection = None

    @property
    def _reading(self) -> sa.Connection:
        assert self._connection is not None, "read within `moment`"
        return self._connection

    def arrived(self) -> Iterator[list[Placed]]:
        """See `Source`; the newest come first, so that a list can begin with them."""
        position = schema.rollouts.c.position
        self._last_span = self._reading.execute(_SPANS_NOW).scalar_one()  # later ones may be of rollouts yet to come
        last = self._reading.execute(sa.select(sa.func.max(position))).scalar_one() or 0
        before, after = last + 1, self._newest
        query = queries.ROLLOUTS.where(position > after).order_by(position.desc()).limit(_CHUNK)
        while rows := self._reading.execute(query.where(position < before)).all():
            before = rows[-1].position
            yield [(row.position, rollout_of(row)) for row in rows]
        self._newest = last

    def changed(self, open_rollouts: dict[str, int]) -> Iterator[list[Placed]]:
        """See `Source`."""
        late = self._with_late_rewards()
        names = [*open_rollouts, *(name for name in late if name not in open_rollouts)]
        for start in range(0, len(names), _CHUNK):
            position = schema.rollouts.c.rollout_id.in_(names[start : start + _CHUNK])
            rows = self._reading.execute(queries.ROLLOUTS.where(position)).all()
            placed = [(row.position, rollout_of(row)) for row in rows]
            yield [each for each in placed if each[1].status in ENDED or each[1].attempt_count]

    def _with_late_rewards(self) -> list[str]:
        """The rollouts that were given rewards since this was asked last; none, the first time."""
        table, after = schema.rewards.c, self._reward
        self._reward = self._reading.execute(sa.select(sa.func.max(table.position))).scalar_one() or 0
        if after < 0:
            return []
        query = sa.select(table.rollout_id).where(table.position > after).distinct()
        return list(self._reading.execute(query).scalars())

    def calls(self, most: int) -> tuple[list[Called], float]:
        """See `Source`."""
        parameters = {"after": self._span, "last": self._last_span, "most": most}
        rows = self._reading.execute(_SPANS, parameters).all()
        self._span = rows[-1].rowid if rows else self._last_span
        batch = [one for row in rows if (one := called(unpacked(row.record))) is not None]
        return batch, self._span / self._last_span if self._last_span else 1.0

    def trace(self, rollout_id: str) -> RolloutTrace:
        """See `Source`."""
        with recorded.opened(self.run_dir) as connection:
            return recorded.trace(connection, recorded.find(connection, rollout_id))

    def close(self) -> None:
        """See `Source`."""


class ServerSource:
    """A running server, asked over its control plane; with `run_id` the rollouts of that run alone."""

    def __init__(self, store: PagedStore, run_id: str | None = None) -> None:
        self.store = store
        self._of_run = "" if run_id is None else f".{run_id}"
        self._cursor: str | None = None
        self._last_page: dict[str, int] = {}  # by rollout id; empty where the page was full
        self._count = 0
        self._places: dict[str, int] = {}  # of all rollouts, since a late reward may come for any of them
        self._reward: int | None = None  # the position of the last reward that was looked at
        self._unread: list[str] = []  # rollouts that have ended, whose calls are not told yet
        self._read = 0

    @contextmanager
    def moment(self) -> Iterator[None]:
        """See `Source`: each answer is of its own moment."""
        yield

    def arrived(self) -> Iterator[list[Placed]]:
        """See `Source`; the oldest come first, as the server lists them."""
        while True:
            rollouts, following = self.store.page(self._cursor, _CHUNK // 2)
            of_run = [rollout for rollout in rollouts if rollout.rollout_id.endswith(self._of_run)]
            fresh = [rollout for rollout in of_run if rollout.rollout_id not in self._last_page]
            placed = list(enumerate(fresh, start=self._count + 1))
            self._count += len(fresh)
            self._places |= {rollout.rollout_id: place for place, rollout in placed}
            self._note(fresh)
            yield placed
            last = following is None
            self._last_page = {rollout.rollout_id: 0 for rollout in rollouts} if last else {}
            if last:
                return
            self._cursor = following

    def changed(self, open_rollouts: dict[str, int]) -> Iterator[list[Placed]]:
        """See `Source`: those that have ended, and the first of those that run or are queued."""
        late, self._reward = self.store.rewarded(self._reward)
        places = open_rollouts | {name: place for name in late if (place := self._places.get(name)) is not None}
        names = list(places)
        for start in range(0, len(names), _CHUNK // 2):
            chunk = names[start : start + _CHUNK // 2]
            changed = self.store.wait(chunk, 0) if start else self.store.find(chunk)
            self._note(rollout for rollout in changed if rollout.rollout_id in open_rollouts)
            yield [(places[rollout.rollout_id], rollout) for rollout in changed]

    def _note(self, rollouts: Iterable[Rollout]) -> None:
        self._unread += [rollout.rollout_id for rollout in rollouts if rollout.status in ENDED and rollout.attempt_id]

    def calls(self, most: int) -> tuple[list[Called], float]:
        """See `Source`: of rollouts that have ended."""
        at_once = max(1, most // 20)
        names, self._unread = self._unread[:at_once], self._unread[at_once:]
        self._read += len(names)
        traces = self.store.traces(names) if names else {}
        batch = [
            one
            for trace in traces.values()
            for attempt in trace.attempts
            for span in attempt.spans
            if (one := called(msgspec.msgpack.encode(span))) is not None
        ]
        return batch, self._read / (self._read + len(self._unread)) if self._unread else 1.0

    def trace(self, rollout_id: str) -> RolloutTrace:
        """See `Source`."""
        rollout_trace = self.store.traces([rollout_id]).get(rollout_id)
        if rollout_trace is None:
            raise recorded.NotRecorded(f"the server knows no rollout {rollout_id!r}: give its whole id")
        return rollout_trace

    def close(self) -> None:
        """See `Source`."""
        self.store.close()


class ServerSources:
    """The servers of one run, each with a store of its own, as one place.

    A rollout that was asked for at a second one, since the first was gone, has one position.
    """

    def __init__(self, sources: Sequence[ServerSource]) -> None:
        self._sources = sources
        self._of: dict[str, tuple[ServerSource, int]] = {}  # where a rollout's record counts, and its place there
        self._ranks: dict[str, tuple[bool, float]] = {}
        self._positions: dict[str, int] = {}

    @contextmanager
    def moment(self) -> Iterator[None]:
        """See `Source`: each answer is of its own moment."""
        yield

    def arrived(self) -> Iterator[list[Placed]]:
        """See `Source`; of each server the oldest come first."""
        for source in self._sources:
            for placed in source.arrived():
                yield self._placed([each for each in placed if self._counts(source, *each)])

    def changed(self, open_rollouts: dict[str, int]) -> Iterator[list[Placed]]:
        """See `Source`: those that have ended."""
        for source in self._sources:
            own = {name: at[1] for name in open_rollouts if (at := self._of[name])[0] is source}
            for placed in source.changed(own):
                yield self._placed([each for each in placed if self._of[each[1].rollout_id][0] is source])

    def _counts(self, source: ServerSource, place: int, rollout: Rollout) -> bool:
        """Whether what arrived at a server is the record that counts; it is then known as that."""
        name, rank = rollout.rollout_id, rank_of(rollout)
        if rank < self._ranks.get(name, rank):
            return False
        self._ranks[name], self._of[name] = rank, (source, place)
        self._positions.setdefault(name, len(self._positions) + 1)
        return True

    def _placed(self, rollouts: Iterable[Placed]) -> list[Placed]:
        return [(self._positions[rollout.rollout_id], rollout) for _, rollout in rollouts]

    def calls(self, most: int) -> tuple[list[Called], float]:
        """See `Source`: of rollouts that have ended."""
        parts = [(source, *source.calls(most // len(self._sources))) for source in self._sources]
        # A rollout that ended at two servers has calls at both.
        batch = [call for source, calls, _ in parts for call in calls if self._of[call.rollout_id][0] is source]
        return batch, min(share for *_, share in parts)

    def trace(self, rollout_id: str) -> RolloutTrace:
        """See `Source`."""
        source = self._of.get(rollout_id, (self._sources[0], 0))[0]
        return source.trace(rollout_id)

    def close(self) -> None:
        """See `Source`."""
        for source in self._sources:
            source.close()
