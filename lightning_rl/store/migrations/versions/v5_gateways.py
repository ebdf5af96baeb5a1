"""Schema version 5: the gateways of a store, and which attempts each of them has."""

import sqlalchemy as sa
from alembic import op

revision = "5"
down_revision = "4"


def upgrade() -> None:
    """No gateway has announced itself yet, and what runs belongs to none."""
    op.create_table(
        "gateways",
        sa.Column("gateway_id", sa.Text, primary_key=True),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("open_attempts", sa.Integer, nullable=False),
        sa.Column("calls_in_flight", sa.Integer, nullable=False),
        sa.Column("notes_calls", sa.Boolean, nullable=False),
        sa.Column("lease_expires_at", sa.Float, nullable=False),
    )
    op.create_table(
        "placements",
        sa.Column("attempt_id", sa.Text, primary_key=True),
        sa.Column("rollout_id", sa.Text, nullable=False),
        sa.Column("gateway_id", sa.Text, nullable=False),
        sa.Column("unstored", sa.Boolean, nullable=False),
    )
    op.create_index("placements_by_gateway", "placements", ["gateway_id"])
