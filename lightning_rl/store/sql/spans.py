"""Spans: appended as they are recorded, read back by attempt."""

from collections.abc import Sequence

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

    @reads
    def recorded_calls(self, connection: sa.Connection) -> queries.RecordedCalls:
        """What engines sampled in all recorded calls, and when the last one ended."""
        return queries.recorded_calls(connection)

    @reads
    def packed_traces(self, connection: sa.Connection, rollout_ids: Sequence[str]) -> bytes:
        """`traces` as MessagePack, without unpacking a span."""
        return msgspec.msgpack.encode(queries.traces(connection, rollout_ids))
