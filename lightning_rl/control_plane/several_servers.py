"""A training run at servers that run elsewhere, each with a store of its own: what the run asks of a store is asked of
them all. Often it is one, which may be started anew under the run.

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as any_done
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from lightning_rl.control_plane.attach import Attachment, PolicyToServe, attach
from lightning_rl.control_plane.run_server import JOIN_SECONDS, RunServer
from lightning_rl.control_plane.spread_rollouts import SpreadRollouts
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Resources, Reward, Rollout, RolloutDetail, RolloutRequest, RolloutTrace
from lightning_rl.store.errors import NotFound, StoreError, Unreachable
from lightning_rl.store.run_store import rank_of
from lightning_rl_adapters.ids import new_id
from lightning_rl_proxy.recording.ledger import AttemptTokens

T = TypeVar("T")

_PAUSE_SECONDS = 0.2  # between two tries at a server that does not answer
_READ_SECONDS = 1.0  # between two looks for rollouts that run again elsewhere
_log = logging.getLogger(__name__)


class SeveralServers:
    """The stores of several servers as one (a `RunStore`); usable within `attached`, from any thread.

    A request to a server that does not answer is made again until it does, or is gone. Then its rollouts that are not
    read yet are asked for at the others, and requests leave it out. Raises Unreachable when all are gone, else what the
    server raised.

    Args:
        stores: of the servers, opened by their admin keys.
        lease_seconds: after which a server that does not hear of the run gives it up; it is gone 2 s later.

    `while_waiting` is called while rollouts are waited for; it raises where that is of no use. `began_ns`: when the run
    began at the last of the servers, by its clock, since the epoch.
    """

    def __init__(self, stores: Sequence[HttpStore], *, lease_seconds: float = 15.0) -> None:
        self.while_waiting: Callable[[], None] = lambda: None
        self.began_ns = 0
        self._servers = [RunServer(store, lease_seconds) for store in stores]
        # A request to a server that hangs keeps a thread for minutes, also when it is given up here.
        self._threads = ThreadPoolExecutor(8 * len(stores), thread_name_prefix="servers of the run")
        self._lock = threading.RLock()  # of who is gone, and of what one that joins is told
        self._catching_up = threading.Lock()
        self._rollouts: SpreadRollouts[RunServer] = SpreadRollouts()
        # What one that joins is told: resources by id, the version and the pause of a model, in the order they came.
        self._updates: dict[tuple[str, str | None], Callable[[HttpStore], Any]] = {}
        self._urls_away: dict[str | None, Callable[[], Sequence[str]]] = {}  # by model, of engines
        self._attach: Callable[[RunServer, Collection[str] | None], Attachment] | None = None

    @property
    def urls(self) -> list[str]:
        """Of all servers, also of those that are gone."""
        return [server.store.url for server in self._servers]

    @contextmanager
    def attached(self, run_id: str, policy: PolicyToServe, sessions: Sequence[str] = ()) -> "Iterator[SeveralServers]":
        """The run with its engines at all servers, for as long as the block runs. Raises as `attach`."""
        self._attach = lambda server, away: attach(
            server.store, run_id, policy, lease_seconds=server.lease_seconds, sessions=sessions, away=away
        )
        try:
            for server in self._servers:
                server.attachment = self._attach(server, None)
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
        self._rollouts.ask(dict(zip(ids, named, strict=True)), self._there())
        while True:
            self._catch_up()
            if (made := self._rollouts.made(ids)) is not None:
                return made
            self.while_waiting()
            time.sleep(_PAUSE_SECONDS)

    def rollout(self, rollout_id: str) -> RolloutDetail:
        """See `RunStore`."""
        return self._at_its_server(rollout_id, functools.partial(HttpStore.rollout, rollout_id=rollout_id))

    def cancel(self, rollout_id: str) -> Rollout:
        """See `RunStore`."""
        return self._at_its_server(rollout_id, functools.partial(HttpStore.cancel, rollout_id=rollout_id))

    def wait(self, rollout_ids: Sequence[str], wait_seconds: float, gather_seconds: float = 0.01) -> list[Rollout]:
        """See `RunStore`."""
        self._catch_up()
        if not wait_seconds:
            answers = self._each_its_own(rollout_ids, functools.partial(HttpStore.wait, wait_seconds=0))
            return [rollout for server, ended in answers for rollout in self._rollouts.ended(server, ended)]
        until, ids = time.monotonic() + wait_seconds, set(rollout_ids)
        while (remaining := until - time.monotonic()) > 0:
            polls = self._polls(rollout_ids, remaining, gather_seconds)
            done, _ = any_done(polls, remaining, FIRST_COMPLETED)
            # A request that was under way may tell of others, which nobody waits for any more.
            ended = [each for poll in done for each in self._polled(polls[poll], poll) if each.rollout_id in ids]
            if ended:
                return ended
            if len(done) == len(polls):
                time.sleep(min(_PAUSE_SECONDS, remaining))  # none is there to be asked, or none answers
            self._catch_up()
        return []

    def traces(self, rollout_ids: Sequence[str]) -> dict[str, RolloutTrace]:
        """See `RunStore`. Those whose server is gone before they were read are waited for: they run again elsewhere."""
        self._find(rollout_ids)
        by_id: dict[str, RolloutTrace] = {}
        while True:
            self._catch_up()
            for server, traces in self._each_its_own(set(rollout_ids) - by_id.keys(), HttpStore.traces):
                by_id |= self._rollouts.read(server, traces)
            missing = self._rollouts.unread(rollout_ids)
            if not missing:
                return {rollout_id: by_id[rollout_id] for rollout_id in rollout_ids if rollout_id in by_id}
            self.while_waiting()
            self.wait(missing, _READ_SECONDS)

    def add_late_rewards(self, rewards_by_attempt: Mapping[tuple[str, str], Sequence[Reward]]) -> None:
        """See `RunStore`. A server that is gone with rollouts that were read is given their rewards when it is there
        again."""
        for server, ids in self._rollouts.by_server({rollout_id for rollout_id, _ in rewards_by_attempt}):
            its_own = set(ids)
            part = {place: rewards for place, rewards in rewards_by_attempt.items() if place[0] in its_own}
            if self._ask(server, functools.partial(_add_late_rewards, part)) is None:
                with self._lock:
                    server.late_rewards.update(part)

    # Resources, pauses, counts

    def publish(self, resources: Mapping[str, Mapping[str, Any]], resources_id: str | None = None) -> Resources:
        """See `RunStore`."""
        named = resources_id or new_id("s")
        publish = functools.partial(HttpStore.publish, resources=resources, resources_id=named)
        with self._lock:
            self._updates["resources", named] = publish
        return self._each(publish)[0][1]

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
            self._updates["pause", model] = pause
        return self._together(pause)

    def resume(
        self,
        model: str | None = None,
        policy_version: int | None = None,
        *,
        outdated: Callable[[], Sequence[str]] = tuple,
    ) -> dict[str, Any]:
        """See `RunStore`."""
        resume = functools.partial(HttpStore.resume, model=model, policy_version=policy_version, outdated=outdated)
        with self._lock:
            for update in [update for update in self._updates if model in (None, update[1]) and update[0] == "pause"]:
                del self._updates[update]
            if policy_version is not None:
                self._updates["version", model] = resume
                self._urls_away[model] = outdated
        return self._together(resume)

    def state(self) -> dict[str, Any]:
        """See `RunStore`: counts are added up."""
        return self._together(HttpStore.state)

    def tokens_of(self, rollout_ids: Sequence[str]) -> dict[str, AttemptTokens]:
        """See `RunStore`. Of a server that is gone nobody knows: its attempts are left out."""
        by_attempt: dict[str, AttemptTokens] = {}
        for _, counted in self._each_its_own(rollout_ids, HttpStore.tokens_of):
            by_attempt |= counted
        return by_attempt

    # Which server has what

    def _find(self, rollout_ids: Iterable[str]) -> None:
        """Where rollouts are that this session did not ask for: where they have ended, else where they were asked for
        last."""
        unknown = [rollout_id for rollout_id in rollout_ids if self._rollouts.at(rollout_id) is None]
        if not unknown:
            return
        best: dict[str, tuple[bool, float]] = {}
        for server, rollouts in self._each(functools.partial(HttpStore.find, rollout_ids=unknown)):
            for rollout in rollouts:
                rank = rank_of(rollout)
                if rank > best.get(rollout.rollout_id, (False, 0.0)):
                    best[rollout.rollout_id] = rank
                    self._rollouts.add_existing(rollout.rollout_id, server)

    def _there(self) -> list[RunServer]:
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
        """Leave out the servers that are silent: what they had and was not read is to be asked for elsewhere."""
        with self._lock:
            for server in self._servers:
                if server.gone or not server.is_silent:
                    continue
                server.gone = True
                moved = self._rollouts.move(server, self._there())
                _log.warning(
                    "the server at %s does not answer for %.0f s: %d rollouts are run again at the others",
                    server.store.url,
                    server.attachment.silent_seconds,
                    moved,
                )
        self._there()

    def _catch_up(self) -> None:
        """Look for servers that are gone or are there again, and ask for what is to be asked for."""
        self._look()
        if not self._catching_up.acquire(blocking=False):
            return  # another thread is at it
        try:
            for server in self._servers:
                if server.to_be_joined:
                    self._join(server)
                elif server.lacks_engines:
                    server.registering = self._begun(server.attachment.register_missing, self._away())
                requests = [] if server.gone else self._rollouts.to_ask(server)
                if requests:
                    self._request(server, requests)
                if server.late_rewards and not server.gone:
                    self._give_late_rewards(server)
        finally:
            self._catching_up.release()

    def _request(self, server: RunServer, requests: Sequence[RolloutRequest]) -> None:
        try:
            made = self._once(server, self._begun(server.store.enqueue, requests))
        except Unreachable as error:
            server.failed(error)  # they are asked for again, there or elsewhere
        except StoreError:
            if self._knows_the_run(server):
                raise
        else:
            server.answered()
            self._rollouts.enqueued(server, made)

    def _give_late_rewards(self, server: RunServer) -> None:
        """Those that were given while it was gone, where its store still has the rollouts."""
        missed = dict(server.late_rewards)
        try:
            self._once(server, self._begun(server.store.add_late_rewards, missed))
        except Unreachable as error:
            server.failed(error)  # they are given at the next look
            return
        except StoreError as error:
            _log.warning("the server at %s was given rewards of what it had: %s", server.store.url, error)
        with self._lock:
            for place in missed:
                del server.late_rewards[place]

    def _join(self, server: RunServer) -> None:
        """Attach the run to a server that was gone or has given it up, where that takes no longer than it may."""
        joining = self._begun(self._joined, server)
        if joining not in any_done([joining], JOIN_SECONDS).done:
            joining.add_done_callback(_detach)
            return
        try:
            attachment = joining.result()
        except Unreachable as error:
            _log.log(server.join_level, "the run is not attached to %s yet: %s", server.store.url, error)
            server.join_level = logging.INFO  # once is enough
            return
        with self._lock:
            server.attachment.close()
            server.attachment, server.gone, server.join_level = attachment, False, logging.WARNING
            here = self._rollouts.ask_again(server)
        _log.warning("the server at %s is there again; %d rollouts go on there", server.store.url, here)

    def _joined(self, server: RunServer) -> Attachment:
        """Attach the run to a server, and tell it what it missed."""
        assert self._attach is not None
        attachment = self._attach(server, self._away())
        with self._lock:
            missed = [*self._updates.values()]
        try:
            for tell in missed:
                tell(server.store)
        except BaseException:
            attachment.detach()
            raise
        return attachment

    def _away(self) -> set[str]:
        """The URLs of engines that do not have the present weights."""
        with self._lock:
            return {url for urls_away in self._urls_away.values() for url in urls_away()}

    # Requests

    def _polls(
        self, rollout_ids: Sequence[str], wait_seconds: float, gather_seconds: float
    ) -> "dict[Future[list[Rollout]], RunServer]":
        """A request for ended rollouts under way at each server that has any of them."""
        for server, ids in self._rollouts.by_server(rollout_ids):
            if not server.gone and (server.poll is None or not server.polled.issuperset(ids)):
                server.polled = set(ids)
                server.poll = self._begun(server.store.wait, ids, wait_seconds, gather_seconds)
        return {server.poll: server for server in self._servers if server.poll is not None and not server.gone}

    def _polled(self, server: RunServer, poll: "Future[list[Rollout]]") -> list[Rollout]:
        """What a request for ended rollouts found."""
        server.poll = None
        try:
            rollouts = poll.result()
        except Unreachable as error:
            server.failed(error)
            return []
        server.answered()
        return self._rollouts.ended(server, rollouts)

    def _at_its_server(self, rollout_id: str, call: Callable[[HttpStore], T]) -> T:
        self._find([rollout_id])
        while True:
            server = self._rollouts.at(rollout_id)
            if server is None:
                raise NotFound(f"none of {', '.join(self.urls)} has a rollout {rollout_id}")
            if self._rollouts.is_to_be_asked(rollout_id):  # its server was gone
                self._catch_up()
            elif (answer := self._ask(server, call)) is not None:
                return answer
            elif server is self._rollouts.at(rollout_id):
                raise Unreachable(f"rollout {rollout_id} was read from {server.store.url}, which is gone")

    def _each(self, call: Callable[[HttpStore], T]) -> list[tuple[RunServer, T]]:
        """The answers of the servers that are not gone, which are asked at once."""
        calls = [(server, call, self._begun(call, server.store)) for server in self._there()]
        return self._answers(calls) or self._each(call)  # which raises where none is left

    def _together(self, call: Callable[[HttpStore], dict[str, Any]]) -> dict[str, Any]:
        return together([state for _, state in self._each(call)])

    def _each_its_own(self, rollout_ids: Iterable[str], call: Callable[..., T]) -> list[tuple[RunServer, T]]:
        """The answers of the servers that have these rollouts, each asked about its own; not of those that are gone."""
        calls = [
            (server, functools.partial(call, rollout_ids=ids))
            for server, ids in self._rollouts.by_server(rollout_ids)
            if not server.gone
        ]
        return self._answers([(server, its, self._begun(its, server.store)) for server, its in calls])

    def _answers(
        self, calls: "Sequence[tuple[RunServer, Callable[[HttpStore], T], Future[T]]]"
    ) -> list[tuple[RunServer, T]]:
        answers = [(server, self._ask(server, call, under_way)) for server, call, under_way in calls]
        return [(server, answer) for server, answer in answers if answer is not None]

    def _ask(self, server: RunServer, call: Callable[[HttpStore], T], under_way: "Future[T] | None" = None) -> T | None:
        """A server's answer; None where it is gone. `call` may be made several times; `under_way`: the first."""
        while not server.gone:
            try:
                answer = self._once(server, under_way or self._begun(call, server.store))
            except Unreachable as error:
                server.failed(error)
            except StoreError:
                if self._knows_the_run(server):
                    raise
            else:
                server.answered()
                return answer
            under_way = None
            self._catch_up()
            time.sleep(_PAUSE_SECONDS)
        return None

    def _begun(self, call: Callable[..., T], *arguments: Any) -> "Future[T]":
        try:
            return self._threads.submit(call, *arguments)
        except RuntimeError as error:  # an engine's trouble, told when the run has ended
            raise Unreachable("the run has left its servers") from error

    def _knows_the_run(self, server: RunServer) -> bool:
        """Whether the run is attached, so that what the server refused it would refuse again."""
        try:
            return self._once(server, self._begun(server.attachment.confirm))
        except Unreachable as error:
            server.failed(error)
            return False

    def _once(self, server: RunServer, request: "Future[T]") -> T:
        """What a request brings. Raises Unreachable where its server is gone meanwhile, however long it hangs."""
        while request not in any_done([request], _PAUSE_SECONDS).done:
            self._look()
            if server.gone:
                raise Unreachable(f"{server.store.url} is gone")
        return request.result()


def _detach(joining: "Future[Attachment]") -> None:
    """Undo what took too long."""
    if not joining.cancelled() and joining.exception() is None:
        joining.result().detach()


def _add_late_rewards(rewards: Mapping[tuple[str, str], Sequence[Reward]], store: HttpStore) -> bool:
    store.add_late_rewards(rewards)
    return True


def together(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of several servers as one: counts are added up by name, flags are set where any is."""
    return functools.reduce(_added, states[1:], dict(states[0]))


# What each server says of the same engines, or of the same policy: the largest is told, not the sum.
_LARGEST = ("policy_version", "paused_seconds", "capacity", "engines", "waiting")


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
