"""What the gateway needs of a store: is this attempt open, how is it sampled, and a place for its spans."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from lightning_rl_adapters.span import Packed, Span


class AttemptPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """One of the policies of an attempt that has several.

    `name` is what the run calls it, `model` what its engines sample. Calls of agents whose whole tag matches the
    regular expression `agents` are for it. `sampling` and `sampling_defaults` are as in `AttemptInfo`.
    """

    name: str
    model: str
    agents: str
    sampling: dict[str, float | int] = {}
    sampling_defaults: dict[str, Any] = {}


class AttemptInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the store says of one attempt.

    `sampling` replaces the agent's own sampling parameters (empty: the agent's hold), `sampling_defaults` hold where a
    request has none. `policy` is the model of its `main_llm`; None: the server's. `policies` are there where the agent
    asks several, each sampled in its own way; the first of them is that of `main_llm`. `seed_key` is mixed into the
    seed of every call, so that the rollouts of a group differ and two validations agree. `spans` are what was recorded
    of it so far, by a gateway that is gone. `ended` says how and when it ended, where it is not open.
    """

    rollout_id: str
    attempt_id: str
    mode: str
    open: bool
    sampling: dict[str, float | int]
    seed_key: str
    policy: str | None = None
    sampling_defaults: dict[str, Any] = {}
    spans: Sequence[Span] = ()
    ended: str | None = None
    policies: tuple[AttemptPolicy, ...] = ()

    def policy_named(self, requested: str) -> AttemptPolicy | None:
        """The one of several policies that a request names, as the run or as its engines do."""
        return next((one for one in self.policies if requested in (one.name, one.model)), None)

    def policy_of_agent(self, tag: str | None) -> AttemptPolicy | None:
        """The one of several policies that the agent of this tag is answered by: the one of that name, else the first
        whose `agents` match it; None where the tag says nothing."""
        if tag is None:
            return None
        own = (one for one in self.policies if one.name == tag)
        return next(own, None) or next((one for one in self.policies if re.fullmatch(one.agents, tag)), None)

    def sampling_of(self, model: str) -> tuple[Mapping[str, float | int], Mapping[str, Any]]:
        """`sampling` and `sampling_defaults` of calls that this model answers."""
        for one in self.policies:
            if one.model == model:
                return one.sampling, one.sampling_defaults
        return self.sampling, self.sampling_defaults


class AttemptTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that engines handed over for one attempt, by model, those that an earlier gateway recorded included.

    `lost` are those of them whose records were given up.
    """

    rollout_id: str
    received: dict[str, int]
    lost: dict[str, int] = {}


class Ledger(Protocol):
    """The store as the gateway sees it.

    `tells_closings`: nobody closes an attempt without `Gateway.seal`, so that what the store said of an open one holds
    until then; else it is asked again every second.
    """

    tells_closings: bool

    async def attempt(self, rollout_id: str, attempt_id: str) -> AttemptInfo | None:
        """The attempt, or None where there is no such attempt. Raises GatewayError where it is another gateway's."""
        ...

    async def add_spans(self, spans: Sequence[Packed]) -> None:
        """Keep the spans, durably on return. A span id that is already there is left as it is."""
        ...
