"""The page's server: a few static files, and JSON of the runs that it shows. It reads; nothing here changes a run.

Invariant: what cannot be read is answered in words (`{"error": ...}`), and no answer holds a key.
"""

import contextlib
import logging
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse
from starlette.middleware import Middleware
from starlette.staticfiles import StaticFiles

from lightning_rl.errors import Explained
from lightning_rl.viewer.access import COOKIE, Access, Guard, session_of
from lightning_rl.viewer.run import ViewedRun, encoded
from lightning_rl.viewer.search import WrongQuery

STATIC = Path(__file__).parent / "static"
# As in the control plane: no telemetry of FastAPI's own.
_NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
_READ_AT_ONCE = 2  # runs that are read before somebody looks at them
_log = logging.getLogger(__name__)


class _Login(msgspec.Struct):
    key: str


def create_app(
    runs: Sequence[ViewedRun], access: Access, begun_since: Callable[[], Iterable[ViewedRun]] = tuple
) -> FastAPI:
    """The application for these runs, which it closes at its end; `begun_since` gives those that are there since it was
    called last."""
    by_key, listing = keyed(runs), threading.Lock()

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        for run in runs[:_READ_AT_ONCE]:
            run.start()
        try:
            yield
        finally:
            for run in by_key.values():
                run.close()

    app = FastAPI(
        lifespan=lifespan,
        middleware=[Middleware(Guard, access=access)],
        exception_handlers={Exception: _unexpected},
        openapi_url=None,
        telemetry=_NO_TELEMETRY,
    )
    app.mount("/static", StaticFiles(directory=STATIC))
    _add_pages(app, access)

    @app.get("/api/runs")
    def list_runs() -> Response:
        with listing:
            for run in begun_since():
                by_key[_key_of(run, by_key)] = run
        return _answer(lambda: {"runs": [run.summary() | {"key": key} for key, run in [*by_key.items()]]})

    @app.get("/api/runs/{key}/{path:path}")
    def look(key: str, path: str, request: Request) -> Response:
        if key not in by_key:
            return _problem(404, f"there is no run {key!r} here; there are {', '.join(by_key)}")
        return _answer(lambda: by_key[key].answer(path, dict(request.query_params)))

    return app


def _add_pages(app: FastAPI, access: Access) -> None:
    """The page itself, and how a session begins and ends."""

    @app.get("/")
    def page() -> Response:
        return FileResponse(STATIC / "index.html")

    @app.get("/login")
    def login_page() -> Response:
        return FileResponse(STATIC / "login.html")

    @app.post("/login")
    async def login(request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body(), type=_Login)
        except msgspec.MsgspecError:
            return _problem(400, 'send {"key": "..."}')
        session = await access.begin(body.key)
        if session is None:
            return _problem(401, "this is not the admin key")
        answer = Response(status_code=204)
        secure = request.url.scheme == "https"
        answer.set_cookie(COOKIE, session, httponly=True, samesite="strict", secure=secure, path="/")
        return answer

    @app.post("/logout")
    def logout(request: Request) -> Response:
        access.end(session_of(dict(request.headers)))
        answer = Response(status_code=204)
        answer.delete_cookie(COOKIE, path="/")
        return answer


def keyed(runs: Sequence[ViewedRun]) -> dict[str, ViewedRun]:
    """The runs by what stands for them in URLs: their names, told apart where two are the same."""
    by_key: dict[str, ViewedRun] = {}
    for run in runs:
        by_key[_key_of(run, by_key)] = run
    return by_key


def _key_of(run: ViewedRun, existing_keys: Collection[str]) -> str:
    name = re.sub(r"[^A-Za-z0-9._~-]+", "-", run.name) or "run"
    key, number = name, 2
    while key in existing_keys:
        key, number = f"{name}~{number}", number + 1
    return key


def _answer(ask: Callable[[], Any]) -> Response:
    try:
        return Response(encoded(ask()), media_type="application/json")
    except WrongQuery as error:
        return _problem(400, str(error))
    except (Explained, OSError) as error:
        return _problem(404, str(error))


async def _unexpected(request: Request, error: Exception) -> Response:
    # Starlette raises the error again after this answer, so that the terminal has it whole.
    return _problem(500, f"{request.url.path} could not be read: {type(error).__name__}: {error}")


def _problem(status: int, message: str) -> Response:
    return Response(encoded({"error": message}), status_code=status, media_type="application/json")


def serve(app: FastAPI, host: str, port: int, tell: Callable[[str], None]) -> None:
    """Serve until Ctrl-C; `tell` is told the URL. Where `port` is taken, a free one is used."""
    with contextlib.closing(_bound(host, port)) as listening:
        name = f"[{host}]" if ":" in host else host
        tell(f"http://{name}:{listening.getsockname()[1]}/")
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on", server_header=False)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for one in (port, 0):
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, one))
        except OSError as error:
            listening.close()
            if not one:
                raise
            _log.info("port %d is taken: %s", one, error)
            continue
        listening.listen(128)
        return listening
    raise AssertionError("a free port is always found, or an error raised")
