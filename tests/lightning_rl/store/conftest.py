import pytest

from lightning_rl.store.sql import SqlStore


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


@pytest.fixture
def store(clock: Clock):
    store = SqlStore("sqlite://", clock)
    yield store
    store.close()
