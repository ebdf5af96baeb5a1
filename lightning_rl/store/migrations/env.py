"""What Alembic runs for every command: the revisions, in the transaction that is under way.

Invariant: Alembic begins and commits nothing here; `lightning_rl.store.upgrades` does.
"""

from alembic import context

# A batch makes a table anew where SQLite cannot alter it.
context.configure(connection=context.config.attributes["connection"], render_as_batch=True)
context.run_migrations()
