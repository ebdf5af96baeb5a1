"""Spans: appended as they are recorded, read back by attempt."""

from collections.abc import Sequence
from typing import Final

import msgspec
import sqlalchemy as sa

from lightning_rl.store import queries, schema
from lightning_rl.store.contract import (
    AttemptTrace,
    RolloutTrace,
)
from lightning_rl.store.errors import NotFound
from lightning_rl.store.sql.transactions import Transactions, reads
from lightning_rl_adapters.span import Packed, Span, pack

_COUNTED_AT_ONCE: Final = 5000  # spans: some 60 ms


class SpanOperations(Transactions):
    """Writing spans, and reading the traces that they make."""

    def add_spans(self, spans: Sequence[Span]) -> None:
        """Keep spans; one whose id is there already is left as it is."""
        self.add_packed([pack(span) for span in spans])

    def add_packed(self, spans: Sequence[Packed]) -> None:
        """Keep spans as `add_spans` does."""
        rows = [msgspec.structs.asdict(span) for span in spans]
        if rows:
            self._database.write(lambda connection: self._database.insert_new(connection, schema.spans, rows))

    def spans(self, rollout_id: str, attempt_id: str) -> list[Span]:
        """The attempt's spans by arrival number.

        Raises:
            NotFound: there is no such attempt.
        """
        return self.trace(rollout_id, attempt_id).spans

    def trace(self, rollout_id: str, attempt_id: str) -> AttemptTrace:
        """Everything recorded in one attempt.

        Raises:
            NotFound: there is no such attempt.
        """
        found = self.traces([rollout_id]).get(rollout_id)
        for trace in found.attempts if found else ():
            if trace.attempt.attempt_id == attempt_id:
                return trace
        raise NotFound(f"there is no attempt {attempt_id} of rollout {rollout_id}")

    def traces(self, rollout_ids: Sequence[str]) -> dict[str, RolloutTrace]:
        """Everything recorded in these rollouts, all attempts; unknown ids are left out."""
        packed = self.packed_traces(rollout_ids)
        return msgspec.msgpack.decode(packed, type=dict[str, RolloutTrace])

    def recorded_calls(self) -> queries.RecordedCalls:
        """What engines sampled in all recorded calls, and when the last one ended.

        A SQLite file keeps what was counted, so that only later spans are read.
        """
        if self.shared:
            return self._database.read(queries.recorded_calls)
        while (counted := self.count_calls()).more:
            pass
        return queries.RecordedCalls(tokens=counted.tokens, newest_ns=counted.newest_ns)

    def count_calls(self, most: int = _COUNTED_AT_ONCE) -> queries.CountedCalls:
        """Count at `most` so many further spans of a SQLite file; what is counted by now."""
        further, counted = self._database.read(lambda connection: queries.counted_calls(connection, most))
        if further:
            kept = self._database.replace(schema.meta, queries.COUNTED_CALLS, msgspec.json.encode(counted).decode())
            self._database.write(lambda connection: connection.execute(kept))
        return counted

    @reads
    def packed_traces(self, connection: sa.Connection, rollout_ids: Sequence[str]) -> bytes:
        """`traces` as MessagePack, without unpacking a span."""
        return msgspec.msgpack.encode(queries.traces(connection, rollout_ids))
