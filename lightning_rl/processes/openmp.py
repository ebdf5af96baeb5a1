"""OpenMP's threads, of which one thread of a process at a time should have any.

On a CPU torch computes with threads that GNU's OpenMP keeps for each thread that has computed. Where a process has more
of them than cores, all sleep at once between two operations, and to wake them takes 50 µs: longer than most operations
of a small model. So who has computed ends its threads before another one computes; to begin them anew takes 0.1 ms.
"""

import ctypes
import sys
from collections.abc import Callable
from functools import cache

_SOFT = 1  # `omp_pause_soft`: what is set stays


def end_threads() -> None:
    """End the threads that compute for the calling one, until it computes again. Other OpenMPs than GNU's are left
    alone."""
    if (pause := _pause()) is not None:
        pause(_SOFT)


@cache
def _pause() -> Callable[[int], int] | None:
    """OpenMP's `omp_pause_resource_all`, of the library that torch has loaded."""
    if sys.platform != "linux":
        return None
    loaded = ctypes.CDLL(None)
    pause: Callable[[int], int] | None = getattr(loaded, "omp_pause_resource_all", None)
    return pause if hasattr(loaded, "GOMP_parallel") else None
