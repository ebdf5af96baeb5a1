"""Schema version 4: when a rollout that is tried again may be claimed, and rollouts by mode."""

import sqlalchemy as sa
from alembic import op

revision = "4"
down_revision = "3"


def upgrade() -> None:
    """What is queued may be claimed at once."""
    op.add_column("rollouts", sa.Column("claimable_at", sa.Float))
    op.create_index("rollouts_by_mode", "rollouts", ["mode", "position"])
