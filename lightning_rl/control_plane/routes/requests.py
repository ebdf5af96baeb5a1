"""The bodies of the control plane's requests that are no records of the store."""

from typing import Annotated, Literal

import msgspec

from lightning_rl.store.contract import AttemptLog, Ending, Id, Reward, RolloutRequest
from lightning_rl_adapters.structs import read_hints

_WaitSeconds = Annotated[float, msgspec.Meta(ge=0, le=600)]


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class EnqueueBody(_Body, frozen=True, kw_only=True):
    """Rollouts to enqueue."""

    rollouts: list[RolloutRequest]


class WaitBody(_Body, frozen=True, kw_only=True):
    """Rollouts to wait for."""

    rollout_ids: list[str]
    wait_seconds: _WaitSeconds = 0
    gather_seconds: _WaitSeconds = 0.01


class ClaimBody(_Body, frozen=True, kw_only=True):
    """What a worker asks for; without `agents` it takes rollouts of any agent."""

    worker_id: str
    claim_id: Id | None = None
    agents: list[str] | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    wait_seconds: _WaitSeconds = 0


class RewardsBody(_Body, frozen=True, kw_only=True):
    """Rewards of an attempt."""

    rewards: list[Reward]


class AttemptsBody(_Body, frozen=True, kw_only=True):
    """Attempts, each as its rollout's and its own id."""

    attempts: list[tuple[str, str]]


class SealBody(_Body, frozen=True, kw_only=True):
    """The attempt to seal at this gateway."""

    rollout_id: str
    attempt_id: str


class EndingsBody(_Body, frozen=True, kw_only=True):
    """Attempts that ended."""

    attempts: list[Ending]


class LogsBody(_Body, frozen=True, kw_only=True):
    """What attempts printed."""

    attempts: list[AttemptLog]


class WorkersBody(_Body, frozen=True, kw_only=True):
    """Workers whose process has died."""

    worker_ids: list[str]


class RolloutsBody(_Body, frozen=True, kw_only=True):
    """Rollouts that are asked about."""

    rollout_ids: list[str]


class TripletsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose word the triplets are taken from: the gateway's, or that of the agent's own spans."""

    source: Literal["gateway", "otel"] = "gateway"


class PageQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which page of which rollouts."""

    status: str | None = None
    mode: str | None = None
    group_id: str | None = None
    cursor: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


class RewardedQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Since when rewards are asked for; without `after` none are, but how many there are now."""

    after: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None


read_hints(globals())
