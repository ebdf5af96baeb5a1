"""Which key opens which request: an admin everything, a runner only what a worker does, a peer (another server of the
same store) what servers ask each other.

Invariant: keys are compared in constant time, and nothing is done before a key was.
"""

import hmac
import logging
import time
from typing import Literal

import msgspec
from prometheus_client import Counter

Role = Literal["admin", "runner", "peer"]
_TELL_SECONDS = 10.0  # between two lines of refused keys: who tries many fills no log
_log = logging.getLogger(__name__)


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of one server."""

    admin: str
    runner: str  # "" where no runner is to have one
    peer: str = ""  # "" where no other server shares the store

    def __repr__(self) -> str:
        return "Keys(...)"  # never the keys

    def role(self, authorization: str) -> Role | None:
        """Whose key an `Authorization` header holds; None: of no role."""
        scheme, _, key = authorization.partition(" ")
        key_bytes = key.strip().encode()
        # All are always compared, so that the time tells nothing.
        admin = hmac.compare_digest(key_bytes, self.admin.encode())
        runner = hmac.compare_digest(key_bytes, self.runner.encode())
        peer = hmac.compare_digest(key_bytes, self.peer.encode())
        if scheme.lower() != "bearer" or not key_bytes:
            return None
        return "admin" if admin else "runner" if runner else "peer" if peer else None


class RefusedKeys:
    """Requests whose key was refused: counted in `counter`, and told of in the log."""

    def __init__(self) -> None:
        self.counter = Counter("lightning_rl_keys_refused", "Requests without the key that they need.", registry=None)
        self._untold = 0
        self._told_at = -_TELL_SECONDS

    def add(self, request: str, address: str) -> None:
        """One more; `request` is its method and path, `address` where it came from."""
        self.counter.inc()
        self._untold += 1
        if time.monotonic() - self._told_at >= _TELL_SECONDS:
            before = f" ({self._untold - 1} others before)" if self._untold > 1 else ""
            _log.warning("%s from %s was refused: it has not the key that it needs%s", request, address, before)
            self._untold, self._told_at = 0, time.monotonic()
