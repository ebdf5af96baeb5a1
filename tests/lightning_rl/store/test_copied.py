"""A run is copied as it was asked for, with what its agents were given, whatever else its servers have."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_rl.inspect import recorded
from lightning_rl.inspect.rollout_source import resources_of
from lightning_rl.store import copied, schema
from lightning_rl.store.contract import ResourcesRequest
from tests.lightning_rl.inspect import runs


class Server:
    """A store as the client of its server reads it."""

    def __init__(self, store: Any) -> None:
        self.store, self.traces, self.resources = store, store.traces, store.resources

    def rollouts(self, page: int) -> Iterator[Any]:
        yield from self.store.page(limit=page)[0]

    def record(self, *names: str, given: str) -> None:
        """Rollouts that are given the resources of this id."""
        self.store.publish(ResourcesRequest(resources={given: {"type": "text"}}, resources_id=given))
        for name in names:
            runs.record(self.store, name, runs.TALK)


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Two, each of which counts its own versions of resources; one rollout more than are read at once has the first."""
    monkeypatch.setattr(copied, "_TRACES", 2)
    (tmp_path / "second").mkdir()
    with runs.open_store(tmp_path) as first, runs.open_store(tmp_path / "second") as second:
        made = [Server(store) for store in (first, second)]
        made[0].record("b.run", "a.run", given="then")
        made[0].record("c.run", "d.another", given="now")
        made[1].record("e.run", given="later")
        yield made


def ids(connection: Any) -> list[str]:
    return [str(row.rollout_id) for row in connection.execute(schema.rollouts.select().order_by("position"))]


def test_of_one_server_rollouts_are_in_the_order_that_they_were_asked_for(servers: list[Any]) -> None:
    with recorded.copied(servers[:1], "run") as connection:
        assert ids(connection) == ["b.run", "a.run", "c.run"]
    with recorded.copied(servers[:1], None) as connection:
        assert ids(connection) == ["b.run", "a.run", "c.run", "d.another"]


def test_of_several_servers_all_that_agents_were_given_comes_along(servers: list[Any]) -> None:
    with recorded.copied(servers, "run") as connection:
        assert set(ids(connection)) == {"a.run", "b.run", "c.run", "e.run"}
        for given in ("then", "now", "later"):
            assert resources_of(connection, given) == {given: {"type": "text"}}
