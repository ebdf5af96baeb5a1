"""Which key opens which request: an admin everything, a runner only what a worker does, a peer (another server of the
same store) what servers ask each other.

Invariant: keys are compared in constant time, and nothing is done before a key was.
"""

import contextlib
import ctypes
import hmac
import ipaddress
import os
from typing import Literal

import msgspec

Role = Literal["admin", "runner", "peer"]
ADMIN_KEY, RUNNER_KEY = "LIGHTNING_RL_ADMIN_KEY", "LIGHTNING_RL_RUNNER_KEY"  # where people set them
SHORTEST = 16  # characters, beyond the loopback


def taken_from_environment(name: str) -> str:
    """The value of a variable, "" where it is not set; afterwards neither this process nor its children have it.

    `/proc/PID/environ` shows the memory in which the process was given its variables, whatever became of them: what
    holds this one there is overwritten.
    """
    value = os.environ.get(name, "")
    with contextlib.suppress(AttributeError, ValueError):  # of a system that keeps them elsewhere
        variables = ctypes.POINTER(ctypes.c_void_p).in_dll(ctypes.CDLL(None), "environ")
        prefix, index = f"{name}=".encode(), 0
        while address := variables[index]:
            if (told := ctypes.string_at(address)).startswith(prefix):
                ctypes.memset(address + len(prefix), 0, len(told) - len(prefix))
            index += 1
    os.environ.pop(name, None)
    return value


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"  # another name may lead anywhere


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of one server."""

    admin: str
    runner: str  # "" where no runner is to have one
    peer: str = ""  # "" where no other server shares the store

    def __repr__(self) -> str:
        return "Keys(...)"  # never the keys

    def role(self, authorization: str) -> Role | None:
        """Whose key an `Authorization` header holds; None: nobody's."""
        scheme, _, key = authorization.partition(" ")
        given = key.strip().encode()
        # All are always compared, so that the time tells nothing.
        admin = hmac.compare_digest(given, self.admin.encode())
        runner = hmac.compare_digest(given, self.runner.encode())
        peer = hmac.compare_digest(given, self.peer.encode())
        if scheme.lower() != "bearer" or not given:
            return None
        return "admin" if admin else "runner" if runner else "peer" if peer else None
