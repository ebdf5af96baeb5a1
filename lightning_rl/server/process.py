"""The server process: `python -m lightning_rl.server.process`.

Reads one JSON line of settings from stdin, prints one JSON line `{"url", "pid"}` on stdout when it answers, and stops
cleanly on SIGTERM or when stdin ends, which it does when the parent dies. It logs to stderr. Loads no torch.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import uvicorn

from lightning_rl.server.app import App, create_app
from lightning_rl.server.engines import EngineRequest
from lightning_rl.server.keys import Keys
from lightning_rl.server.ledger import StoreLedger
from lightning_rl.server.sql_thread import SqlThread
from lightning_rl.store.contract import ResourcesRequest
from lightning_rl.store.errors import NotFound
from lightning_rl.store.sql import SqlStore
from lightning_rl_proxy.engines.vllm import TokenEngine
from lightning_rl_proxy.gateway import Gateway
from lightning_rl_proxy.rendering import load_renderer
from lightning_rl_proxy.router import Router

_LONG_POLL_GRACE_SECONDS = 5  # for answers under way when the server stops


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a server needs to know. `port` 0 takes any free one; `tokenizer` is a folder with tokenizer.json."""

    store: str
    run_dir: str
    admin_key: str
    runner_key: str
    model: str
    tokenizer: str
    renderer: str = "auto"
    engines: tuple[EngineRequest, ...] = ()
    host: str = "127.0.0.1"
    port: int = 0


class Started(msgspec.Struct, frozen=True):
    """What the process prints when it answers."""

    url: str
    pid: int


def main() -> None:
    """Read the settings, serve until told to stop."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)
    with socket.create_server((settings.host, settings.port), backlog=2048) as listening:
        url = f"http://{settings.host}:{listening.getsockname()[1]}"
        uvicorn_loop = uvicorn.Config(app="", loop="uvloop").get_loop_factory()
        with asyncio.Runner(loop_factory=uvicorn_loop) as runner:
            runner.run(_serve(settings, listening, url))


async def _serve(settings: Settings, listening: socket.socket, url: str) -> None:
    sql = SqlThread()
    store = await sql.run(SqlStore, settings.store)
    try:
        app = await _app(settings, store, sql, url)
        server = _Server(app, announce=lambda: _announce(url))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, server.stop)
        threading.Thread(target=_stop_at_end_of_stdin, args=(loop, server), daemon=True).start()
        await server.serve(sockets=[listening])
    finally:
        await sql.run(store.close)
        sql.close()


async def _app(settings: Settings, store: SqlStore, sql: SqlThread, url: str) -> App:
    renderer = load_renderer(Path(settings.tokenizer), settings.renderer, settings.model)
    router = Router(settings.model)
    gateway = Gateway(
        ledger=StoreLedger(store, sql),
        secret=store.secret,
        journal=Path(settings.run_dir) / "gateway.journal",
        renderer=renderer,
        router=router,
    )

    def attach(engine: EngineRequest) -> None:
        router.register(
            TokenEngine(
                model=engine.model,
                kind=engine.kind,
                url=engine.url,
                stop_token_ids=renderer.stop_token_ids,
                policy_version=engine.policy_version,
            )
        )

    await sql.run(_publish_policy, store, settings.model)
    return create_app(
        store,
        gateway,
        sql=sql,
        keys=Keys(admin=settings.admin_key, runner=settings.runner_key),
        gateway_url=url,
        attach_engine=attach,
        engines=settings.engines,
    )


def _publish_policy(store: SqlStore, model: str) -> None:
    """Rollouts get the policy as `main_llm` even where no algorithm has published anything."""
    try:
        store.resources("latest")
    except NotFound:
        store.publish(ResourcesRequest(resources={"main_llm": {"type": "proxy_llm", "model": model}}))


class _Server(uvicorn.Server):
    """uvicorn that says when it answers, and whose stop does not wait for long polls."""

    def __init__(self, app: App, announce: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            access_log=False,
            proxy_headers=False,
            log_config=None,
            lifespan="on",
            timeout_graceful_shutdown=_LONG_POLL_GRACE_SECONDS,
        )
        super().__init__(config)
        self._release = app.release
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._announce()

    def stop(self) -> None:
        """Stop soon: long polls answer now, then connections close."""
        self._release()
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # SIGTERM is ours: uvicorn would raise it again after a clean stop


def _announce(url: str) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(Started(url, os.getpid())) + b"\n")
    sys.stdout.buffer.flush()


def _stop_at_end_of_stdin(loop: asyncio.AbstractEventLoop, server: _Server) -> None:
    # Not sys.stdin: a thread that holds its lock would crash the interpreter's end.
    while os.read(0, 4096):
        pass
    with contextlib.suppress(RuntimeError):  # the loop has ended by itself
        loop.call_soon_threadsafe(server.stop)


if __name__ == "__main__":
    main()
