"""Starting the server process from another one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from lightning_rl.server.child import Child


class Policy(Protocol):
    """What is served: the model's name, the folder of its tokenizer, its renderer, its engines."""

    model: str
    tokenizer: str
    renderer: str
    engines: list[dict[str, Any]]


class Serving:
    """A running server: its `url`, and whether it still runs."""

    def __init__(self, url: str, child: Child) -> None:
        self.url = url
        self.pid = child.process.pid
        self._child = child

    def check(self) -> None:
        """Raises ChildDied, with the end of its log, when the server has ended."""
        self._child.check()


@contextmanager
def launch(run_dir: Path, endpoint: Policy, *, admin_key: str, runner_key: str, port: int = 0) -> Iterator[Serving]:
    """A server on the loopback whose files are in `run_dir`, for as long as the block runs.

    Raises ChildDied, with the end of `server.log`, when it cannot start.
    """
    settings = {
        "store": f"sqlite:///{run_dir / 'store.db'}",
        "run_dir": str(run_dir),
        "admin_key": admin_key,
        "runner_key": runner_key,
        "model": endpoint.model,
        "tokenizer": endpoint.tokenizer,
        "renderer": endpoint.renderer,
        "engines": endpoint.engines,
        "port": port,
    }
    child = Child(
        "lightning_rl.server.process",
        name="the server",
        log=run_dir / "server.log",
        first=msgspec.json.encode(settings) + b"\n",
    )
    try:
        started = msgspec.json.decode(child.first_line())
        yield Serving(started["url"], child)
    finally:
        child.stop()
