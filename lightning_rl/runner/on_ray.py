"""Runners on the machines of a Ray cluster: actors, each of which starts runner processes where it is.

An actor is for a machine of the cluster what `lightning-rl runner` is for any other, so agents run in processes like
everywhere: they hang, crash and are killed at the cost of their own rollouts alone. The agent travels as cloudpickle
made it, the key as an argument; neither stands in an environment.

Invariant: all actors together have the slots that the run was given. Of an actor that died the attempts are lost at
once where Ray says so, else when their leases are over; another takes its slots as soon as there is room.
"""

import itertools
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from lightning_rl.agents.agent import Agent
from lightning_rl.config.schema import RayActors
from lightning_rl.errors import Explained
from lightning_rl.processes import own_ray
from lightning_rl.processes.child import ChildDied
from lightning_rl.processes.service_keys import is_loopback
from lightning_rl.runner.agent_pickle import pickled
from lightning_rl.runner.launch import payload_of, running, shares
from lightning_rl.runner.payload import Isolation, Payload
from lightning_rl.store.client import HttpStore
from lightning_rl.store.errors import StoreError

_RESTARTS = 3  # of one actor, without a rollout that ended in between
_PLACED_SECONDS = 30.0  # after which an actor without a place is warned of
_STOP_SECONDS = 20.0  # for results that are on their way
_log = logging.getLogger(__name__)


class OutOfReach(Explained, ValueError):
    """The cluster has machines that the server's URL does not lead from."""


class NoCluster(Explained, ConnectionError):
    """No cluster answers there."""


class NoRay(Explained, ImportError):
    """Ray is not installed."""


def _ray() -> Any:
    """Ray, which is loaded only where somebody asks for it. Untyped, as much of it is."""
    try:
        import ray
    except ImportError as error:
        raise NoRay("rollout.agent.ray.address asks for Ray: pip install 'lightning-rl[ray]'") from error
    return ray


class ActorReport(NamedTuple):
    """What an actor says of itself: where it is, under which names it claims, whether a rollout has ended there."""

    host: str
    log_dir: str
    worker_ids: list[str]
    finished: bool


class Host:
    """The actor: runner processes on the machine where Ray has put it. `sys_path` is the trainer's."""

    def __init__(self, name: str, payload: Payload, slots: Sequence[int]) -> None:
        extra_paths = [path for path in payload["sys_path"] if path not in sys.path]
        self._log_dir = tempfile.mkdtemp(prefix=f"lightning-rl-{name.replace(' ', '-')}-")
        self._parts = ExitStack()
        self._working = self._parts.enter_context(
            running(
                Payload(**(payload | {"sys_path": [*sys.path, *extra_paths]})),
                slots,
                log_dir=Path(self._log_dir),
                name=name,
            )
        )

    def check(self) -> ActorReport:
        """Start anew what has died here. Raises ChildDied when that is of no use."""
        ray = _ray()
        self._working.check()
        host = ray.util.get_node_ip_address()
        return ActorReport(host, self._log_dir, self._working.worker_ids, self._working.finished)

    def stop(self) -> None:
        """Give back what runs, and end the processes."""
        self._parts.close()


class _Seat:
    """One actor after another, each with the same slots."""

    def __init__(self, name: str, remote: Any, arguments: tuple[Any, ...], store: HttpStore) -> None:
        self.name = name
        self._remote = remote
        self._arguments = arguments
        self._store = store
        self._in_vain = 0
        self._sit()

    def _sit(self) -> None:
        self.actor = self._remote.remote(self.name, *self._arguments)
        self.report: ActorReport | None = None
        self._answer = self.actor.check.remote()
        self._since, self._warned = time.monotonic(), False

    def check(self) -> None:
        """Look at the actor, without waiting for it; another follows one that died. Raises ChildDied."""
        ray = _ray()
        ready, _ = ray.wait([self._answer], timeout=0)
        if not ready:
            self._warn_of_no_place()
            return
        try:
            report: ActorReport = ray.get(self._answer)
        except ray.exceptions.ActorUnavailableError:  # it may be there again
            pass
        except ray.exceptions.RayActorError as error:
            self._replace(error)
            return
        except ray.exceptions.RayTaskError as error:
            raise ChildDied(f"{self.name}, on Ray: {error.cause}") from error
        else:
            if self.report is None:
                _log.info("%s is on %s; its logs are in %s there", self.name, report.host, report.log_dir)
            self.report = report
        self._answer = self.actor.check.remote()

    def lose_claims(self) -> None:
        """Let what it ran be retried now."""
        if self.report is None:
            return
        try:
            self._store.workers_died(self.report.worker_ids)
        except StoreError as error:
            _log.warning("the rollouts of %s are retried only when their leases are over: %s", self.name, error)

    def _replace(self, error: Exception) -> None:
        self._in_vain = 0 if self.report is not None and self.report.finished else self._in_vain + 1
        if self._in_vain > _RESTARTS:
            raise ChildDied(
                f"{self.name}, on Ray, died {self._in_vain} times and no rollout ended meanwhile: {error}"
            ) from error
        where = "" if self.report is None else f" on {self.report.host}"
        _log.warning(
            "%s%s is gone; its rollouts are retried, and another actor takes its place: %s", self.name, where, error
        )
        self.lose_claims()
        self._sit()

    def _warn_of_no_place(self) -> None:
        if self.report is not None or self._warned or time.monotonic() < self._since + _PLACED_SECONDS:
            return
        ray = _ray()
        self._warned = True
        _log.warning(
            "%s waits for a place: it asks for %s, and the cluster has %s in all",
            self.name,
            self._remote.resources,
            ray.cluster_resources(),
        )


class Hosts:
    """The actors of a run."""

    def __init__(self, seats: Sequence[_Seat]) -> None:
        self._seats = seats

    def check(self) -> None:
        """Look after all of them, without waiting. Raises ChildDied when one dies again and again, or its processes."""
        for seat in self._seats:
            seat.check()

    def stop(self) -> None:
        """Let all give back what runs, and end them."""
        ray = _ray()
        answers = [seat.actor.stop.remote() for seat in self._seats if seat.report is not None]
        if answers:
            ray.wait(answers, num_returns=len(answers), timeout=_STOP_SECONDS)
        for seat in self._seats:
            ray.kill(seat.actor)
            seat.lose_claims()


class _Remote:
    """Makes actors that ask for what the configuration says, and spread over the machines where they can."""

    def __init__(self, actors: RayActors) -> None:
        ray = _ray()
        self.resources = resources_of(actors)
        self._actor = ray.remote(Host).options(
            num_cpus=actors.num_cpus,
            num_gpus=actors.num_gpus,
            resources=actors.resources or {},
            scheduling_strategy="SPREAD",
        )

    def remote(self, *arguments: Any) -> Any:
        """An actor; it waits where there is no room."""
        return self._actor.remote(*arguments)


@contextmanager
def launch(
    n_runners: int, agent: Agent, urls: Sequence[str], key: str, *, actors: RayActors, isolation: Isolation = "thread"
) -> Iterator[Hosts]:
    """Up to `n_runners` concurrent rollouts in actors, while the block runs; in processes as many as an actor has CPUs.
    Of several servers each actor takes the rollouts of one, in turn.

    A Ray that the program has connected to is used as it is; else `actors.address` says which. Raises NoRay, NoCluster,
    OutOfReach where the cluster has other machines and one of `urls` is this machine's own, and ValueError for fewer
    actors than servers.
    """
    own = actors.address == "local"
    own_ray.prepare(own=own)
    ray = _ray()
    with ExitStack() as parts:
        if not ray.is_initialized():
            try:
                ray.init(**(own_ray.OPTIONS if own else {"address": actors.address}))
            except ConnectionError as error:
                raise NoCluster(f"rollout.agent.ray.address={actors.address}: {error}") from error
            parts.callback(ray.shutdown)
        nodes = [node for node in ray.nodes() if node["Alive"]]
        stores, payloads, travelling = [], [], pickled(agent)
        for url in urls:
            check_reach(url, [node["NodeManagerAddress"] for node in nodes], here=ray.util.get_node_ip_address())
            stores.append(HttpStore(url, key, connections=1, patience_seconds=0))
            parts.callback(stores[-1].close)
            payloads.append(payload_of(travelling, url, key, isolation=isolation))
        remote = _Remote(actors)
        slots = seats(actors, n_runners, [node["Resources"] for node in nodes], servers=len(urls))
        served = itertools.cycle(zip(payloads, stores, strict=True))
        hosts = Hosts(
            [
                _Seat(f"actor {number}", remote, (payload, of_it), store)
                for number, (of_it, (payload, store)) in enumerate(zip(slots, served, strict=False))
            ]
        )
        parts.callback(hosts.stop)
        yield hosts


def resources_of(actors: RayActors) -> dict[str, float]:
    """What one actor holds, by Ray's names."""
    held = {"CPU": actors.num_cpus, "GPU": actors.num_gpus, **(actors.resources or {})}
    return {name: amount for name, amount in held.items() if amount}


def room(nodes: Sequence[Mapping[str, float]], need: Mapping[str, float]) -> int:
    """How many actors of this need there is room for, on machines with these resources when nothing else is there."""
    if not need:
        return len(nodes)
    return sum(int(min(node.get(name, 0.0) / amount for name, amount in need.items())) for node in nodes)


def seats(
    actors: RayActors, n_runners: int, nodes: Sequence[Mapping[str, float]], *, servers: int = 1
) -> list[list[int]]:
    """The slots of each process of each actor; `nodes` are the resources of the machines. Each of the servers has an
    actor, for which there may be no room yet. Raises ValueError where the configuration says otherwise."""
    if actors.num_actors is not None and actors.num_actors < servers:
        raise ValueError(
            f"rollout.agent.ray.num_actors={actors.num_actors} leaves one of {servers} servers without an actor: set "
            f"it to {servers} or more, or leave it out"
        )
    count = actors.num_actors or max(servers, room(nodes, resources_of(actors)))
    return [shares(slots, max(1, int(actors.num_cpus))) for slots in shares(n_runners, count)]


def check_reach(url: str, addresses: Sequence[str], *, here: str) -> None:
    """Raises OutOfReach where one of the machines is another one, and `url` leads nowhere from there."""
    elsewhere = sorted({address for address in addresses if address != here and not is_loopback(address)})
    if elsewhere and is_loopback(urlsplit(url).hostname or ""):
        raise OutOfReach(
            f"the Ray cluster has other machines ({', '.join(elsewhere)}), from which {url} leads nowhere: give the "
            "Trainer an address that they reach, as in Trainer(host='0.0.0.0', url='http://trainer.example:8080', "
            "port=8080)"
        )
