"""How the tables came to be, for Alembic: one file a revision, named by the schema version that it leads to."""
