"""The bytes of images, kept once for all attempts that show them: a span's record names them by their SHA-256.

Invariant: bytes stand under the digest that they have, whatever a span says of them; and a span whose bytes stand here
is read back as it was written.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from lightning_rl.store import schema
from lightning_rl.store.databases import Database
from lightning_rl_adapters.span import image_apart, image_of, with_image

_AT_ONCE = 64  # digests of one question


def insert_spans(database: Database, connection: sa.Connection, rows: Iterable[dict[str, Any]]) -> list[str]:
    """Insert rows of `spans`, of which those that are there stay as they are. The ids of those that were not."""
    images: dict[str, bytes] = {}
    spans = []
    for row in rows:
        apart = image_apart(row["record"])
        if apart is not None and hashlib.sha256(apart.data).hexdigest() == apart.sha256:
            images[apart.sha256] = apart.data
            row = row | {"record": apart.record}
        spans.append(row)
    # In the same order by all who write, or two of them might wait for each other.
    database.insert_new(
        connection, schema.contents, [{"sha256": each, "data": images[each]} for each in sorted(images)]
    )
    return database.insert_new(connection, schema.spans, spans)


def whole(connection: sa.Connection, records: Sequence[bytes]) -> list[bytes]:
    """Records of spans with the bytes of their images in them."""
    lacking = {number: sha256 for number, record in enumerate(records) if (sha256 := image_of(record)) is not None}
    images: dict[str, bytes] = {}
    wanted = sorted(set(lacking.values()))
    for first in range(0, len(wanted), _AT_ONCE):
        of_some = schema.contents.c.sha256.in_(wanted[first : first + _AT_ONCE])
        images |= dict(map(tuple, connection.execute(sa.select(schema.contents).where(of_some))))
    return [
        with_image(record, data) if (data := images.get(lacking.get(number, ""))) is not None else record
        for number, record in enumerate(records)
    ]
