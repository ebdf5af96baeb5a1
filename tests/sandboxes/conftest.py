"""All tests here run containers, by the program that does."""

import pytest

from tests.sandboxes import containers


@pytest.fixture(scope="session")
def found() -> str:
    try:
        return containers.program()
    except containers.NoContainers as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def program(found: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LIGHTNING_RL_DOCKER", found)
    return found
