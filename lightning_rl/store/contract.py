"""The records that cross the control plane, and when two of them say the same; nothing else.

Invariant: a record that exists is well formed, since every one of them is decoded by its type.
Times are seconds since the epoch.
"""

import json
import re
from typing import Annotated, Any, Literal

import msgspec

from lightning_rl.store.errors import Invalid
from lightning_rl.store.life_cycle import AttemptStatus, RolloutStatus
from lightning_rl_adapters.span import Span
from lightning_rl_adapters.structs import read_hints

# "." and ".." match the alphabet but vanish from URLs.
Id = Annotated[str, msgspec.Meta(pattern=r"\A(?!\.{1,2}\Z)[A-Za-z0-9._~-]{1,128}\Z")]
Mode = Literal["train", "val", "test"]
Positive = Annotated[float, msgspec.Meta(gt=0)]


SEED_KEY = "seed_key"  # of a rollout's metadata: what its seeds are made of, where that is not its id


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often and how long a rollout may be tried. Attempts that were stopped with their runner do not count."""

    max_attempts: Annotated[int, msgspec.Meta(ge=1)] = 3
    timeout_seconds: Positive | None = 600  # of one attempt; None: no deadline
    unresponsive_seconds: Positive = 30  # without a heartbeat the attempt is lost


class RolloutRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rollout that is asked for. Without `resources_id` it gets the latest resources."""

    task: Any
    mode: Mode = "train"
    rollout_id: Id | None = None
    group_id: Id | None = None
    agent: str | None = None
    resources_id: Id | None = None
    config: RolloutConfig = RolloutConfig()
    metadata: dict[str, Any] = {}


# Errors of attempts that were ended from outside, with their runner or their session: no fault of the rollout's, so
# they do not count as attempts at it.
RUNNER_STOPPED = "RunnerStopped"
SESSION_ENDED = "SessionEnded"
NOT_COUNTED = frozenset({RUNNER_STOPPED, SESSION_ENDED})


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why an attempt failed; infrastructure is retried, an agent's own failure is not."""

    type: str
    message: str
    traceback: str = ""
    infrastructure: bool = False


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One try at a rollout. `sequence` counts from 1."""

    attempt_id: str
    rollout_id: str
    sequence: int
    status: AttemptStatus
    worker_id: str
    lease_expires_at: float
    started_at: float
    deadline_at: float | None = None
    ended_at: float | None = None
    reward: float | None = None  # the final one: the last that came, a late one even over a returned one
    rewards: dict[str, float] = {}  # by name, the last of a name, without those of single calls
    error: ErrorInfo | None = None


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout as it stands now.

    `attempt_id` is its latest attempt. `counting_attempt_id` is the only attempt that may be
    trained on: set once the rollout has succeeded or its agent has failed, None before, and None
    for good when it was cancelled or infrastructure failed. `reward` and `rewards` are that attempt's; late rewards
    change them after the end, and nothing else of an ended rollout ever changes.
    """

    rollout_id: str
    task: Any
    mode: Mode
    status: RolloutStatus
    group_id: str | None
    agent: str | None
    resources_id: str | None
    config: RolloutConfig
    metadata: dict[str, Any]
    attempt_count: int
    created_at: float
    ended_at: float | None = None
    attempt_id: str | None = None
    counting_attempt_id: str | None = None
    reward: float | None = None
    rewards: dict[str, float] = {}
    error: ErrorInfo | None = None

    @property
    def input(self) -> Any:
        """Agent-lightning's name of the task."""
        return self.task

    @property
    def start_time(self) -> float:
        """Agent-lightning's name of `created_at`."""
        return self.created_at

    @property
    def end_time(self) -> float | None:
        """Agent-lightning's name of `ended_at`."""
        return self.ended_at

    def as_request(self) -> RolloutRequest:
        """What it was asked for with."""
        return RolloutRequest(**{name: getattr(self, name) for name in RolloutRequest.__struct_fields__})


class AttemptedRollout(Rollout, frozen=True, kw_only=True):
    """A rollout as an agent is given it, with the attempt that runs."""

    attempt: Attempt


class Claim(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rollout handed to a worker, with the attempt that it opened. `gateway_url` is where the attempt's calls go;
    None: to the server that was asked."""

    rollout: Rollout
    attempt: Attempt
    resources: dict[str, dict[str, Any]]
    gateway_url: str | None = None

    def attempted(self) -> AttemptedRollout:
        """The rollout with its attempt."""
        return AttemptedRollout(**msgspec.structs.asdict(self.rollout), attempt=self.attempt)


class Reward(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A reward given on the way, or late, after the attempt ended; with `call_id` that of one call, which is never
    the final one.

    Without, the last of a name wins: those given on the way in the order they came, then what the agent returned, then
    late ones. The one named `reward` is the final reward.
    """

    value: float
    name: str = "reward"
    call_id: str | None = None
    reward_id: Id | None = None


class AttemptDetail(Attempt, frozen=True, kw_only=True):
    """An attempt with the rewards that single calls of it were given, in the order they came."""

    call_rewards: list[Reward] = []


class RolloutDetail(Rollout, frozen=True, kw_only=True):
    """A rollout with all its attempts, oldest first."""

    attempts: list[AttemptDetail]


class Finish(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an attempt ended, by its worker. A dict of rewards has one named "reward".

    The `error` of one that succeeded is why its reward may say nothing of the agent: it counts where the gateway had
    failed with a call of the attempt, and is else not kept.
    """

    status: Literal["succeeded", "failed"]
    reward: float | dict[str, float] | None = None
    error: ErrorInfo | None = None


class Ending(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The end of one attempt among many: how it ended, and rewards that it is given before."""

    rollout_id: str
    attempt_id: str
    finish: Finish
    rewards: list[Reward] = []


class Log(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an attempt printed, the beginning and the end of it, and a traceback: of the error with which it failed, or
    of where its agent was when its time was over."""

    stdout: str = ""
    stderr: str = ""
    traceback: str = ""


class AttemptLog(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The log of one attempt among many."""

    rollout_id: str
    attempt_id: str
    log: Log


class ResourcesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Resources to publish, by name."""

    resources: dict[str, dict[str, Any]]
    resources_id: Id | None = None


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """What was published once under `resources_id`; it never changes. `version` counts from 1."""

    resources_id: str
    version: int
    created_at: float
    resources: dict[str, dict[str, Any]]


class AttemptTrace(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt with all that was recorded in it, spans by arrival number. `returned` are the rewards that the agent
    of one that succeeded returned, which late ones may have replaced in `attempt`; None where that is not known."""

    attempt: Attempt
    spans: list[Span]
    rewards: list[Reward]
    returned: dict[str, float] | None = None


class RolloutTrace(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout with the traces of all its attempts, the counting one and the superseded ones."""

    rollout: Rollout
    attempts: list[AttemptTrace]

    @property
    def counting(self) -> AttemptTrace | None:
        """The attempt that counts; None where none does."""
        counts = self.rollout.counting_attempt_id
        return next((one for one in self.attempts if one.attempt.attempt_id == counts), None)


class WorkerAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that a worker runs. Its lease is renewed by heartbeats and by calls."""

    rollout_id: str
    attempt_id: str
    started_at: float
    lease_expires_at: float


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker with the attempts that it runs now, oldest first."""

    worker_id: str
    attempts: list[WorkerAttempt]


class Overdue(msgspec.Struct, frozen=True, kw_only=True):
    """A running attempt that nobody will end: its lease or deadline is over, its worker's process died (`worker`), the
    session that it belonged to (`session`), or the server that its calls went to (`server`); or the journal with its
    calls was damaged (`journal`). `failure`: what the gateway failed with before the deadline came."""

    rollout_id: str
    attempt_id: str
    why: Literal["lease", "deadline", "worker", "session", "server", "journal"]
    failure: str | None = None
    lease_seconds: float = 0.0  # how long a lease lasts from a heartbeat or a call on


class GatewayInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway of a store that several servers share, as it last said; without its lease renewed it is gone."""

    gateway_id: str
    url: str
    open_attempts: int = 0
    calls_in_flight: int = 0
    lease_expires_at: float = 0.0


class RunElsewhere(msgspec.Struct, frozen=True, kw_only=True):
    """A training run that is attached at another gateway of the store, and the `request` with which it was, as JSON.
    `lease_left`: seconds of the gateway's lease, below 0 where it is over."""

    gateway_id: str
    run_id: str
    request: str
    lease_left: float


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway that has a running attempt.

    `live` until its lease ends, `gone` some time after; in between nobody can say. `left`: it has stopped, and the
    store has all its calls.
    """

    gateway_id: str
    url: str
    live: bool
    gone: bool
    left: bool


read_hints(globals())
_MAYBE_NOT_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")  # how MessagePack writes NaN and infinities


def body_of_request(request: RolloutRequest) -> bytes:
    """The JSON of a request. Raises Invalid as `body_of`, and for NaN and infinities, which would become null."""
    body, packed = _encoded(request)
    if _MAYBE_NOT_FINITE.search(packed):
        try:
            json.dumps(msgspec.to_builtins(request), allow_nan=False)
        except ValueError as error:
            raise Invalid(
                f"the task of a request has NaN or an infinity, which JSON cannot write: {str(request.task)[:80]!r}"
            ) from error
    return body


def body_of(record: Any) -> bytes:
    """The JSON of a record.

    Raises:
        Invalid: when it holds something that JSON cannot, or MessagePack, in which the store answers.
    """
    return _encoded(record)[0]


def _encoded(record: Any) -> tuple[bytes, bytes]:
    """A record as JSON and as MessagePack. Raises Invalid, as `body_of`."""
    try:
        packed = msgspec.msgpack.encode(record)
        return msgspec.json.encode(record), packed
    except OverflowError as error:
        raise Invalid(
            f"{type(record).__name__} holds a whole number of more than 64 bits: write it as text ({error})"
        ) from error
    except (TypeError, UnicodeEncodeError, RecursionError) as error:
        raise Invalid(f"{type(record).__name__} is not JSON-able: {error}") from error


def same_body(one: bytes, other: bytes) -> bool:
    """Whether two JSON texts say the same, whatever the order of their keys."""
    return one == other or bool(msgspec.json.decode(one) == msgspec.json.decode(other))
