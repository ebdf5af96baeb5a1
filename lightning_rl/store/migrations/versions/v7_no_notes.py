"""Schema version 7: gateways note no calls any more; of one it is known whether it has left with all of them stored."""

import sqlalchemy as sa
from alembic import op

revision = "7"
down_revision = "6"


def upgrade() -> None:
    """Gateways announce themselves anew. What others had, and may have kept calls of, is tried again."""
    op.drop_table("gateways")
    op.create_table(
        "gateways",
        sa.Column("gateway_id", sa.Text, primary_key=True),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("open_attempts", sa.Integer, nullable=False),
        sa.Column("calls_in_flight", sa.Integer, nullable=False),
        sa.Column("has_left", sa.Boolean, nullable=False),
        sa.Column("lease_expires_at", sa.Float, nullable=False),
    )
    with op.batch_alter_table("placements") as placements:
        placements.drop_column("unstored")
