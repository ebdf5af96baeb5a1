"""Keys that a process gets in its environment: read once, then removed; and whom a server needs to fear."""

import contextlib
import ctypes
import ipaddress
import os

ADMIN_KEY, RUNNER_KEY = "LIGHTNING_RL_ADMIN_KEY", "LIGHTNING_RL_RUNNER_KEY"  # where people set them
SHORTEST = 16  # characters, beyond the loopback


def pop_from_environment(name: str) -> str:
    """The value of a variable, "" where it is not set; afterwards neither this process nor its children have it.

    `/proc/PID/environ` shows the memory in which the process was given its variables, whatever became of them: what
    holds this one there is overwritten.
    """
    value = os.environ.get(name, "")
    with contextlib.suppress(AttributeError, ValueError):  # of a system that keeps them elsewhere
        variables = ctypes.POINTER(ctypes.c_void_p).in_dll(ctypes.CDLL(None), "environ")
        prefix, index = f"{name}=".encode(), 0
        while address := variables[index]:
            if (entry := ctypes.string_at(address)).startswith(prefix):
                ctypes.memset(address + len(prefix), 0, len(entry) - len(prefix))
            index += 1
    os.environ.pop(name, None)
    return value


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"  # another name may lead anywhere
