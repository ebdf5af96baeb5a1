"""What all recorded calls come to, so that a server's start need not read them.

Each transaction that adds spans adds a row with what these come to, so that none waits for another; the sweeper puts
rows together. Invariant: once they are counted, the rows together say what the spans do.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
import sqlalchemy as sa

from lightning_rl.store import contents, schema
from lightning_rl.store.databases import Database
from lightning_rl_adapters import semconv
from lightning_rl_adapters.span import name_of, unpacked

_COUNTED: Final = "calls_are_counted"  # of `meta`, and held by who merges or counts anew
_MERGED_AT_ONCE: Final = 1000
_WORTH_MERGING: Final = 100  # rows
_ID_BYTES: Final = 4  # of a packed token id
_RECORDS = sa.select(schema.spans.c.record).execution_options(yield_per=256)
_ROWS = sa.select(schema.call_counts.c.counted)
_POSITIONS = sa.select(schema.call_counts.c.position)
_MARK = sa.select(schema.meta.c.value).where(schema.meta.c.key == _COUNTED)
_SOME = (
    sa.select(schema.call_counts.c.position, schema.call_counts.c.counted)
    .order_by(schema.call_counts.c.position)
    .limit(_MERGED_AT_ONCE)
)


class RecordedCalls(msgspec.Struct, frozen=True, kw_only=True):
    """Calls together: the tokens that engines sampled, per model, and when the last of them ended (0: none did);
    `spans` are those that were looked at, also of other things."""

    tokens: dict[str, int] = {}
    newest_ns: int = 0
    spans: int = 0


class _SampledAttributes(msgspec.Struct):
    """Those attributes of a span that say what a token engine sampled; a frozen model's call is not trainable."""

    model: str | None = msgspec.field(name=semconv.RESPONSE_MODEL, default=None)
    response_ids: bytes | None = msgspec.field(name=semconv.RESPONSE_IDS, default=None)
    trainable: bool = msgspec.field(name=semconv.TRAINABLE, default=True)
    overshoot: int = msgspec.field(name=semconv.OVERSHOOT, default=0)


class _Ended(msgspec.Struct):
    end_ns: int
    attributes: msgspec.Raw


_ENDED = msgspec.msgpack.Decoder(_Ended)
_SAMPLED = msgspec.msgpack.Decoder(_SampledAttributes)


def add_spans(database: Database, connection: sa.Connection, rows: Sequence[dict[str, Any]]) -> None:
    """Insert rows of `spans`, of which those that are there stay as they are, and count the new ones."""
    new = set(contents.insert_spans(database, connection, rows))
    records = []
    for row in rows:
        if row["span_id"] in new:
            new.remove(row["span_id"])
            records.append(row["record"])
    if records:
        _insert(connection, _of_records(records))


def recorded(connection: sa.Connection, *, in_file: bool) -> RecordedCalls | None:
    """What was counted; None where it was not yet, or, in a file, where somebody has taken spans out."""
    if connection.execute(_MARK).scalar() is None:
        return None
    calls = _together(connection.execute(_ROWS).scalars())
    if in_file and connection.execute(sa.select(sa.func.count()).select_from(schema.spans)).scalar() != calls.spans:
        return None
    return calls


def count_anew(database: Database, connection: sa.Connection) -> RecordedCalls:
    """Read all spans, a batch at a time, and keep what they come to; nobody adds any meanwhile."""
    database.hold_name(connection, _COUNTED)  # or a row that is merged meanwhile would stay beside its sum
    database.hold_table(connection, schema.spans)
    calls = _of_records(connection.execute(_RECORDS).scalars())
    connection.execute(sa.delete(schema.call_counts))
    _insert(connection, calls)
    connection.execute(database.replace(schema.meta, _COUNTED, "1"))
    return calls


def merge(database: Database, connection: sa.Connection) -> None:
    """Put rows together, where there are many."""
    if len(connection.execute(_POSITIONS.limit(_WORTH_MERGING)).all()) < _WORTH_MERGING:
        return
    database.hold_name(connection, _COUNTED)
    rows = connection.execute(_SOME).all()
    merged = schema.call_counts.c.position.in_([row.position for row in rows])
    connection.execute(sa.delete(schema.call_counts).where(merged))
    _insert(connection, _together(row.counted for row in rows))


def _sampled(attributes: msgspec.Raw) -> _SampledAttributes:
    """What an engine sampled: nothing where a span has a call's name and other attributes. It is kept all the same."""
    try:
        return _SAMPLED.decode(attributes)
    except msgspec.ValidationError:
        return _SampledAttributes()


def _insert(connection: sa.Connection, counted: RecordedCalls) -> None:
    connection.execute(sa.insert(schema.call_counts), {"counted": msgspec.json.encode(counted)})


def _together(rows: Iterable[bytes]) -> RecordedCalls:
    tokens, newest_ns, spans = Counter[str](), 0, 0
    for row in rows:
        counted = msgspec.json.decode(row, type=RecordedCalls)
        tokens.update(counted.tokens)
        newest_ns, spans = max(newest_ns, counted.newest_ns), spans + counted.spans
    return RecordedCalls(tokens=dict(tokens), newest_ns=newest_ns, spans=spans)


def _of_records(records: Iterable[bytes]) -> RecordedCalls:
    tokens, newest_ns, spans = Counter[str](), 0, 0
    for record in records:
        spans += 1
        if name_of(record) != semconv.CALL_SPAN:
            continue
        span = _ENDED.decode(unpacked(record))
        sampled = _sampled(span.attributes)
        if sampled.trainable and sampled.response_ids:
            tokens[str(sampled.model)] += len(sampled.response_ids) // _ID_BYTES + sampled.overshoot
            newest_ns = max(newest_ns, span.end_ns)
    return RecordedCalls(tokens=dict(tokens), newest_ns=newest_ns, spans=spans)
