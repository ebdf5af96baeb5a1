"""Who may look: on the loopback whoever is on this machine, beyond it whoever has given the admin key.

Invariant: the key is compared in constant time, is never sent back, and stands in no URL, cookie or log; a session is a
random word in a cookie that no script reads. The loopback is no wall against pages of other sites in the same browser,
so the names and origins of requests are checked there too.
"""

import asyncio
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import urlsplit

import msgspec

from lightning_rl.processes.service_keys import is_loopback

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

COOKIE = "lightning_rl_viewer"
SENT_BY = "x-lightning-rl"  # a header that no form and no other site can send
_SESSION_SECONDS = 12 * 3600.0
_SESSIONS = 256
_WRONG_KEY_SECONDS = 0.5
_OPEN = ("/login", "/static/")  # what is shown without a session
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Access:
    """Who may look at a page that listens on `host`. `key` is what others must give; None: nothing is asked for, which
    is for the loopback alone."""

    def __init__(self, host: str, key: str | None) -> None:
        if key is None and not is_loopback(host):
            raise ValueError(f"{host} can be reached by others: a page there needs a key")
        self._loopback = is_loopback(host)
        self._key = key
        self._sessions: dict[str, float] = {}

    def __repr__(self) -> str:
        return "Access(...)"  # never the key

    async def begin(self, key: str) -> str | None:
        """A new session for whoever gives the key; None for another one, after a while."""
        if self._key is None or not hmac.compare_digest(key.encode(), self._key.encode()):
            await asyncio.sleep(_WRONG_KEY_SECONDS)
            return None
        now = time.monotonic()
        self._sessions = {session: until for session, until in self._sessions.items() if until > now}
        while len(self._sessions) >= _SESSIONS:
            self._sessions.pop(next(iter(self._sessions)))
        session = secrets.token_urlsafe(32)
        self._sessions[session] = now + _SESSION_SECONDS
        return session

    def end(self, session: str) -> None:
        """The session is over."""
        self._sessions.pop(session, None)

    def is_open(self, session: str) -> bool:
        """Whether whoever has this session may look."""
        return self._key is None or self._sessions.get(session, 0.0) > time.monotonic()

    def refusal(self, method: str, headers: dict[str, str]) -> str | None:
        """Why a request is refused, whoever sends it; None where it is not."""
        host = headers.get("host", "")
        name = urlsplit(f"//{host}").hostname or ""
        if self._loopback and not is_loopback(name):
            return f"this page is at 127.0.0.1 and localhost, not at {host!r}"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate":
            return "another site asked for it"
        if method in ("GET", "HEAD"):
            return None
        if (origin := headers.get("origin")) is not None and urlsplit(origin).netloc != host:
            return f"it was sent from {origin!r}"
        return None if SENT_BY in headers else f"it lacks the header {SENT_BY}"


def session_of(headers: dict[str, str]) -> str:
    """The session in a request's cookie; "" where there is none."""
    cookie: SimpleCookie = SimpleCookie()
    try:
        cookie.load(headers.get("cookie", ""))
    except CookieError:
        return ""
    return cookie[COOKIE].value if COOKIE in cookie else ""


class Guard:
    """An ASGI middleware that lets through what `access` lets through, and gives each answer its headers."""

    def __init__(self, app: Any, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}

        async def answer(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in message["headers"]}
                extra = [
                    (name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in names
                ]
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        if (why := self._access.refusal(scope["method"], headers)) is not None:
            await _refuse(answer, 403, f"{scope['method']} {scope['path']} is refused: {why}")
        elif scope["path"].startswith(_OPEN) or self._access.is_open(session_of(headers)):
            await self._app(scope, receive, answer)
        elif scope["path"] == "/":
            await answer({"type": "http.response.start", "status": 303, "headers": [(b"location", b"/login")]})
            await answer({"type": "http.response.body", "body": b""})
        else:
            await _refuse(answer, 401, "log in first: /login takes the admin key")


async def _refuse(send: Send, status: int, message: str) -> None:
    body = msgspec.json.encode({"error": message})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
