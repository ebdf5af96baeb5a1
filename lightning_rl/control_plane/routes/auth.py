"""Which key opens which request: an admin everything, a runner only what a worker does, a peer (another server of the
same store) what servers ask each other.

Invariant: keys are compared in constant time, and nothing is done before a key was.
"""

import hmac
from typing import Literal

import msgspec

Role = Literal["admin", "runner", "peer"]


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
