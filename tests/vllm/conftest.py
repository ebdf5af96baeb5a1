"""Two servers for all tests, each started when the first test needs it: logprobs as vLLM gives them by default, and of
what was sampled from. The second takes one request at a time, by priority.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.server import Server

FLAGS = {
    "raw": (),
    "processed": (
        "--logprobs-mode", "processed_logprobs", "--scheduling-policy", "priority", "--max-num-seqs", "1",
    ),
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those of this folder need the environment; the first of a server waits until it has started."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker("vllm")
            item.add_marker(pytest.mark.timeout(400))


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    running: dict[str, Server] = {}
    yield running
    for server in running.values():
        server.stop()


def _running(name: str, servers: dict[str, Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    if name not in servers or not servers[name].runs:
        servers[name] = Server(tmp_path_factory.mktemp("vllm") / f"{name}.log", *FLAGS[name])
    return servers[name]


@pytest.fixture
def raw(servers: dict[str, Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    return _running("raw", servers, tmp_path_factory)


@pytest.fixture
def processed(servers: dict[str, Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    return _running("processed", servers, tmp_path_factory)
