"""Schema version 3: the tables as they were when Alembic took over.

Files of the versions 1 and 2 have these tables. The first of them had two indexes on other conditions, so that no
statement used them; they are made anew.
"""

import sqlalchemy as sa
from alembic import op

revision = "3"
down_revision = None

_WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_TABLES: dict[str, list[sa.schema.SchemaItem]] = {
    "meta": [sa.Column("key", sa.Text, primary_key=True), sa.Column("value", sa.Text)],
    "rollouts": [
        sa.Column("position", _WHOLE, primary_key=True, autoincrement=True),
        sa.Column("rollout_id", sa.Text, nullable=False, unique=True),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("mode", sa.Text, nullable=False),
        sa.Column("group_id", sa.Text),
        sa.Column("agent", sa.Text),
        sa.Column("resources_id", sa.Text),
        sa.Column("request", sa.LargeBinary, nullable=False),
        sa.Column("attempt_count", sa.Integer, nullable=False),
        sa.Column("attempt_id", sa.Text),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("ended_at", sa.Float),
    ],
    "attempts": [
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
        sa.Column("rewards", sa.LargeBinary),
        sa.Column("error", sa.LargeBinary),
        sa.Column("finish_body", sa.LargeBinary),
        sa.UniqueConstraint("rollout_id", "sequence"),
    ],
    "spans": [
        sa.Column("span_id", sa.Text, primary_key=True),
        sa.Column("rollout_id", sa.Text, nullable=False),
        sa.Column("attempt_id", sa.Text, nullable=False),
        sa.Column("number", _WHOLE, nullable=False),
        sa.Column("record", sa.LargeBinary, nullable=False),
    ],
    "rewards": [
        sa.Column("position", _WHOLE, primary_key=True, autoincrement=True),
        sa.Column("rollout_id", sa.Text, nullable=False),
        sa.Column("attempt_id", sa.Text, nullable=False),
        sa.Column("reward_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("value", sa.Float, nullable=False),
        sa.Column("call_id", sa.Text),
        sa.UniqueConstraint("attempt_id", "reward_id"),
    ],
    "resources": [
        sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("resources_id", sa.Text, nullable=False, unique=True),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("resources", sa.LargeBinary, nullable=False),
    ],
}
# By name: table, columns, whether it is unique, and which rows it is of.
_INDEXES: dict[str, tuple[str, list[str], bool, str | None]] = {
    "rollouts_by_status": ("rollouts", ["status", "position"], False, None),
    "rollouts_by_group": ("rollouts", ["group_id", "position"], False, "group_id IS NOT NULL"),
    "one_running_attempt": ("attempts", ["rollout_id"], True, "status = 'running'"),
    "attempts_by_claim": ("attempts", ["claim_id"], False, "claim_id IS NOT NULL"),
    "spans_by_attempt": ("spans", ["rollout_id", "attempt_id"], False, None),
    "rewards_by_rollout": ("rewards", ["rollout_id"], False, None),
}
_MADE_ANEW = ("rollouts_by_group", "attempts_by_claim")


def upgrade() -> None:
    """Make what is not there."""
    for table, columns in _TABLES.items():
        op.create_table(table, *columns, if_not_exists=True)
    for name in _MADE_ANEW:
        op.drop_index(name, _INDEXES[name][0], if_exists=True)
    for name, (table, columns_of, unique, rows) in _INDEXES.items():
        where = None if rows is None else sa.text(rows)
        op.create_index(
            name, table, columns_of, unique=unique, if_not_exists=True, sqlite_where=where, postgresql_where=where
        )
