"""The store as the gateway sees it: of an attempt whether it is open, how it is sampled and what was recorded of it;
and a place for its spans."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from lightning_rl.control_plane.gateways.membership import Membership
from lightning_rl.control_plane.gateways.resolve import MAIN_LLM, proxy_llm
from lightning_rl.store.contract import SEED_KEY, Attempt, Claim, Rollout
from lightning_rl.store.errors import NotFound, StoreUnwritable
from lightning_rl.store.queries import AttemptOpening
from lightning_rl.store.records import ending_of
from lightning_rl.store.sql import SqlStore
from lightning_rl.store.sql_thread import SqlThread
from lightning_rl_adapters.span import Packed
from lightning_rl_proxy.errors import GatewayError, elsewhere
from lightning_rl_proxy.recording.ledger import AttemptInfo, AttemptPolicy


class StoreLedger:
    """A `Ledger` over a `SqlStore`; its work runs in the server's SQL thread."""

    # The control plane and the sweeper are in this process, and seal first; what another server closed, the sweeper
    # seals within its next round, so that no call waits for the store.
    tells_closings = True

    def __init__(self, store: SqlStore, sql: SqlThread, fleet: Membership | None = None) -> None:
        self._store = store
        self._sql = sql
        self._fleet = fleet
        self._waiting: list[tuple[str, str]] = []  # attempts that the store is asked of next
        self._next: asyncio.Task[dict[tuple[str, str], AttemptOpening]] | None = None
        self._one_at_a_time = asyncio.Lock()

    async def attempt(self, rollout_id: str, attempt_id: str) -> AttemptInfo | None:
        """See `Ledger`. An attempt that may be this gateway's is so from then on.

        Raises GatewayError(503) where the store cannot be asked.
        """
        try:
            return await self._attempt(rollout_id, attempt_id)
        except StoreUnwritable as error:
            raise GatewayError(503, str(error), kind="api_error", retry=True) from error

    async def _attempt(self, rollout_id: str, attempt_id: str) -> AttemptInfo | None:
        try:
            opening = await self._opening(rollout_id, attempt_id)
            if self._fleet is not None and opening is not None and opening.gateway_id != self._fleet.gateway_id:
                opening = await self._take_over(self._fleet, rollout_id, attempt_id)
            if opening is None:
                _, ended = await self._sql.run(self._store.attempt, rollout_id, attempt_id)
                return _closed(ended)
        except NotFound:
            return None
        info = _open_info(opening.rollout, attempt_id, opening.resources)
        if opening.recorded:
            trace = await self._sql.run(self._store.trace, rollout_id, attempt_id)
            info = msgspec.structs.replace(info, spans=trace.spans)
        return info

    async def _opening(self, rollout_id: str, attempt_id: str) -> AttemptOpening | None:
        """What the store has of a running attempt; None of one that does not run. The store is asked of it together
        with all others that come while it answers: those that were claimed together call together."""
        self._waiting.append((rollout_id, attempt_id))
        if self._next is None:
            self._next = asyncio.create_task(self._openings())
        openings = await asyncio.shield(self._next)  # whose client leaves takes it from nobody
        return openings.get((rollout_id, attempt_id))

    async def _openings(self) -> dict[tuple[str, str], AttemptOpening]:
        async with self._one_at_a_time:
            places, self._waiting, self._next = self._waiting, [], None
            return await self._sql.run(self._store.openings, places)

    async def _take_over(self, fleet: Membership, rollout_id: str, attempt_id: str) -> AttemptOpening | None:
        """A running attempt that was not this gateway's, and is now. Raises GatewayError where it cannot be."""
        owner = await fleet.take(rollout_id, attempt_id)
        if owner is not None and owner.gateway_id != fleet.gateway_id:
            raise elsewhere(attempt_id, owner.url)
        return await self._opening(rollout_id, attempt_id)

    async def add_spans(self, spans: Sequence[Packed]) -> None:
        """See `Ledger`."""
        await self._sql.run(self._store.add_packed, spans)


def claimed_info(claim: Claim) -> AttemptInfo:
    """What the ledger would say of the attempt that a claim (not yet resolved) has just opened."""
    info = _open_info(claim.rollout, claim.attempt.attempt_id, claim.resources)
    return msgspec.structs.replace(info, open=claim.attempt.status == "running")


def _open_info(rollout: Rollout, attempt_id: str, resources: dict[str, dict[str, Any]]) -> AttemptInfo:
    policy = proxy_llm(resources.get(MAIN_LLM, {}))
    return AttemptInfo(
        rollout_id=rollout.rollout_id,
        attempt_id=attempt_id,
        mode=rollout.mode,
        open=True,
        sampling=policy.sampling(rollout.mode) if policy is not None else {},
        seed_key=seed_key(rollout),
        policy=None if policy is None else policy.model,
        sampling_defaults=policy.defaults() if policy is not None else {},
        policies=_policies(resources, rollout.mode),
    )


def _policies(resources: dict[str, dict[str, Any]], mode: str) -> tuple[AttemptPolicy, ...]:
    """The policies of a rollout of this mode whose agent asks several; that of `main_llm` first."""
    named = {name: proxy_llm(each) for name, each in resources.items() if name != MAIN_LLM}
    policies = [
        AttemptPolicy(
            name=name,
            model=one.model,
            agents=one.agents,
            sampling=one.sampling(mode),
            sampling_defaults=one.defaults(),
        )
        for name, one in named.items()
        if one is not None and one.agents is not None
    ]
    main = resources.get(MAIN_LLM, {}).get("model")
    return tuple(sorted(policies, key=lambda one: one.model != main))


def _closed(ended: Attempt) -> AttemptInfo:
    return AttemptInfo(
        rollout_id=ended.rollout_id,
        attempt_id=ended.attempt_id,
        mode="train",
        open=False,
        sampling={},
        seed_key=ended.rollout_id,
        ended=ending_of(ended),
    )


def seed_key(rollout: Rollout) -> str:
    """What is mixed into the seeds of a rollout's calls: validations of one task agree, samples of a group differ."""
    task_index = rollout.metadata.get("task_index")
    if rollout.mode == "train" or task_index is None:
        return str(rollout.metadata.get(SEED_KEY, rollout.rollout_id))
    return f"val/{task_index}"
