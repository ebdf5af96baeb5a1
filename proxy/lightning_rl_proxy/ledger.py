"""What the gateway needs of a store: is this attempt open, how is it sampled, and a place for its spans."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from lightning_rl_adapters.span import Span


class AttemptInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the store says of one attempt.

    `sampling` replaces the agent's own sampling parameters (empty: the agent's hold), `sampling_defaults` hold where a
    request has none. `seed_key` is mixed into the
    seed of every call, so that the rollouts of a group differ and two validations agree.
    """

    rollout_id: str
    attempt_id: str
    mode: str
    open: bool
    sampling: dict[str, float | int]
    seed_key: str
    sampling_defaults: dict[str, Any] = {}


class Ledger(Protocol):
    """The store as the gateway sees it.

    `tells_closings`: nobody closes an attempt without `Gateway.seal`, so that what the store said of an open one holds
    until then; else it is asked again every second.
    """

    tells_closings: bool

    async def attempt(self, rollout_id: str, attempt_id: str) -> AttemptInfo | None:
        """The attempt, or None where there is no such attempt."""
        ...

    async def add_spans(self, spans: Sequence[Span]) -> None:
        """Keep the spans, durably on return. A span id that is already there is left as it is."""
        ...
