"""Schema version 7: gateways note no calls any more; of one it is known whether it has left with all of them stored."""

import sqlalchemy as sa
from alembic import op

revision = "7"
down_revision = "6"


def upgrade() -> None:
    """Gateways announce themselves anew. What others had, and may have kept calls of, is tried again."""
    op.execute(sa.text("DELETE FROM gateways"))
    with op.batch_alter_table("gateways") as gateways:
        gateways.alter_column("notes_calls", new_column_name="has_left")
    with op.batch_alter_table("placements") as placements:
        placements.drop_column("unstored")
