"""PostgreSQL for whoever needs one: a server a session (under xdist one each worker), emptied for every test.

Where it is not installed those tests are skipped with a warning; in CI (the environment variable `CI`) they fail.
"""

import os
import warnings
from collections.abc import Callable, Iterator

import pytest

from lightning_rl.store import schema
from lightning_rl.store.sql import SqlStore
from tests.postgres import Cluster, programs

_MISSING = "PostgreSQL is not installed (Debian: apt-get install postgresql), so what needs it is not tested"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A PostgreSQL server."""
    bin_dir = programs()
    if bin_dir is None and os.environ.get("CI"):
        pytest.fail(_MISSING)
    if bin_dir is None:
        warnings.warn(_MISSING, stacklevel=2)
        pytest.skip(_MISSING)
    running = Cluster(bin_dir)
    yield running
    running.remove()


@pytest.fixture(scope="session")
def empty_postgres_store(cluster: Cluster) -> Callable[[], str]:
    """Empties the one store that most tests share, and gives its URL: much faster than a new database."""
    name = cluster.database()
    SqlStore(cluster.url(name)).close()
    tables = ", ".join(set(schema.metadata.tables) - {"meta", "alembic_version"})

    def empty() -> str:
        with cluster.connect(name) as connection:
            connection.execute(f"TRUNCATE {tables} RESTART IDENTITY")
        return cluster.url(name)

    return empty


@pytest.fixture
def postgres_url(empty_postgres_store: Callable[[], str]) -> str:
    """The URL of an empty store in PostgreSQL."""
    return empty_postgres_store()
