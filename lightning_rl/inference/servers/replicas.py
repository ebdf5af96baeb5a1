"""The servers of a run, ours or others': one policy is sampled by them, or several whose adapters they have.

Invariant: a server that was started again, by us or (where it is not ours) by others, takes calls only when it has the
present weights of every policy.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from lightning_rl.inference.servers.errors import ServerEnded, ServerRefused, Unreached, WeightsRefused

_RESTARTS = 3  # of one server; what ends it more often will not go away by itself
WATCH_SECONDS = 0.5  # an agent's call that failed comes again after a second, and must find the others waiting
_MISSED_SECONDS = 2.0  # so long an update still tries a server that was missed: one look may fail of one that is well
_AWAY_SECONDS = 600.0  # that it may take to come back: the start of a server with a large model takes minutes
_HANGS_SECONDS = 2.0  # so long the end of a run waits for a look at a server that is not ours
_REFUSED_SECONDS = 10.0  # between two tries to give weights to a server that refused them
_log = logging.getLogger(__name__)


class AnyControl(Protocol):
    """What is asked of a server over HTTP; `engine` is the name of its program."""

    engine: str
    url: str

    def close(self) -> None: ...


C = TypeVar("C", bound=AnyControl)
Asked = TypeVar("Asked", bound=AnyControl, contravariant=True)


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


class Member(Generic[C]):
    """A server, ours or (`server` None) somebody else's; one that is `away` has ended, or not taken its weights yet.

    `unfinished`: it did not answer while it was given weights, so what it says of them is not to be believed.
    `refused`: it is not ours, and did not take them. `given` counts the times that it took weights. `silent_since` is
    when one that is not ours first did not answer, or refused, by `time.monotonic`; None: it answers.
    """

    def __init__(self, control: C, server: OwnServer | None = None) -> None:
        self.server = server
        self.control = control
        self.away = False
        self.unfinished = False
        self.refused = False
        self.given = 0
        self.restarts = 0
        self.silent_since: float | None = None

    def __str__(self) -> str:
        return f"{self.control.engine} at {self.control.url}"


class SampledPolicy(Protocol[Asked]):
    """A policy that is sampled by the servers."""

    def has_weights(self, control: Asked) -> bool:
        """Whether a server has what it was given last. Raises Unreached or ServerRefused."""
        ...

    def renew(self, control: Asked) -> bool:
        """Give a server that was started again the present weights, under `Replicas.lock`. False where they are in
        training: it is asked again, until the next update is there. Raises WeightsRefused or Unreached."""
        ...

    def tell_outage(self, away: bool) -> None:
        """No server is left that could answer, which may be told several times; or (False) one is back."""
        ...


class Replicas(Generic[C]):
    """`members` from `start` to `close`, which all `policies` call. `lock` is held by who gives them weights."""

    def __init__(self, members: Sequence[Member[C]]) -> None:
        self.members = members
        self.policies: list[SampledPolicy[C]] = []
        self.lock = threading.Lock()  # of the present weights, and of who has them
        self.over = threading.Event()
        self._failed: Exception | None = None
        self._telling = threading.Lock()  # of whether there is an outage
        self._outage = False
        self._watchers = [  # one that hangs keeps no other from being looked at
            threading.Thread(target=self._watch, args=[member], name=f"watcher of {member.control.url}", daemon=True)
            for member in members
        ]

    def start(self) -> None:
        """Start the servers that are ours, which want weights then; once. Raises what their `wait` does."""
        if any(watcher.ident is not None for watcher in self._watchers):
            return
        own = self._own()
        for server in own:
            server.start()
        for server in own:
            server.wait()
        for watcher in self._watchers:
            watcher.start()

    def check(self) -> None:
        """Raise what ended a server for good, when something has."""
        if self._failed is not None:
            raise self._failed

    def urls_away(self) -> list[str]:
        """Of the servers that have ended, or not taken the present weights yet."""
        return [member.control.url for member in self.members if member.away]

    def order_all(self, order: Callable[[C], None], forget: Callable[[C], None]) -> None:
        """`order` all at once. Raises WeightsRefused as soon as one refuses."""
        with ThreadPoolExecutor(len(self.members)) as pool:
            ordered = [pool.submit(self.order, member, order, forget) for member in self.members]
            for each in as_completed(ordered):
                each.result()

    def order(self, member: Member[C], order: Callable[[C], None], forget: Callable[[C], None]) -> None:
        """Have a server do something. One that is away, if it was not missed just now, or does not answer, is the
        watcher's.

        One that is not ours may have been started anew, which nobody may have noticed: where it refuses, it is told
        once more, after `forget` of what it was told before. Raises WeightsRefused.
        """
        if member.away and not self._was_just_missed(member):
            return
        try:
            try:
                order(member.control)
            except WeightsRefused:
                if member.server is not None:
                    raise
                forget(member.control)
                order(member.control)
            member.given += 1
            if member.away:
                with suppress(ServerRefused):  # which the watcher finds, too
                    member.away = not self._has_weights(member)
        except Unreached as error:
            member.away = member.unfinished = True
            if member.server is not None:
                member.server.stop()
            else:
                _log.warning("%s; it is given the present weights when it does", error)

    def _was_just_missed(self, member: Member[C]) -> bool:
        since = member.silent_since
        return not member.unfinished and since is not None and time.monotonic() - since < _MISSED_SECONDS

    def updated(self, *, first: bool) -> None:
        """Servers were given weights: returns when at least one has them, so that calls need not wait any longer.

        Raises Unreached where it was the `first` time and one that is not ours did not take them; and as `check`.
        """
        if first and (missing := [str(member) for member in self.members if member.away and member.server is None]):
            raise Unreached(f"{', '.join(missing)} does not answer: when a run begins, all must")
        while all(member.away for member in self.members):
            self.check()
            self.over.wait(WATCH_SECONDS)
        self._tell_outage()

    def close(self) -> None:
        """Stop the servers that are ours."""
        self.over.set()
        own = self._own()
        for server in own:  # all at once
            server.ask_to_stop()
        for server in own:
            server.stop()
        until = time.monotonic() + _HANGS_SECONDS
        for watcher, member in zip(self._watchers, self.members, strict=True):
            if watcher.is_alive():
                watcher.join(None if member.server is not None else max(until - time.monotonic(), 0.0))
        for server in own:  # one may have been started again in between
            server.stop()
        for member in self.members:
            member.control.close()

    def _own(self) -> list[OwnServer]:
        return [member.server for member in self.members if member.server is not None]

    # The watchers' threads.

    def _watch(self, member: Member[C]) -> None:
        """Start a server again that has ended, or see that somebody else did; what prevents that, whatever it is, is
        for `check` to raise."""
        while not self.over.wait(WATCH_SECONDS):
            try:
                if member.server is None:
                    self._look_at(member)
                else:
                    self._keep_running(member, member.server)
                self._tell_outage()
            except Exception as error:  # noqa: BLE001  # a full disk, say
                if not self.over.is_set():
                    self._failed = error
                return

    def _look_at(self, member: Member[C]) -> None:
        """Ask a server that is not ours whether it has the present weights; one that was started anew is given them."""
        given, renewing = member.given, False
        try:
            ready = self._has_weights(member)  # asked without the lock: it may not answer for long
            if member.away or not ready:
                with self.lock:  # which an update may have held that gave them, or did not
                    if self.over.is_set():
                        return
                    if not self._has_weights(member):
                        self._lose(member)
                        renewing = True
                        if not self._renew(member):
                            member.silent_since = None
                            return
                        _log.warning("%s has the present weights", member)
                    elif member.away:
                        _log.warning("%s answers again", member)
                    member.away = member.refused = False
        except WeightsRefused as error:
            member.refused, member.silent_since = True, member.silent_since or time.monotonic()
            if all(each.refused for each in self.members):
                raise
            _log.warning("%s takes no calls, and is given the present weights again: %s", member, error)
            self.over.wait(_REFUSED_SECONDS)
        except (Unreached, ServerRefused) as error:
            if member.given != given:  # it has taken weights meanwhile
                return
            now, member.refused = time.monotonic(), False
            member.silent_since = member.silent_since or now
            if all(each.away and now - (each.silent_since or now) > _AWAY_SECONDS for each in self.members):
                raise _gone(error) from error
            if renewing:
                _log.warning("%s has not taken the present weights, and is given them again: %s", member, error)
            elif not member.away:
                _log.warning(
                    "%s; it is waited for, up to %.0f s, and then given the present weights", error, _AWAY_SECONDS
                )
            self._lose(member)
        else:
            member.silent_since = None

    def _has_weights(self, member: Member[C]) -> bool:
        return all(policy.has_weights(member.control) for policy in self.policies) and not member.unfinished

    def _renew(self, member: Member[C]) -> bool:
        member.unfinished = True
        given = [policy.renew(member.control) for policy in self.policies]
        member.unfinished = not all(given)
        return all(given)

    def _lose(self, member: Member[C]) -> None:
        """A server is away: calls wait, where no other one is left."""
        member.away = True
        self._tell_outage()

    def _keep_running(self, member: Member[C], server: OwnServer) -> None:
        if not server.runs:
            self._start_again(member, server)
        if member.away and not self.over.is_set():
            with self.lock:  # an update meanwhile is not missed
                try:
                    member.away = not self._renew(member)
                except Unreached:
                    server.stop()

    def _start_again(self, member: Member[C], server: OwnServer) -> None:
        why, member.restarts = server.why(), member.restarts + 1
        if member.restarts > _RESTARTS:
            raise ServerEnded(f"it ended {member.restarts} times; the last time: {why}")
        _log.warning("%s\nit is started again (%d of %d times)", why, member.restarts, _RESTARTS)
        self._lose(member)
        if not self.over.is_set():
            server.start()
            server.wait()

    def _tell_outage(self) -> None:
        """Tell whether all servers are away: that they are as often as it is seen, that one is back once."""
        with self._telling:
            if self.over.is_set():
                return
            former, self._outage = self._outage, all(member.away for member in self.members)
            if self._outage or former:
                for policy in self.policies:
                    policy.tell_outage(self._outage)


def _gone(error: Exception) -> Unreached:
    return Unreached(
        f"{error}; it was waited for, {_AWAY_SECONDS:.0f} s: start the server again, and then resume the run"
    )
