"""Schema version 6: what the spans of each transaction come to; the next start of a server counts what is there."""

import sqlalchemy as sa
from alembic import op

revision = "6"
down_revision = "5"


def upgrade() -> None:
    """Nothing is counted yet; a file may have kept an older count."""
    position = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "call_counts",
        sa.Column("position", position, primary_key=True, autoincrement=True),
        sa.Column("counted", sa.LargeBinary, nullable=False),
    )
    op.execute(sa.text("DELETE FROM meta WHERE key = 'counted_calls'"))
