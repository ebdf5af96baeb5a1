"""A training run at several servers, each with a store of its own: what the run asks of a store is asked of them all.

The rollouts of a group go to one server, the one with the fewest that have not ended. A call of an agent concerns its
server alone, so it costs what it costs with one server.

Invariants: a rollout is read from one server, the one that it was given to last. Before that is another one, the first
was silent for longer than the run's lease there, so it has given the run up by itself. A server that is there again is
told everything it missed (resources, pauses, the policy version) before it is given a rollout.
"""

import functools
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as any_done
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from lightning_rl.control_plane.attach import Attachment, PolicyToServe, attach
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Resources, Reward, Rollout, RolloutDetail, RolloutRequest, RolloutTrace
from lightning_rl.store.errors import NotFound, StoreError, StoreUnwritable, Unreachable
from lightning_rl.store.life_cycle import ENDED
from lightning_rl.store.run_store import rank_of
from lightning_rl_adapters.ids import new_id
from lightning_rl_proxy.recording.ledger import AttemptTokens

T = TypeVar("T")

_LATE_SECONDS = 2.0  # after which a server has seen that a lease is over
_ANSWERS_SECONDS = 2.0  # since a server last spoke of the run: it answers, and cannot do what it is asked
_TRIES = 3  # at a server that answers otherwise
_PAUSE_SECONDS = 0.2  # between two tries at a server that does not answer
_JOIN_SECONDS = 5.0  # between two tries to join one
_READ_SECONDS = 1.0  # between two looks for rollouts that run again elsewhere
_log = logging.getLogger(__name__)


class _Server:
    """One of the servers. `gone`: its rollouts are asked for elsewhere, and it is asked nothing."""

    def __init__(self, store: HttpStore, lease_seconds: float) -> None:
        self.store = store
        self.lease_seconds = lease_seconds
        self.gone = False
        self.polled: set[str] = set()  # the rollouts of
        self.poll: Future[list[Rollout]] | None = None  # the request for ended ones that is under way
        self.left: list[str] = []  # rollouts that were asked for elsewhere when it was gone
        self._joined_at = -_JOIN_SECONDS  # or tried
        self._failures = 0
        self._attachment: Attachment | None = None

    @property
    def attachment(self) -> Attachment:
        if self._attachment is None:
            raise RuntimeError(f"the run is not attached to {self.store.url} yet: enter `attached` first")
        return self._attachment

    @attachment.setter
    def attachment(self, attachment: Attachment) -> None:
        self._attachment = attachment

    @property
    def is_silent(self) -> bool:
        """Whether it has given the run up by now, if it is there at all."""
        return self.attachment.silent_seconds > self.lease_seconds + _LATE_SECONDS

    @property
    def to_be_joined(self) -> bool:
        """Whether it has given the run up, or is there after it was gone; said every few seconds."""
        back = self.attachment.given_up or (self.gone and not self.is_silent)
        if not back or time.monotonic() - self._joined_at < _JOIN_SECONDS:
            return False
        self._joined_at = time.monotonic()
        return True

    def answered(self) -> None:
        """It has done what it was asked."""
        self._failures = 0

    def failed(self, error: Unreachable) -> None:
        """It did not answer, which may pass. Raises `error` where it will not: the server is there otherwise."""
        _log.info("%s: %s", self.store.url, error)
        self._failures = self._failures + 1 if self.attachment.silent_seconds < _ANSWERS_SECONDS else 0
        if self._failures >= _TRIES or isinstance(error, StoreUnwritable):
            raise error

    def detach(self) -> None:
        if self._attachment is not None:
            self._attachment.close() if self.gone else self._attachment.detach()


class SeveralServers:
    """The stores of several servers as one (a `RunStore`); usable within `attached`, from any thread.

    A request to a server that does not answer is made again until it does, or is gone. Then its
    rollouts that are not read yet are asked for at the others, and requests leave it out. Raises Unreachable when all
    are gone, else what the server raised.

    Args:
        stores: of the servers, opened by their admin keys.
        lease_seconds: after which a server that does not hear of the run gives it up; it is gone 2 s later.

    `while_waiting` is called while rollouts are waited for; it raises where that is of no use. `began_ns`: when the run
    began at the last of the servers, by its clock, since the epoch.
    """

    def __init__(self, stores: Sequence[HttpStore], *, lease_seconds: float = 15.0) -> None:
        self.while_waiting: Callable[[], None] = lambda: None
        self.began_ns = 0
        self._servers = [_Server(store, lease_seconds) for store in stores]
        # A request to a server that hangs keeps a thread for a minute; three kinds may be under way at once.
        self._threads = ThreadPoolExecutor(4 * len(stores), thread_name_prefix="servers of the run")
        self._lock = threading.RLock()  # of what follows
        self._at: dict[str, _Server] = {}  # by rollout id
        self._open: dict[str, RolloutRequest] = {}  # and not read yet
        self._waited_for: set[str] = set()  # and not known to have ended
        self._to_ask: dict[str, Rollout | None] = {}  # ids to be asked for; the rollout, once it was
        self._published: dict[str, Mapping[str, Mapping[str, Any]]] = {}  # by id, in order
        self._pauses: dict[str | None, Callable[[HttpStore], Any]] = {}  # of models that are paused
        self._versions: dict[str | None, int] = {}  # of the policies
        self._join: Callable[[_Server], Attachment] | None = None

    @property
    def urls(self) -> list[str]:
        """Of all servers, also of those that are gone."""
        return [server.store.url for server in self._servers]

    @contextmanager
    def attached(self, run_id: str, policy: PolicyToServe) -> "Iterator[SeveralServers]":
        """The run with its engines at all servers, for as long as the block runs. Raises as `attach`."""
        self._join = lambda server: attach(server.store, run_id, policy, lease_seconds=server.lease_seconds)
        try:
            for server in self._servers:
                server.attachment = self._join(server)
            self.began_ns = max(server.attachment.began_ns for server in self._servers)
            yield self
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)
            for server in self._servers:
                server.detach()

    def check(self) -> None:
        """Raises Unreachable where no server is left."""
        self._there()

    # Rollouts

    def enqueue(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """See `RunStore`. Those that an earlier session of the run asked for stay where they are."""
        named = [msgspec.structs.replace(request, rollout_id=request.rollout_id or new_id("r")) for request in requests]
        ids = [str(request.rollout_id) for request in named]
        self._find(ids)
        with self._lock:
            self._open |= dict(zip(ids, named, strict=True))
            self._waited_for.update(ids)
            self._place([request for request in named if not self._has_server(str(request.rollout_id))])
            self._to_ask |= dict.fromkeys(ids)
        while True:
            self._look()
            with self._lock:
                made = {rollout_id: self._to_ask[rollout_id] for rollout_id in ids}
                if None not in made.values():
                    for rollout_id in made:
                        del self._to_ask[rollout_id]
                    return [rollout for rollout in map(made.get, ids) if rollout is not None]
            self.while_waiting()
            time.sleep(_PAUSE_SECONDS)

    def rollout(self, rollout_id: str) -> RolloutDetail:
        """See `RunStore`."""
        self._find([rollout_id])
        return self._at_its_server(rollout_id, lambda store: store.rollout(rollout_id))

    def cancel(self, rollout_id: str) -> Rollout:
        """See `RunStore`."""
        self._find([rollout_id])
        return self._at_its_server(rollout_id, lambda store: store.cancel(rollout_id))

    def wait(self, rollout_ids: Sequence[str], wait_seconds: float) -> list[Rollout]:
        """See `RunStore`."""
        if not wait_seconds:
            self._look()
            told = self._each_its_own(rollout_ids, functools.partial(HttpStore.wait, wait_seconds=0))
            return self._ended([rollout for _, answer in told for rollout in answer])
        until, asked = time.monotonic() + wait_seconds, set(rollout_ids)
        while (left := until - time.monotonic()) > 0:
            self._look()
            polls = self._polls(rollout_ids, left)
            done, _ = any_done(polls, left, FIRST_COMPLETED)
            # A request that was under way may tell of others, which nobody waits for any more.
            ended = [each for poll in done for each in self._polled(polls[poll], poll) if each.rollout_id in asked]
            if ended:
                return self._ended(ended)
            if len(done) == len(polls):
                time.sleep(min(_PAUSE_SECONDS, left))  # none is there to be asked, or none answers
        return []

    def traces(self, rollout_ids: Sequence[str]) -> dict[str, RolloutTrace]:
        """See `RunStore`. Those whose server is gone before they were read are waited for: they run again elsewhere."""
        self._find(rollout_ids)
        found: dict[str, RolloutTrace] = {}
        while True:
            self._look()
            for server, read in self._each_its_own(set(rollout_ids) - found.keys(), HttpStore.traces):
                found |= self._take(server, read)
            missing = [rollout_id for rollout_id in rollout_ids if rollout_id in self._open]
            if not missing:
                return {rollout_id: found[rollout_id] for rollout_id in rollout_ids if rollout_id in found}
            self.while_waiting()
            self.wait(missing, _READ_SECONDS)

    def add_late_rewards(self, given: Mapping[tuple[str, str], Sequence[Reward]]) -> None:
        """See `RunStore`. Raises Unreachable where the server that has the records is gone: a run that is resumed has
        these rollouts run again."""
        for server, ids in self._by_server(rollout_id for rollout_id, _ in given):
            its_own = set(ids)
            part = {place: rewards for place, rewards in given.items() if place[0] in its_own}
            if self._ask(server, functools.partial(_add_late_rewards, part)) is None:
                raise Unreachable(
                    f"the server at {server.store.url} is gone with {len(part)} rollouts that were read and are given "
                    "rewards now: resume the run (trainer.resume_mode=auto), which has them run again elsewhere"
                )

    # Resources, pauses, counts

    def publish(self, resources: Mapping[str, Mapping[str, Any]], resources_id: str | None = None) -> Resources:
        """See `RunStore`."""
        named = resources_id or new_id("s")
        with self._lock:
            self._published[named] = resources
        return self._each(lambda store: store.publish(resources, named))[0]

    def pause(
        self,
        model: str | None = None,
        *,
        mode: str = "drain",
        deadline_seconds: float = 30,
        lease_seconds: float | None = None,
    ) -> dict[str, Any]:
        """See `RunStore`."""
        pause = functools.partial(
            HttpStore.pause, model=model, mode=mode, deadline_seconds=deadline_seconds, lease_seconds=lease_seconds
        )
        with self._lock:
            self._pauses[model] = pause
        return together(self._each(pause))

    def resume(self, model: str | None = None, policy_version: int | None = None) -> dict[str, Any]:
        """See `RunStore`."""
        with self._lock:
            self._pauses.pop(model, None)
            if policy_version is not None:
                self._versions[model] = policy_version
        return together(self._each(lambda store: store.resume(model, policy_version)))

    def state(self) -> dict[str, Any]:
        """See `RunStore`: counts are added up."""
        return together(self._each(lambda store: store.state()))

    def tokens_of(self, rollout_ids: Sequence[str]) -> dict[str, AttemptTokens]:
        """See `RunStore`. Of a server that is gone nobody knows: its attempts are left out."""
        found: dict[str, AttemptTokens] = {}
        for _, counted in self._each_its_own(rollout_ids, HttpStore.tokens_of):
            found |= counted
        return found

    # Which server has what

    def _find(self, rollout_ids: Iterable[str]) -> None:
        """Where rollouts are that this session did not ask for: where they have ended, else where they were asked for
        last."""
        with self._lock:
            unknown = [rollout_id for rollout_id in rollout_ids if rollout_id not in self._at]
        if not unknown:
            return
        best: dict[str, tuple[bool, float]] = {}
        for server in self._there():
            for rollout in self._ask(server, functools.partial(HttpStore.find, rollout_ids=unknown)) or ():
                rank = rank_of(rollout)
                if rank > best.get(rollout.rollout_id, (False, 0.0)):
                    best[rollout.rollout_id] = rank
                    with self._lock:
                        self._at[rollout.rollout_id] = server

    def _has_server(self, rollout_id: str) -> bool:
        server = self._at.get(rollout_id)
        return server is not None and not server.gone

    def _place(self, requests: Sequence[RolloutRequest]) -> None:
        """Choose a server for each group of rollouts: the one with the fewest that have not ended."""
        load = Counter(self._at[rollout_id].store.url for rollout_id in self._waited_for if rollout_id in self._at)
        servers, chosen = self._there(), dict[str, _Server]()
        for request in requests:
            group = str(request.group_id or request.rollout_id)
            if group not in chosen:
                chosen[group] = min(servers, key=lambda server: load[server.store.url])
            self._at[str(request.rollout_id)] = chosen[group]
            load[chosen[group].store.url] += 1

    def _by_server(self, rollout_ids: Iterable[str]) -> list[tuple[_Server, list[str]]]:
        """Rollouts by the server that has them; without those that none has."""
        found: defaultdict[int, list[str]] = defaultdict(list)
        with self._lock:
            for rollout_id in sorted(rollout_ids):
                if (server := self._at.get(rollout_id)) is not None:
                    found[self._servers.index(server)].append(rollout_id)
        return [(self._servers[number], ids) for number, ids in sorted(found.items())]

    def _there(self) -> list[_Server]:
        """The servers that are not gone. Raises Unreachable where there is none."""
        with self._lock:
            there = [server for server in self._servers if not server.gone]
        if not there:
            raise Unreachable(
                f"none of the run's servers answers ({', '.join(self.urls)}): start them again, and resume the run "
                "(trainer.resume_mode=auto)"
            )
        return there

    # Servers that go and come

    def _look(self) -> None:
        """Leave out the servers that are silent, join those that answer again, and ask for what is to be asked for."""
        with self._lock:
            for server in self._servers:
                if server.to_be_joined:
                    self._join_again(server)
                if not server.gone and server.is_silent:
                    self._leave_out(server)
            self._there()
            asked = [rollout_id for rollout_id, made in self._to_ask.items() if made is None]
            for server, ids in self._by_server(asked):
                if not server.gone:
                    self._request(server, ids)

    def _request(self, server: _Server, ids: Sequence[str]) -> None:
        try:
            made = server.store.enqueue([self._open[rollout_id] for rollout_id in ids])
        except Unreachable as error:
            server.failed(error)  # they are asked for again, there or elsewhere
            return
        server.answered()
        self._to_ask |= {rollout.rollout_id: rollout for rollout in made}

    def _leave_out(self, server: _Server) -> None:
        """A server is gone: what it had and was not read is asked for elsewhere."""
        server.gone = True
        moved = [request for rollout_id, request in self._open.items() if self._at[rollout_id] is server]
        _log.warning(
            "the server at %s does not answer for %.0f s: %d rollouts are run again at the others",
            server.store.url,
            server.attachment.silent_seconds,
            len(moved),
        )
        server.left += [str(request.rollout_id) for request in moved]
        if any(not each.gone for each in self._servers):
            self._place(moved)
        self._ask_again(moved)

    def _join_again(self, server: _Server) -> None:
        """Attach the run to a server that was gone or has given it up, and tell it what it missed."""
        assert self._join is not None
        try:
            attachment = self._join(server)
        except Unreachable:
            return
        try:
            for resources_id, resources in self._published.items():
                server.store.publish(resources, resources_id)
            for model, version in self._versions.items():
                server.store.resume(model, version)
            for pause in self._pauses.values():
                pause(server.store)
            for rollout_id in server.left:
                server.store.cancel(rollout_id)
        except StoreError as error:
            attachment.detach()
            if not isinstance(error, Unreachable):
                raise
            return
        server.attachment.close()
        server.attachment, server.gone = attachment, False
        server.left.clear()
        here = [request for rollout_id, request in self._open.items() if self._at[rollout_id] is server]
        _log.warning("the server at %s is there again; %d rollouts go on there", server.store.url, len(here))
        self._ask_again(here)

    def _ask_again(self, requests: Iterable[RolloutRequest]) -> None:
        for request in requests:
            self._to_ask[str(request.rollout_id)] = None
            self._waited_for.add(str(request.rollout_id))

    # Requests

    def _polls(self, rollout_ids: Sequence[str], wait_seconds: float) -> "dict[Future[list[Rollout]], _Server]":
        """A request for ended rollouts under way at each server that has any of them."""
        for server, ids in self._by_server(rollout_ids):
            if not server.gone and (server.poll is None or not server.polled.issuperset(ids)):
                server.polled = set(ids)
                server.poll = self._threads.submit(server.store.wait, ids, wait_seconds)
        return {server.poll: server for server in self._servers if server.poll is not None and not server.gone}

    def _polled(self, server: _Server, poll: "Future[list[Rollout]]") -> list[Rollout]:
        """What a request for ended rollouts found, of those that are still this server's."""
        server.poll = None
        try:
            found = poll.result()
        except Unreachable as error:
            server.failed(error)
            return []
        server.answered()
        with self._lock:
            return [rollout for rollout in found if self._at.get(rollout.rollout_id) is server]

    def _take(self, server: _Server, traces: Mapping[str, RolloutTrace]) -> dict[str, RolloutTrace]:
        """Those that have ended, and are still this server's: they are read, and stay where they are."""
        with self._lock:
            read = {
                rollout_id: trace
                for rollout_id, trace in traces.items()
                if trace.rollout.status in ENDED and self._at[rollout_id] is server and not server.gone
            }
            for rollout_id in read:
                self._open.pop(rollout_id, None)
                self._waited_for.discard(rollout_id)
                self._to_ask.pop(rollout_id, None)
        return read

    def _ended(self, rollouts: list[Rollout]) -> list[Rollout]:
        with self._lock:
            self._waited_for.difference_update(rollout.rollout_id for rollout in rollouts)
        return rollouts

    def _at_its_server(self, rollout_id: str, call: Callable[[HttpStore], T]) -> T:
        while True:
            with self._lock:
                server = self._at.get(rollout_id)
                under_way = self._to_ask.get(rollout_id, ...) is None
            if server is None:
                raise NotFound(f"none of {', '.join(self.urls)} has a rollout {rollout_id}")
            if under_way:  # its server was gone, and the other has not been asked for it yet
                self._look()
            elif (answer := self._ask(server, call)) is not None:
                return answer
            elif server is self._at[rollout_id]:
                raise Unreachable(f"rollout {rollout_id} was read from {server.store.url}, which is gone")

    def _each(self, call: Callable[[HttpStore], T]) -> list[T]:
        """The answers of all servers that are not gone, asked at once."""
        answers = list(self._threads.map(lambda server: self._ask(server, call), self._there()))
        found = [answer for answer in answers if answer is not None]
        return found or self._each(call)  # which raises where none is left

    def _each_its_own(self, rollout_ids: Iterable[str], call: Callable[..., T]) -> list[tuple[_Server, T]]:
        """What the servers that have these rollouts answer, each asked about its own; not those that are gone."""
        asked = [
            (server, self._threads.submit(self._ask, server, functools.partial(call, rollout_ids=ids)))
            for server, ids in self._by_server(rollout_ids)
        ]
        answers = [(server, future.result()) for server, future in asked]
        return [(server, answer) for server, answer in answers if answer is not None]

    def _knows_the_run(self, server: _Server) -> bool:
        """Whether the run is attached, so that what the server refused it would refuse again."""
        try:
            return server.attachment.confirm()
        except Unreachable as error:
            server.failed(error)
            return False

    def _ask(self, server: _Server, call: Callable[[HttpStore], T]) -> T | None:
        """A server's answer; None where it is gone. `call` may be made several times."""
        while not server.gone:
            try:
                answer = call(server.store)
            except Unreachable as error:
                server.failed(error)
            except StoreError:
                if self._knows_the_run(server):
                    raise
            else:
                server.answered()
                return answer
            self._look()
            time.sleep(_PAUSE_SECONDS)
        return None


def _add_late_rewards(given: Mapping[tuple[str, str], Sequence[Reward]], store: HttpStore) -> bool:
    store.add_late_rewards(given)
    return True


def together(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of several servers as one: counts are added up by name, flags are set where any is."""
    return functools.reduce(_added, states[1:], dict(states[0]))


_LARGEST = ("policy_version", "paused_seconds", "capacity")  # of the servers these are the same, or their largest


def _added(one: Any, other: Any, name: str = "") -> Any:
    if one is None or other is None:
        return one if other is None else other
    if isinstance(one, Mapping):
        return dict(one) | {key: _added(one.get(key), value, key) for key, value in other.items()}
    if isinstance(one, bool):
        return one or other
    if isinstance(one, int | float):
        return max(one, other) if name in _LARGEST else one + other
    return one
