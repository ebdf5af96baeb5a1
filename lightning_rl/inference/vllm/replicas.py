"""The vLLM servers of a run, ours or others': one policy is sampled by them, or several whose adapters they have.

Invariant: a server that ended is started again, and takes calls only when it has the present weights of every policy.
"""

import logging
import threading
from collections.abc import Sequence
from typing import Protocol

from lightning_rl.inference.vllm.control import Control
from lightning_rl.inference.vllm.server import VllmNotStarted

_RESTARTS = 3  # of one server; what ends it more often will not go away by itself
WATCH_SECONDS = 0.5
_log = logging.getLogger(__name__)


class OwnServer(Protocol):
    """A server that is ours: `VllmServer`, here or on another machine."""

    url: str

    @property
    def runs(self) -> bool: ...

    def start(self) -> None: ...

    def wait(self) -> None: ...

    def why(self) -> str: ...

    def ask_to_stop(self) -> None: ...

    def stop(self) -> None: ...


class Member:
    """A server, ours or (`server` None) somebody else's; one that is `away` has ended, or not taken its weights yet."""

    def __init__(self, url: str, server: OwnServer | None) -> None:
        self.server = server
        self.control = Control(url)
        self.away = False
        self.restarts = 0


class SampledPolicy(Protocol):
    """A policy that is sampled by the servers."""

    def renew(self, member: Member) -> None:
        """Give a server that was started again the present weights, under `Replicas.lock`."""
        ...

    def tell_outage(self, away: bool) -> None:
        """No server is left that could answer; or (False) one is back."""
        ...


class Replicas:
    """`members` from `start` to `close`, which all `policies` call. `lock` is held by who gives them weights."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self.policies: list[SampledPolicy] = []
        self.lock = threading.Lock()  # of the present weights, and of who has them
        self.over = threading.Event()
        self._failed: Exception | None = None
        self._watcher = threading.Thread(target=self._watch, name="vLLM's watcher", daemon=True)

    def start(self) -> None:
        """Start the servers that are ours, which want weights then; once. Raises VllmNotStarted."""
        if self._watcher.ident is not None:
            return
        own = self._own()
        for server in own:
            server.start()
        for server in own:
            server.wait()
        self._watcher.start()

    def check(self) -> None:
        """Raise what ended a server for good, when something has."""
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        """Stop the servers that are ours."""
        self.over.set()
        own = self._own()
        for server in own:  # all at once
            server.ask_to_stop()
        for server in own:
            server.stop()
        if self._watcher.is_alive():
            self._watcher.join()
            for server in own:  # one may have been started again in between
                server.stop()
        for member in self.members:
            member.control.close()

    def _own(self) -> list[OwnServer]:
        return [member.server for member in self.members if member.server is not None]

    # The watcher's thread.

    def _watch(self) -> None:
        """Start again what has ended; what prevents that, whatever it is, is for `check` to raise."""
        while not self.over.wait(WATCH_SECONDS):
            for member in self.members:
                if member.server is not None and not member.server.runs:
                    try:
                        self._revive(member, member.server)
                    except Exception as error:  # noqa: BLE001  # a full disk, say
                        if not self.over.is_set():
                            self._failed = error
                        return

    def _revive(self, member: Member, server: OwnServer) -> None:
        member.away = True
        why, member.restarts = server.why(), member.restarts + 1
        if member.restarts > _RESTARTS:
            raise VllmNotStarted(f"it ended {member.restarts} times; the last time: {why}")
        _log.warning("%s\nit is started again (%d of %d times)", why, member.restarts, _RESTARTS)
        alone = all(each.away for each in self.members)
        if alone:
            self._tell_outage(True)
        if self.over.is_set():
            return
        server.start()
        server.wait()
        with self.lock:  # an update meanwhile is not missed
            member.away = False
            for policy in self.policies:
                policy.renew(member)
        if alone and not member.away:
            self._tell_outage(False)

    def _tell_outage(self, away: bool) -> None:
        for policy in self.policies:
            policy.tell_outage(away)
