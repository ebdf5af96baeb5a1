"""The store in a database: every operation is one transaction, durable when it returns.

Invariants: a rollout has at most one running attempt and ends once; an answered operation repeated
with the same id and body gives the same answer, with another body `Conflict`. What changes a rollout, or anything of
it, holds the rollout first. Safe to share between threads; the clock is a parameter, so that time can be told in tests.
"""

from lightning_rl.store.sql.endings import EndingOperations
from lightning_rl.store.sql.resources import LATEST
from lightning_rl.store.sql.spans import SpanOperations

__all__ = ["LATEST", "SqlStore"]


class SqlStore(EndingOperations, SpanOperations):
    """The store in the database at `url`: `sqlite:///path`, `sqlite://` in memory, or `postgresql+psycopg://...`.

    `shared`: other processes may change it beside this one; `gateways` are those of its servers then.

    Raises:
        ValueError: for another kind of database, one that cannot be opened, or another schema version.
        StoreUnwritable: here and in every operation, the database cannot be written or not be reached; nothing of the
            operation is kept, unless the message says that this is not known.
    """
