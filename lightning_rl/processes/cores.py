"""How many cores this process may use: of those that it may run on, as many as its container's limit pays for.

A limit on CPUs (`docker run --cpus`, `resources.limits.cpu` of Kubernetes) is a share of time: the process sees all
cores of the machine, and threads on all of them use the share up while they wait for each other. So there should be no
more threads than the share is worth.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

_OF_PROCESS = Path("/proc/self/cgroup")
_MOUNTED = Path("/sys/fs/cgroup")


def cores() -> int:
    """At least 1; a part of a core counts as one."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, limit() or usable)


def limit() -> int | None:
    """So many cores the limit is worth; None: there is none."""
    return min((max(1, math.ceil(share)) for share in _shares()), default=None)


def limit_threads() -> None:
    """Have torch compute with no more threads than the limit is worth, where it is loaded after this and nobody has set
    `OMP_NUM_THREADS`. Children, too."""
    most = limit()
    # By itself it takes a thread for each core of the machine, or where these are two hyperthreads for each two.
    if most is not None and 2 * most <= (os.cpu_count() or 1):
        os.environ.setdefault("OMP_NUM_THREADS", str(most))


def _shares() -> Iterator[float]:
    """In cores, the limits of the control groups that this process is in: of its own and of those above."""
    try:
        groups = [line.split(":", 2) for line in _OF_PROCESS.read_text(encoding="utf-8").splitlines()]
    except OSError:  # not Linux
        return
    for _, controllers, path in groups:
        if controllers == "":
            root, read = _MOUNTED, _of_version_2
        elif "cpu" in controllers.split(","):
            root, read = _MOUNTED / controllers, _of_version_1
        else:
            continue
        # In a container its own group is mounted as the root, and the path may be one that the machine outside has.
        own = root / path.lstrip("/")
        for group in (own, *own.parents):
            if (share := read(group)) is not None:
                yield share
            if group == root:
                break


def _of_version_2(group: Path) -> float | None:
    quota, period = _words(group / "cpu.max") or ("max", "")
    return None if quota == "max" else int(quota) / int(period)


def _of_version_1(group: Path) -> float | None:
    [quota], [period] = _words(group / "cpu.cfs_quota_us") or ["-1"], _words(group / "cpu.cfs_period_us") or ["1"]
    return None if int(quota) <= 0 else int(quota) / int(period)


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split()
    except OSError:
        return []
