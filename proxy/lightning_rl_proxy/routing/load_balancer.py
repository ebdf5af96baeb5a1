"""The engines of one model side by side: which is well, whose weights are current, and which one takes a call.

Pure state, no IO. The invariant: a replica takes calls only while nothing says that its weights are older than the
model's. Whoever speaks for an engine's weights (a registration, a resume) is believed, until the engine says otherwise
than it did then: it was started anew, or given others.
"""

import asyncio
import time
from collections.abc import Collection
from typing import Generic, NamedTuple, Protocol, TypeVar

from lightning_rl_proxy.engines.base import Load

_SLACK = 8  # calls; among so few, one more hardly slows down an engine that decodes them in one batch
_STRIKES = 2  # failed checks in a row until an engine that was well is away: a busy one may be late once


class _Versioned(Protocol):
    policy_version: int


T = TypeVar("T")
V = TypeVar("V", bound=_Versioned)


class ModelLoad(NamedTuple):
    """How busy a model is: its engines that are well, and the calls that were asked for and have not ended.

    `waiting` is what its engines say of their queues, `capacity` how many calls they bear at once; None where one of
    them leaves it open.
    """

    engines: int
    calls: int
    waiting: int
    capacity: int | None


class Replica(Generic[T]):
    """One engine (or chat backend) of a model. `name` is never given again.

    `trouble` is why it does not answer, from `silent_since` (monotonic) on, `reported` the version of its weights that
    it reported when they were last believed to be known, `absent` whether it did not answer at some time since the last
    pause began. `epoch` counts the times that somebody spoke for its weights. `load` is what it said last of its queue,
    `borne` how many calls it was seen to bear; None while it bore them all. `without_token` ends the wait of calls that
    have no token yet.
    """

    def __init__(self, name: str, engine: T) -> None:
        self.name = name
        self.engine = engine
        self.in_flight = 0
        self.without_token: set[asyncio.Timeout] = set()
        self.used = 0
        self.trouble: str | None = None
        self.silent_since = 0.0
        self.strikes = 0
        self.reported: int | None = None
        self.epoch = 0
        self.absent = False
        self.frozen = False
        self.load: Load | None = None
        self.borne: int | None = None

    @property
    def capacity(self) -> int | None:
        """How many calls it bears at once, by what it says or was seen to bear; None: nobody knows."""
        limits = (self.borne, None if self.load is None else self.load.capacity)
        return min((calls for calls in limits if calls is not None), default=None)

    def hear_load(self, load: Load | None) -> None:
        """It said how busy it is; None: it does not say.

        What it says is old soon, so a queue is not kept as a queue, but as what it tells of the engine: that it bears
        only those that do not wait (its memory may be full long before its batch is). While nothing waits it is tried
        with more, an eighth each time.
        """
        self.load = load
        if load is None:
            self.borne = None
        elif load.waiting and self.in_flight:
            self.borne = max(1, self.in_flight - load.waiting)
        elif self.borne is not None:
            more = max(self.borne, self.in_flight)
            more += 1 + more // 8
            self.borne = None if load.capacity is not None and more >= load.capacity else more

    def lose(self, why: str) -> None:
        """It does not answer."""
        if self.trouble is None:
            self.silent_since = time.monotonic()
        self.trouble, self.absent = why, True

    def strike(self, why: str) -> None:
        """A check failed; the second in a row counts."""
        self.strikes += 1
        if self.trouble is not None or self.strikes >= _STRIKES:
            self.lose(why)

    def answer(self) -> None:
        """It answers."""
        self.trouble, self.strikes = None, 0


class Pool(Generic[T]):
    """The replicas of one model; calls that begin something new go round among equals."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.replicas: list[Replica[T]] = []
        self._calls = 0

    def add(self, engine: T, name: str) -> str:
        """One more; its name."""
        self.replicas.append(Replica(name, engine))
        return name

    def find(self, name: str) -> Replica[T]:
        """The one of that name. Raises KeyError."""
        for replica in self.replicas:
            if replica.name == name:
                return replica
        raise KeyError(
            f"model {self.model!r} has no engine {name!r}; there are {[each.name for each in self.replicas]}"
        )

    @property
    def in_flight(self) -> int:
        """The calls that are worked on."""
        return sum(replica.in_flight for replica in self.replicas)

    def take(self, able: Collection[Replica[T]], home: T | None = None) -> Replica[T]:
        """The replica that takes a call, of those that are `able` to (one at least); the call counts from now on."""
        chosen = choose(able, home)
        self._calls += 1
        chosen.used = self._calls
        chosen.in_flight += 1
        return chosen


class EnginePool(Pool[V]):
    """The token engines of a model. `version` is the policy version that every one that takes calls has."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.version = 0

    def add(self, engine: V, name: str) -> str:
        """One more; the first one's version is the model's, and so is a higher one."""
        self.version = max(self.version, engine.policy_version) if self.replicas else engine.policy_version
        return super().add(engine, name)

    def outdated(self, replica: Replica[V]) -> bool:
        """Whether its weights are older than the model's."""
        return replica.engine.policy_version < self.version

    def away(self, replica: Replica[V]) -> str | None:
        """Why it takes no calls; None where it does."""
        if replica.trouble is not None:
            return replica.trouble
        if self.outdated(replica):
            return (
                f"engine {replica.name} has weights of policy version {replica.engine.policy_version}, not "
                f"{self.version}; when it has them, register it again with that version (POST /api/v1/engines)"
            )
        return None

    def well(self) -> list[Replica[V]]:
        """Those that take calls."""
        return [replica for replica in self.replicas if self.away(replica) is None]

    def worth_a_try(self) -> list[Replica[V]]:
        """Those that seemed not to answer, but have the current weights if they do."""
        return [replica for replica in self.replicas if replica.trouble is not None and not self.outdated(replica)]

    def busy(self, calls: int) -> ModelLoad:
        """How busy it is with so many calls; where no engine is well, they are taken as they were."""
        well = self.well()
        each = [replica.capacity for replica in well or self.replicas]
        capacities = [capacity for capacity in each if capacity is not None]
        waiting = sum(replica.load.waiting for replica in well if replica.load is not None)
        return ModelLoad(
            len(well), calls, waiting, sum(capacities) if capacities and len(capacities) == len(each) else None
        )

    def restarted(self, replica: Replica[V], reported: int | None) -> bool:
        """Whether it says older weights than it should have, and others than it was known by."""
        return reported is not None and replica.reported not in (None, reported) and reported < self.version

    def fingerprint_of(self, replica: Replica[V], reported: int | None) -> None:
        """It answered a check, with what it says of its weights: that counts where it changes, and where it is newer
        than what is believed, as of one that was given weights during a pause in which it was away."""
        replica.answer()
        if reported is None:
            return
        believed = replica.engine.policy_version
        if replica.reported is not None and (reported != replica.reported or reported > believed):
            replica.engine.policy_version = min(reported, self.version)
        replica.reported = reported

    def confirm_weights(self, replica: Replica[V], version: int, reported: int | None) -> None:
        """Somebody says that it has the weights of `version`; what it says itself, being told so, may contradict."""
        replica.epoch += 1
        replica.reported = reported
        replica.engine.policy_version = version if reported is None else min(version, reported)


def choose(able: Collection[Replica[T]], home: T | None = None) -> Replica[T]:
    """The least busy, of equal ones the one that was chosen the longest ago; `home`, unless it is clearly busier.

    `home` holds a conversation's KV cache: elsewhere the whole conversation is read again, which costs about as much as
    sampling hundreds of tokens. So it is left only where it has more than twice the calls of the least busy one, and
    then some: a twice as large batch makes each of its tokens less than twice as slow, and small ones are nearly free.
    """
    least = min(able, key=_activity)
    if home is not None:
        for replica in able:
            if replica.engine is home:
                return replica if replica.in_flight <= 2 * least.in_flight + _SLACK else least
    return least


def _activity(replica: Replica[T]) -> tuple[int, int]:
    return replica.in_flight, replica.used
