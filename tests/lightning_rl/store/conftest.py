from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lightning_rl.store.backends import BACKENDS, opened


class Clock:
    """A clock that moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=BACKENDS)
def store(request: pytest.FixtureRequest, clock: Clock, tmp_path: Path) -> Iterator[Any]:
    """What keeps the contract, each in turn: with the methods of `SqlStore`."""
    url = "sqlite://" if "sqlite" in request.param else request.getfixturevalue("postgres_url")
    with opened(request.param, url, tmp_path, clock) as store:
        yield store


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store that several processes may open, or one after another."""
    return f"sqlite:///{tmp_path / 'run.db'}" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
