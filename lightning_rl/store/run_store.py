"""What a training run asks of a store: of one server's (`HttpStore`), or of several servers' as one.

At several servers a rollout may have two records: its server was gone, and it was asked for at another. `rank_of` says
which counts.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from lightning_rl.store.contract import Resources, Reward, Rollout, RolloutDetail, RolloutRequest, RolloutTrace
from lightning_rl.store.life_cycle import ENDED
from lightning_rl_proxy.recording.ledger import AttemptTokens

# Rollouts: while a server reads their records it takes no heartbeats, and those of one may be of megabytes.
TRACES_AT_ONCE = 64


class RunStore(Protocol):
    """See `HttpStore`, whose methods these are."""

    def enqueue(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """The rollouts asked for, in that order."""
        ...

    def rollout(self, rollout_id: str) -> RolloutDetail:
        """The rollout with its attempts. Raises NotFound."""
        ...

    def wait(self, rollout_ids: Sequence[str], wait_seconds: float, gather_seconds: float = 0.01) -> list[Rollout]:
        """Those that have ended, as soon as any has; [] when the time is up. Others may end within `gather_seconds`
        behind the first: they are told with it, as soon as all have."""
        ...

    def cancel(self, rollout_id: str) -> Rollout:
        """End the rollout as cancelled; one that has ended stays as it is."""
        ...

    def traces(self, rollout_ids: Sequence[str]) -> dict[str, RolloutTrace]:
        """Everything recorded in rollouts that have ended; unknown ids are left out."""
        ...

    def add_late_rewards(self, rewards_by_attempt: Mapping[tuple[str, str], Sequence[Reward]]) -> None:
        """Give attempts that have ended rewards, by (rollout id, attempt id)."""
        ...

    def publish(self, resources: Mapping[str, Mapping[str, Any]], resources_id: str | None = None) -> Resources:
        """Publish resources by name; they are the latest from now on."""
        ...

    def pause(
        self,
        model: str | None = None,
        *,
        mode: str = "drain",
        deadline_seconds: float = 30,
        lease_seconds: float | None = None,
    ) -> dict[str, Any]:
        """Park the requests of a model (of all, without one); the state on return."""
        ...

    def resume(
        self,
        model: str | None = None,
        policy_version: int | None = None,
        *,
        outdated: Callable[[], Sequence[str]] = tuple,
    ) -> dict[str, Any]:
        """Let parked requests go on, under `policy_version` where one is given; engines at the URLs that
        `outdated` gives do not have these weights, and take no calls until they have. It is asked again when a server
        is told later. The state on return."""
        ...

    def state(self) -> dict[str, Any]:
        """`models`, `engines`, `counters`, and how many claims of runners wait."""
        ...

    def tokens_of(self, rollout_ids: Sequence[str]) -> dict[str, AttemptTokens]:
        """What engines handed over for the attempts at these rollouts, by attempt id, as far as gateways remember."""
        ...


def rank_of(rollout: Rollout) -> tuple[bool, float]:
    """Of the records of a rollout at several servers the one with the largest rank counts: one that has come to its
    end, else, or of two such, the one that was asked for last."""
    return rollout.status in ENDED and rollout.status != "cancelled", rollout.created_at
