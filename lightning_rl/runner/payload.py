"""What a runner process is told by its parent, through its stdin.

First comes one frame: an 8-byte length and a pickled `Payload`. Every byte after it is one more slot: one more rollout
that may run at the same time. The end of stdin is the end of the process.
"""

import struct
from typing import Literal, TypedDict

Isolation = Literal["thread", "process"]
LENGTH = struct.Struct(">Q")
ONE_MORE_SLOT = b"+"


class Payload(TypedDict):
    """What a runner needs to know. `agent` is pickled by itself: it needs `sys_path` to be set first.

    `isolation`: whether rollouts run in this process or each in one of its own. `slots`: how many run at once at first.
    `most`: it retires when it has begun so many; None: it goes on. It then tells of each that ended (`ended`).
    """

    sys_path: list[str]
    url: str
    key: str
    worker_id: str
    slots: int
    most: int | None
    isolation: Isolation
    agent: bytes
