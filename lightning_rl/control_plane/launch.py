"""Starting the server process from another one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from lightning_rl.errors import Explained
from lightning_rl.processes.child import Child


class ServedPolicy(Protocol):
    """What is served: the model's name, the folder of its tokenizer, its renderer, its engines.

    Without a tokenizer every model is a chat backend.
    """

    model: str
    tokenizer: str | None
    renderer: str
    history: str
    chat_template_kwargs: dict[str, Any]
    special_tokens_in_text: str
    unknown_model: str
    allowed_media_domains: list[str]
    housekeeping: dict[str, list[str]]
    engines: list[dict[str, Any]]


class ServerNotStarted(Explained, RuntimeError):
    """The server cannot start for a reason that its user can remove; the message says which."""


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
def launch(run_dir: Path, endpoint: ServedPolicy, *, admin_key: str, runner_key: str, **more: Any) -> Iterator[Serving]:
    """A server whose files are in `run_dir`, for as long as the block runs. As `loading`, then `serve`."""
    with loading(run_dir) as child:
        yield serve(child, run_dir, endpoint, admin_key=admin_key, runner_key=runner_key, **more)


@contextmanager
def loading(run_dir: Path) -> Iterator[Child]:
    """A server's process, for as long as the block runs. It loads its code, and waits for what `serve` tells it: the
    caller loads a model meanwhile. Raises ServerNotStarted where its log cannot be written.
    """
    child = Child("lightning_rl.control_plane.process", name="the server", log=run_dir / "server.log")
    try:
        try:
            child.start()
        except OSError as error:
            raise ServerNotStarted(f"the run folder {run_dir} cannot be written: {error}") from error
        yield child
    finally:
        child.stop()


def serve(
    child: Child,
    run_dir: Path,
    endpoint: ServedPolicy,
    *,
    admin_key: str,
    runner_key: str,
    host: str = "127.0.0.1",
    port: int = 0,
    url: str | None = None,
    otlp_endpoint: str | None = None,
) -> Serving:
    """Have the process of `loading` serve `endpoint` from its files in `run_dir`; returns once it answers.

    `url`: where others reach it, by default where it listens. `otlp_endpoint`: where every span that it records is
    sent, too. Its alarms are logged here as warnings. Raises ServerNotStarted when something stands in the way that the
    user can remove, and ChildDied, with the end of `server.log`, when it ended otherwise.
    """
    settings = {
        "store": f"sqlite:///{run_dir / 'store.db'}",
        "run_dir": str(run_dir),
        "admin_key": admin_key,
        "runner_key": runner_key,
        "model": endpoint.model,
        "tokenizer": endpoint.tokenizer,
        "renderer": endpoint.renderer,
        "history": endpoint.history,
        "chat_template_kwargs": endpoint.chat_template_kwargs,
        "special_tokens_in_text": endpoint.special_tokens_in_text,
        "unknown_model": endpoint.unknown_model,
        "allowed_media_domains": endpoint.allowed_media_domains,
        "housekeeping": endpoint.housekeeping,
        "engines": endpoint.engines,
        "host": host,
        "port": port,
        "url": url,
        "otlp_endpoint": otlp_endpoint,
    }
    child.write(msgspec.json.encode(settings) + b"\n")
    return Serving(child.wait_for("url", ServerNotStarted), child)
