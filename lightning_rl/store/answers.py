"""The control plane's answers that are more than one record: what the server encodes, and its client decodes."""

import msgspec

from lightning_rl.store.contract import Attempt, Claim, Reward, Rollout, RolloutTrace, WorkerInfo
from lightning_rl_adapters.structs import read_hints


class RolloutsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Rollouts."""

    rollouts: list[Rollout]


class PageAnswer(RolloutsAnswer, frozen=True, kw_only=True):
    """A page of rollouts, and the cursor of the next one."""

    cursor: str | None


class RewardedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Rollouts that were given rewards, and the position up to which these were looked at."""

    rollout_ids: list[str]
    position: int


class ClaimsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker was given."""

    claims: list[Claim]


class LeaseAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The renewed lease of an attempt, in seconds since the epoch."""

    attempt_id: str
    lease_expires_at: float


class LeasesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The renewed leases, by attempt id."""

    leases: dict[str, float]


class AttemptsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Attempts that have ended; `again` has the ids of those of their rollouts that are to be tried again."""

    attempts: list[Attempt]
    again: list[str] = []


class LogsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How many logs are kept."""

    kept: int


class RewardsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Rewards, with their ids."""

    rewards: list[Reward]


class TracesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Everything recorded in rollouts, by their ids."""

    rollouts: dict[str, RolloutTrace]


class WorkersAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Workers that run attempts."""

    workers: list[WorkerInfo]


read_hints(globals())
