"""Spans: appended as they are recorded, read back by attempt."""

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from lightning_rl.store import call_counts, queries
from lightning_rl.store.call_counts import RecordedCalls
from lightning_rl.store.contract import (
    AttemptTrace,
    RolloutTrace,
)
from lightning_rl.store.errors import NotFound
from lightning_rl.store.sql.transactions import Transactions, reads, writes
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
            self._database.write(lambda connection: call_counts.add_spans(self._database, connection, rows))

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
        rollout_trace = self.traces([rollout_id]).get(rollout_id)
        for trace in rollout_trace.attempts if rollout_trace else ():
            if trace.attempt.attempt_id == attempt_id:
                return trace
        raise NotFound(f"there is no attempt {attempt_id} of rollout {rollout_id}")

    def traces(self, rollout_ids: Sequence[str]) -> dict[str, RolloutTrace]:
        """Everything recorded in these rollouts, all attempts; unknown ids are left out."""
        packed = self.packed_traces(rollout_ids)
        return msgspec.msgpack.decode(packed, type=dict[str, RolloutTrace])

    def recorded_calls(self) -> RecordedCalls:
        """What engines sampled in all recorded calls, and when the last one ended."""
        calls = self._database.read(lambda connection: call_counts.recorded(connection, in_file=not self.shared))
        if calls is None:
            calls = self._database.write(lambda connection: call_counts.count_anew(self._database, connection))
        return calls

    @writes
    def merge_counts(self, connection: sa.Connection) -> None:
        """Put what was counted of the calls into fewer rows."""
        call_counts.merge(self._database, connection)

    @reads
    def packed_traces(self, connection: sa.Connection, rollout_ids: Sequence[str]) -> bytes:
        """`traces` as MessagePack, without unpacking a span."""
        return msgspec.msgpack.encode(queries.traces(connection, rollout_ids))
