"""The tables.

Invariant: they are what the revisions in `migrations` make, one after another; whoever changes them adds a revision.
The partial unique index `one_running_attempt` makes the database itself refuse a second running
attempt of a rollout.
"""

from typing import Any

import sqlalchemy as sa

SCHEMA_VERSION = "8"  # the id of the newest revision
READABLE = (
    "1",
    "2",
    "3",
    "4",
    "5",
    "6",
    "7",
    SCHEMA_VERSION,
)  # "1" held spans as maps, which are read as they are; its tables were these

metadata = sa.MetaData()

_WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")  # 64 bits in both


def _where(condition: str) -> dict[str, Any]:
    """The rows that an index is of."""
    return {"sqlite_where": sa.text(condition), "postgresql_where": sa.text(condition)}


meta = sa.Table("meta", metadata, sa.Column("key", sa.Text, primary_key=True), sa.Column("value", sa.Text))

# Alembic's own note of the newest revision.
alembic_version = sa.Table(
    "alembic_version", metadata, sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)  # fmt: skip

rollouts = sa.Table(
    "rollouts",
    metadata,
    sa.Column("position", _WHOLE, primary_key=True, autoincrement=True),  # order of the queue
    sa.Column("rollout_id", sa.Text, nullable=False, unique=True),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("mode", sa.Text, nullable=False),
    sa.Column("group_id", sa.Text),
    sa.Column("agent", sa.Text),
    sa.Column("resources_id", sa.Text),
    sa.Column("request", sa.LargeBinary, nullable=False),  # JSON of the RolloutRequest
    sa.Column("attempt_count", sa.Integer, nullable=False),
    sa.Column("attempt_id", sa.Text),  # the latest
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("ended_at", sa.Float),
    sa.Column("claimable_at", sa.Float),  # when its pause before a retry is over
    sa.Index("rollouts_by_status", "status", "position"),
    sa.Index("rollouts_by_mode", "mode", "position"),
    sa.Index("rollouts_by_group", "group_id", "position", **_where("group_id IS NOT NULL")),
)

attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("attempt_id", sa.Text, primary_key=True),
    sa.Column("rollout_id", sa.Text, nullable=False),
    sa.Column("sequence", sa.Integer, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("worker_id", sa.Text, nullable=False),
    sa.Column("claim_id", sa.Text),
    sa.Column("claim_body", sa.LargeBinary),
    sa.Column("unresponsive_seconds", sa.Float, nullable=False),
    sa.Column("lease_expires_at", sa.Float, nullable=False),
    sa.Column("started_at", sa.Float, nullable=False),
    sa.Column("deadline_at", sa.Float),
    sa.Column("ended_at", sa.Float),
    sa.Column("reward", sa.Float),
    sa.Column("rewards", sa.LargeBinary),  # JSON
    sa.Column("error", sa.LargeBinary),  # JSON of the ErrorInfo
    sa.Column("finish_body", sa.LargeBinary),
    sa.UniqueConstraint("rollout_id", "sequence"),
    sa.Index("one_running_attempt", "rollout_id", unique=True, **_where("status = 'running'")),
    sa.Index("attempts_by_claim", "claim_id", **_where("claim_id IS NOT NULL")),
)

spans = sa.Table(
    "spans",
    metadata,
    sa.Column("span_id", sa.Text, primary_key=True),
    sa.Column("rollout_id", sa.Text, nullable=False),
    sa.Column("attempt_id", sa.Text, nullable=False),
    sa.Column("number", _WHOLE, nullable=False),
    sa.Column("record", sa.LargeBinary, nullable=False),  # a packed Span
    sa.Index("spans_by_attempt", "rollout_id", "attempt_id"),
)

# The bytes of images, which spans' records name by their digests.
contents = sa.Table(
    "contents",
    metadata,
    sa.Column("sha256", sa.Text, primary_key=True),
    sa.Column("data", sa.LargeBinary, nullable=False),
)

# What the spans come to that one transaction added, or several together.
call_counts = sa.Table(
    "call_counts",
    metadata,
    sa.Column("position", _WHOLE, primary_key=True, autoincrement=True),
    sa.Column("counted", sa.LargeBinary, nullable=False),  # JSON of the RecordedCalls
)

rewards = sa.Table(
    "rewards",
    metadata,
    sa.Column("position", _WHOLE, primary_key=True, autoincrement=True),
    sa.Column("rollout_id", sa.Text, nullable=False),
    sa.Column("attempt_id", sa.Text, nullable=False),
    sa.Column("reward_id", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("value", sa.Float, nullable=False),
    sa.Column("call_id", sa.Text),
    sa.UniqueConstraint("attempt_id", "reward_id"),
    sa.Index("rewards_by_rollout", "rollout_id"),
)

resources = sa.Table(
    "resources",
    metadata,
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("resources_id", sa.Text, nullable=False, unique=True),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("resources", sa.LargeBinary, nullable=False),  # JSON
)

# The gateways of a store that several servers share, and the running attempts that each of them has.
gateways = sa.Table(
    "gateways",
    metadata,
    sa.Column("gateway_id", sa.Text, primary_key=True),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("open_attempts", sa.Integer, nullable=False),
    sa.Column("calls_in_flight", sa.Integer, nullable=False),
    sa.Column("has_left", sa.Boolean, nullable=False),  # it has stopped, and the store has all its calls
    sa.Column("lease_expires_at", sa.Float, nullable=False),
)

placements = sa.Table(
    "placements",
    metadata,
    sa.Column("attempt_id", sa.Text, primary_key=True),
    sa.Column("rollout_id", sa.Text, nullable=False),
    sa.Column("gateway_id", sa.Text, nullable=False),
    sa.Index("placements_by_gateway", "gateway_id"),
)
