"""Ids that nobody else makes, and that begin with the time: of two made in different milliseconds the later one is the
greater, so that a store adds its newest rows at one end of each index instead of all over it.

They are no secrets, and no order within a millisecond.
"""

import base64
import os
import random
import time

_TIME_BYTES = 6  # milliseconds since the epoch, for 8,000 years to come
_drawn = random.Random()  # seeded by the system: to ask it for each id means to wait for Python's lock each time
if hasattr(os, "register_at_fork"):  # nobody forks on Windows
    os.register_at_fork(after_in_child=_drawn.seed)


def new_id(kind: str) -> str:
    """`kind` and 20 characters: 48 bits of time and 52 that are random, in base32hex."""
    drawn = _time() + _drawn.randbytes(9)
    return kind + base64.b32hexencode(drawn)[:20].decode().lower()


def new_call_id() -> str:
    """32 hexadecimal digits: 48 bits of time and 80 that are random."""
    return (_time() + _drawn.randbytes(10)).hex()


def _time() -> bytes:
    return (time.time_ns() // 1_000_000).to_bytes(_TIME_BYTES, "big")
