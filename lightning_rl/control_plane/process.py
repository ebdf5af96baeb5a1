"""The server, in the foreground (`lightning-rl serve`) or as a child: `python -m lightning_rl.control_plane.process`.

The child reads one JSON line of settings from stdin, prints one JSON line `{"url", "pid"}` on stdout when it answers,
and stops cleanly on SIGTERM or when stdin ends, which it does when the parent dies. Where it cannot start for a reason
that the user can remove, its one line is `{"error"}` and its status 1. What the user must hear of later is a line
`{"alarm"}`. It logs to stderr. Both ways load no torch, and what they write is readable by its owner alone: the store
holds the secret that signs attempt keys, and every prompt.
"""

import asyncio
import contextlib
import ctypes
import errno
import gc
import logging
import os
import resource
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec
import uvicorn
from prometheus_client.registry import Collector

from lightning_rl.control_plane.app import App, create_app
from lightning_rl.control_plane.gateways.cluster_rpc import peer_key
from lightning_rl.control_plane.gateways.engine_registration import attacher
from lightning_rl.control_plane.gateways.engines import EngineRequest
from lightning_rl.control_plane.gateways.membership import LEASE_SECONDS, Membership
from lightning_rl.control_plane.gateways.resolve import policy_alone
from lightning_rl.control_plane.gateways.server_info import info_of, store_id
from lightning_rl.control_plane.gateways.store_ledger import StoreLedger
from lightning_rl.control_plane.protocol import protocol
from lightning_rl.control_plane.routes.auth import Keys
from lightning_rl.errors import Explained
from lightning_rl.files import RunFolderBusy, owned, write_whole
from lightning_rl.processes import logs
from lightning_rl.processes.child import TellAlarms, tell
from lightning_rl.processes.cores import cores
from lightning_rl.store.databases import shown, sqlite_file
from lightning_rl.store.errors import NotFound, StoreError
from lightning_rl.store.sql import SqlStore
from lightning_rl.store.sql_thread import SqlThread
from lightning_rl_proxy.gateway import Gateway
from lightning_rl_proxy.http.limits import RequestLimits
from lightning_rl_proxy.recording.alerts import ALARMS
from lightning_rl_proxy.rendering.load import load_renderer
from lightning_rl_proxy.rendering.tokenizer import SpecialTokens
from lightning_rl_proxy.routing.router import Router

JOURNAL = "gateway.journal"  # in the run folder
GATEWAY_ID = "gateway.id"
STORE_ID = "store.id"
PUBLISHED = "policy.name"
_OWNER_ALONE = 0o077  # as a umask
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_EARLIER_SERVER_SECONDS = 60.0  # to store what it has, and end
IDLE_SECONDS = 75  # of a connection; clients keep theirs for 5 (httpx) or 15 (aiohttp), and lose a call if we end it
_OPEN_FILES = 2**16
_LONG_POLL_GRACE_SECONDS = 5  # for answers under way when the server stops
_log = logging.getLogger(__name__)


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a server needs to know. `port` 0 takes any free one; `tokenizer` is a folder with tokenizer.json.

    `url` is where others reach it; by default where it listens.
    """

    store: str
    run_dir: str
    admin_key: str
    runner_key: str
    model: str
    tokenizer: str | None = None
    renderer: str = "auto"
    history: Literal["keep", "template"] = "keep"
    chat_template_kwargs: dict[str, Any] = {}
    special_tokens_in_text: SpecialTokens = "text"
    unknown_model: Literal["policy", "refuse"] = "policy"
    allowed_media_domains: list[str] = []
    housekeeping: dict[str, list[str]] = {}
    engines: tuple[EngineRequest, ...] = ()
    host: str = "127.0.0.1"
    port: int = 0
    url: str | None = None
    lease_seconds: float = LEASE_SECONDS  # of this gateway among several
    otlp_endpoint: str | None = None  # where spans are sent, too
    limits: RequestLimits = RequestLimits()

    def __repr__(self) -> str:
        return f"Settings(store={shown(self.store)!r}, model={self.model!r})"  # never the keys


class CannotStart(Explained):
    """What stands in the way, for the user to remove."""


class Started(msgspec.Struct, frozen=True):
    """What the process prints when it answers."""

    url: str
    pid: int


def main() -> None:
    """Read the settings, serve until told to stop."""
    logs.begin(logging.StreamHandler())
    line = sys.stdin.buffer.readline()
    if not line:  # the parent could not begin the run, or is gone
        return
    settings = msgspec.json.decode(line, type=ServerSettings)
    ALARMS.addHandler(TellAlarms())
    try:
        listen_and_serve(settings, _announce)
    except CannotStart as error:
        _log.exception("cannot start")
        tell({"error": str(error)})
        sys.exit(1)


def listen_and_serve(settings: ServerSettings, announce: Callable[[str], None], *, foreground: bool = False) -> None:
    """Serve until SIGTERM; `announce` is told the URL once the server answers.

    A server that is not in the foreground also ends with its stdin. In the foreground a Ctrl-C ends it as cleanly, and
    is raised afterwards. Raises CannotStart.
    """
    os.umask(_OWNER_ALONE)
    _keep_freed_memory()
    _allow_connections()
    with (
        _alone_in(Path(settings.run_dir)),
        _alone_at(settings.store),
        listening_at(settings.host, settings.port) as listening,
    ):
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        url = settings.url or f"http://{host}:{listening.getsockname()[1]}"
        uvicorn_loop = uvicorn.Config(app="", loop="uvloop", log_config=None).get_loop_factory()
        with asyncio.Runner(loop_factory=uvicorn_loop) as runner:
            interrupted = runner.run(_serve(settings, listening, url, announce, foreground=foreground))
    if interrupted:
        raise KeyboardInterrupt


def _keep_freed_memory() -> None:
    """Have glibc keep the buffers of long requests, which it would give back: each page of the next ones is a fault."""
    with contextlib.suppress(AttributeError):  # of another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 2**24)
        mallopt(_M_TRIM_THRESHOLD, 2**26)


def _allow_connections() -> None:
    """Raise the limit of open files: each client's connection is one, and many systems begin with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):  # a kernel may allow fewer than its limit says
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@contextlib.contextmanager
def _alone_in(run_dir: Path) -> Iterator[None]:
    """Wait for the server of an earlier session, whose trainer was killed: it still stores what it has recorded."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(owned(run_dir, lock="server.lock", patience_seconds=_EARLIER_SERVER_SECONDS))
        except RunFolderBusy as error:
            raise CannotStart(f"{error} (its process is `lightning_rl.control_plane.process`)") from error
        except OSError as error:
            raise CannotStart(f"the run folder {run_dir} cannot be written: {error}") from error
        yield


@contextlib.contextmanager
def _alone_at(store: str) -> Iterator[None]:
    """Hold a SQLite file while it is served: of two servers each would know only a part of what an attempt called."""
    file = sqlite_file(store)
    with contextlib.ExitStack() as held:
        try:
            if file is not None and file.parent.is_dir():  # else opening it says so
                held.enter_context(owned(file.parent, lock=f"{file.name}.lock"))
        except RunFolderBusy as error:
            raise CannotStart(
                f"the store {file} has a server already, and a file has one: give this one a --store of its own "
                "(docs/several-servers.md), or both a PostgreSQL database (docs/several-gateways.md)"
            ) from error
        except OSError as error:
            raise CannotStart(f"the folder of the store {file} cannot be written: {error}") from error
        yield


def listening_at(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0: any that is free. Raises CannotStart."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            problem = f"port {port} of {host} is in use; choose another or stop what listens there"
        else:
            problem = f"cannot listen on port {port} of {host} ({error.strerror}); choose another"
        raise CannotStart(problem) from error


@contextlib.contextmanager
def _users_to_solve() -> Iterator[None]:
    """What a block refuses, a tokenizer, a renderer, a store, as CannotStart."""
    try:
        yield
    except (ValueError, FileNotFoundError, StoreError) as error:
        raise CannotStart(str(error)) from error


async def _serve(
    settings: ServerSettings, listening: socket.socket, url: str, announce: Callable[[str], None], *, foreground: bool
) -> bool:
    """Serve; whether a Ctrl-C ended it."""
    sql = SqlThread()
    with _users_to_solve():
        store, collectors = await sql.run(_opened, settings)
    try:
        with _users_to_solve():
            app = await _app(settings, store, sql, url, collectors)
        # What is loaded by now stays, and calls leave few cycles: full collections would only walk the open attempts.
        gc.freeze()
        gc.set_threshold(250_000, 20, 50)
        server = _Server(app, settings.limits, announce=lambda: announce(url))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, server.stop)
        if foreground:
            loop.add_signal_handler(signal.SIGINT, server.interrupt)
        else:
            threading.Thread(target=_stop_at_end_of_stdin, args=(loop, server), daemon=True).start()
        try:
            await server.serve(sockets=[listening])
        except SystemExit:  # so uvicorn says that the lifespan did not begin
            _raise_why(settings, app)
        return server.interrupted
    finally:
        await sql.run(store.close)
        sql.close()


def _opened(settings: ServerSettings) -> tuple[SqlStore, Sequence[Collector]]:
    """The store, and what counts the spans that it sends on."""
    if settings.otlp_endpoint is None:
        return SqlStore(settings.store), ()
    # An exporter, and all that reads configurations, for those who want one.
    from lightning_rl.config.otlp_endpoint import traces_url
    from lightning_rl.telemetry.traces.otlp_export import MirroredStore, SpansOut

    out = SpansOut(traces_url(settings.otlp_endpoint, "the OTLP endpoint"))
    return MirroredStore(settings.store, out), out.collectors


def _raise_why(settings: ServerSettings, app: App) -> NoReturn:
    error = app.start_error
    if isinstance(error, StoreError):
        raise CannotStart(str(error)) from error
    if isinstance(error, OSError):
        raise CannotStart(f"the run folder {settings.run_dir} cannot be written: {error}") from error
    raise RuntimeError("the application did not start") from error


async def _app(
    settings: ServerSettings, store: SqlStore, sql: SqlThread, url: str, collectors: Sequence[Collector]
) -> App:
    renderer = None
    if settings.tokenizer is not None:
        renderer = load_renderer(
            Path(settings.tokenizer),
            settings.renderer,
            settings.model,
            history=settings.history,
            chat_template_kwargs=settings.chat_template_kwargs,
            special_tokens_in_text=settings.special_tokens_in_text,
        )
    router = Router(settings.model, unknown_model=settings.unknown_model)
    identity = store_id(store.secret)
    _keep_journal_apart(Path(settings.run_dir), settings.store, identity)
    fleet = None
    if store.shared:
        gateway_id = _gateway_id(Path(settings.run_dir))
        fleet = Membership(store, gateway_id=gateway_id, url=url, lease_seconds=settings.lease_seconds)
    gateway = Gateway(
        ledger=StoreLedger(store, sql, fleet),
        secret=store.secret,
        journal=Path(settings.run_dir) / JOURNAL,
        renderer=renderer,
        router=router,
        limits=settings.limits,
        allowed_media_domains=settings.allowed_media_domains,
        housekeeping=settings.housekeeping,
        tokenizing_threads=cores(),
    )

    served = {settings.model, *(engine.model for engine in settings.engines)}
    await sql.run(_publish_policy, store, settings.model, served, Path(settings.run_dir) / PUBLISHED)
    app = create_app(
        store,
        gateway,
        sql=sql,
        keys=Keys(
            admin=settings.admin_key,
            runner=settings.runner_key,
            peer="" if fleet is None else peer_key(store.secret),
        ),
        gateway_url=url,
        attach_engine=attacher(router, renderer),
        info=msgspec.structs.replace(info_of(settings, renderer), store_id=identity),
        limits=settings.limits,
        collectors=collectors,
        fleet=fleet,
    )
    for engine in settings.engines:
        await app.engines.register(engine)
    return app


def _keep_journal_apart(run_dir: Path, url: str, store: str) -> None:
    """Note in the run folder whose store its journal is for. Raises CannotStart where what waits in it is for another
    store, which would take it without an error, so that the calls were lost."""
    file, journal = run_dir / STORE_ID, run_dir / JOURNAL
    former = file.read_text(encoding="utf-8") if file.exists() else None
    if former == store:
        return
    if former is not None and journal.exists() and journal.stat().st_size:
        raise CannotStart(
            f"{journal} holds calls that wait for another store than {shown(url)}: start a server of that store with "
            f"--run-dir {run_dir}, which stores them; or name another folder with --run-dir; or, to give the calls up, "
            "delete the file"
        )
    if former is not None:
        _log.warning("the store %s is another one than that of the last server with the folder %s", shown(url), run_dir)
    write_whole(file, store.encode())


def _gateway_id(run_dir: Path) -> str:
    """Who this gateway is for the others: as long as its journal is here, the same."""
    file = run_dir / GATEWAY_ID
    if not file.exists():
        write_whole(file, f"g{secrets.token_hex(10)}".encode())
    return file.read_text(encoding="utf-8")


def _publish_policy(store: SqlStore, model: str, served: set[str], file: Path) -> None:
    """Rollouts get the policy as `main_llm` even where no algorithm has published anything. So they do where this
    server, which notes in `file` what it published, had another policy before, which is not `served` now, and nobody
    has published anything else since."""
    former = file.read_text(encoding="utf-8") if file.exists() else None
    try:
        latest = store.resources("latest").resources
    except NotFound:
        latest = None
    if latest is not None:
        if former is None or former in served or latest != policy_alone(former).resources:
            return
        if store.shared or store.remembered_runs(""):  # others serve it, or a run comes back
            return
        _log.warning("rollouts get the model %s: no engine here serves %s, which they got before", model, former)
    store.publish(policy_alone(model))
    write_whole(file, model.encode())


class _Server(uvicorn.Server):
    """uvicorn that says when it answers, and whose stop does not wait for long polls."""

    def __init__(self, app: App, limits: RequestLimits, announce: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            http=protocol(limits),
            ws="none",
            access_log=False,
            proxy_headers=False,
            log_config=None,
            lifespan="on",
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=_LONG_POLL_GRACE_SECONDS,
        )
        super().__init__(config)
        self._release = app.release
        self._announce = announce
        self.interrupted = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._announce()

    def stop(self) -> None:
        """Stop soon: long polls answer now, then connections close."""
        self._release()
        self.should_exit = True

    def interrupt(self) -> None:
        """Stop as soon, since a person wants it."""
        self.interrupted = True
        self.stop()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # SIGTERM is ours: uvicorn would raise it again after a clean stop


def _announce(url: str) -> None:
    tell(msgspec.to_builtins(Started(url, os.getpid())))


def _stop_at_end_of_stdin(loop: asyncio.AbstractEventLoop, server: _Server) -> None:
    # Not sys.stdin: a thread that holds its lock would crash the interpreter's end.
    while os.read(0, 4096):
        pass
    with contextlib.suppress(RuntimeError):  # the loop has ended by itself
        loop.call_soon_threadsafe(server.stop)


if __name__ == "__main__":
    main()
