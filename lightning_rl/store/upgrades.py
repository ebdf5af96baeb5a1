"""Opening a database: before anything else is done with it, its tables are this program's.

Invariant: a new database, or an older one, gets them in one transaction, so a process that dies in its midst leaves
what was there; of two that open an old one, the second waits and finds it done. What a newer release wrote is refused.
Alembic takes longer to load than a store to open, so it is loaded where an older database is upgraded, and only there.
"""

import sqlalchemy as sa

from lightning_rl.store import schema
from lightning_rl.store.databases import Database, connect
from lightning_rl.store.errors import StoreUnwritable

MIGRATIONS = "lightning_rl.store:migrations"
_LOCK = "lightning_rl.schema"
_VERSION = "schema_version"


def open_database(url: str) -> Database:
    """The database at `url`, with this program's tables.

    Raises:
        ValueError: for another kind of database, one that cannot be opened, or one with another schema version.
        StoreUnwritable: the file cannot be written.
    """
    database = connect(url)
    try:
        version = database.read(_version)
        if version != schema.SCHEMA_VERSION:
            database.write(lambda connection: _bring_up(database, connection))
    except sa.exc.DatabaseError as error:
        database.close()
        raise ValueError(f"the store {database.place} cannot be opened: {error.orig}; {database.remedy}") from error
    except StoreUnwritable as error:
        database.close()
        if database.shared:  # nothing was opened yet that could wait for a server to come back
            raise ValueError(str(error)) from error
        raise
    except BaseException:
        database.close()
        raise
    return database


def _version(connection: sa.Connection) -> str | None:
    """The schema version of the database; None where it has no tables of ours."""
    if not sa.inspect(connection).has_table(schema.meta.name):
        return None
    version = sa.select(schema.meta.c.value).where(schema.meta.c.key == _VERSION)
    return connection.execute(version).scalar_one_or_none() or "0"


def _bring_up(database: Database, connection: sa.Connection) -> None:
    database.hold_name(connection, _LOCK)
    version = _version(connection)  # again: another process may have been here first
    if version is None:
        _make(database, connection)
    elif version not in schema.READABLE:
        raise ValueError(
            f"the store {database.place} has schema version {version}, this program needs {schema.SCHEMA_VERSION} and "
            f"upgrades {', '.join(schema.READABLE[:-1])}: open it with the release that wrote it or a newer one, or "
            "choose another"
        )
    elif version != schema.SCHEMA_VERSION:
        _upgrade(connection)


def _make(database: Database, connection: sa.Connection) -> None:
    foreign = sorted(set(sa.inspect(connection).get_table_names()) & set(schema.metadata.tables))
    if foreign:
        raise ValueError(
            f"the store {database.place} holds tables of something else ({', '.join(foreign)}): give the store a "
            "database of its own"
        )
    schema.metadata.create_all(connection, checkfirst=False)
    connection.execute(sa.insert(schema.alembic_version), {"version_num": schema.SCHEMA_VERSION})
    connection.execute(sa.insert(schema.meta), {"key": _VERSION, "value": schema.SCHEMA_VERSION})


def _upgrade(connection: sa.Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", MIGRATIONS)
    config.set_main_option("path_separator", "os")
    command.upgrade(config, schema.SCHEMA_VERSION)
    noted = sa.update(schema.meta).where(schema.meta.c.key == _VERSION)
    connection.execute(noted.values(value=schema.SCHEMA_VERSION))
