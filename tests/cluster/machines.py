"""Machines with a network between them, played on one: network namespaces on a bridge.

The bridge is in the namespace of the first machine, so all addresses are private to the namespaces, and nothing of it
is seen from outside. Where namespaces are not permitted the tests are skipped with a warning; in CI (the environment
variable `CI`) they fail.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

_CLONE_NEWNET = 0x40000000
_NETWORK = "10.203.78"
T = TypeVar("T")


class Machines:
    """Namespaces by the names of their machines; `first` has the bridge."""

    def __init__(self, first: str, others: Sequence[str]) -> None:
        self._names = {name: f"lrl{os.getpid()}{name}" for name in (first, *others)}
        self._first = first
        self._processes: list[subprocess.Popen[bytes]] = []
        self._inside: ThreadPoolExecutor | None = None

    def build(self) -> None:
        """Raises OSError or CalledProcessError where that is not permitted."""
        first = self._names[self._first]
        for name in self._names.values():
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", first, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", first, "address", "add", f"{self.address}/24", "dev", "bridge")
        _run("ip", "-n", first, "link", "set", "bridge", "up")
        for number, (name, space) in enumerate(self._names.items(), start=1):
            if name == self._first:
                continue
            _run(*f"ip -n {first} link add to-{name} type veth peer name eth0 netns {space}".split())
            _run(*f"ip -n {first} link set to-{name} master bridge up".split())
            _run(*f"ip -n {space} address add {_NETWORK}.{number}/24 dev eth0".split())
            _run(*f"ip -n {space} link set eth0 up".split())
        self._inside = ThreadPoolExecutor(1, initializer=_enter, initargs=(first,))

    @property
    def address(self) -> str:
        """Of the first machine."""
        return f"{_NETWORK}.1"

    def start(self, name: str, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        """A process on that machine; what it says goes to a file of the folder."""
        with (folder / f"{name}.log").open("ab") as log:
            self._processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", self._names[name], *words],
                    cwd=folder,
                    env={**os.environ, **environment},
                    stdout=log,
                    stderr=log,
                )
            )

    def on_first(self, what: Callable[[], T]) -> T:
        """The answer of `what`, asked from the first machine."""
        assert self._inside is not None
        return self._inside.submit(what).result()

    def cut(self, name: str) -> None:
        """Nothing gets from or to that machine."""
        _run(*f"ip -n {self._names[self._first]} link set to-{name} down".split())

    def mend(self, name: str) -> None:
        _run(*f"ip -n {self._names[self._first]} link set to-{name} up".split())

    def kill(self, name: str) -> int:
        """All its processes are gone at once; how many they were."""
        told = subprocess.run(["ip", "netns", "pids", self._names[name]], capture_output=True, text=True, check=False)
        for pid in told.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        return len(told.stdout.split())

    def remove(self) -> None:
        """Leave no process, namespace or link behind."""
        if self._inside is not None:
            self._inside.shutdown()
        for name in self._names:
            self.kill(name)
        for process in self._processes:
            process.wait(60)
        for name in self._names.values():
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@contextlib.contextmanager
def machines(first: str, *others: str) -> Iterator[Machines]:
    """Machines that reach each other, of which nothing is left behind."""
    made = Machines(first, others)
    try:
        try:
            made.build()
        except (OSError, subprocess.CalledProcessError) as error:
            told = getattr(error, "stderr", b"") or b""
            missing = f"no network namespaces here, so partitions are not tested: {error} {told.decode()}"
            if os.environ.get("CI"):
                pytest.fail(missing)
            warnings.warn(missing, stacklevel=3)
            pytest.skip(missing)
        yield made
    finally:
        made.remove()


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def _enter(name: str) -> Any:
    """The thread that calls this is in that namespace from then on."""
    libc = ctypes.CDLL(None, use_errno=True)
    space = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if libc.setns(space, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(space)
