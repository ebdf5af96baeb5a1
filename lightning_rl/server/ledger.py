"""The store as the gateway sees it: of an attempt whether it is open, how it is sampled and what was recorded of it;
and a place for its spans."""

from collections.abc import Sequence
from typing import Any

import msgspec

from lightning_rl.server.fleet import Fleet
from lightning_rl.server.resolve import proxy_llm
from lightning_rl.server.sql_thread import SqlThread
from lightning_rl.store.contract import Attempt, Claim, Rollout
from lightning_rl.store.errors import NotFound
from lightning_rl.store.sql import SqlStore
from lightning_rl_adapters.span import Span
from lightning_rl_proxy.errors import elsewhere
from lightning_rl_proxy.ledger import AttemptInfo

_POLICY = "main_llm"


class StoreLedger:
    """A `Ledger` over a `SqlStore`; its work runs in the server's SQL thread."""

    # The control plane and the sweeper are in this process, and seal first; what another server closed, the sweeper
    # seals within its next round, so that no call waits for the store.
    tells_closings = True

    def __init__(self, store: SqlStore, sql: SqlThread, fleet: Fleet | None = None) -> None:
        self._store = store
        self._sql = sql
        self._fleet = fleet

    async def attempt(self, rollout_id: str, attempt_id: str) -> AttemptInfo | None:
        """See `Ledger`. An attempt that may be this gateway's is so from then on."""
        if self._fleet is not None:
            try:
                owner = await self._fleet.take(rollout_id, attempt_id)
            except NotFound:
                return None
            if owner is not None and owner.gateway_id != self._fleet.gateway_id:
                raise elsewhere(attempt_id, owner.url)
        return await self._sql.run(self._info, rollout_id, attempt_id)

    async def add_spans(self, spans: Sequence[Span]) -> None:
        """See `Ledger`."""
        await self._sql.run(self._store.add_spans, spans)

    def _info(self, rollout_id: str, attempt_id: str) -> AttemptInfo | None:
        try:
            rollout, attempt = self._store.attempt(rollout_id, attempt_id)
        except NotFound:
            return None
        resources = {} if rollout.resources_id is None else self._store.resources(rollout.resources_id).resources
        spans = self._store.trace(rollout_id, attempt_id).spans if attempt.status == "running" else []
        return msgspec.structs.replace(_info(rollout, attempt, resources), spans=spans)


def claimed_info(claim: Claim) -> AttemptInfo:
    """What the ledger would say of the attempt that a claim (not yet resolved) has just opened."""
    return _info(claim.rollout, claim.attempt, claim.resources)


def _info(rollout: Rollout, attempt: Attempt, resources: dict[str, dict[str, Any]]) -> AttemptInfo:
    policy = proxy_llm(resources.get(_POLICY, {}))
    return AttemptInfo(
        rollout_id=rollout.rollout_id,
        attempt_id=attempt.attempt_id,
        mode=rollout.mode,
        open=attempt.status == "running",
        sampling=policy.sampling(rollout.mode) if policy is not None else {},
        seed_key=seed_key(rollout),
    )


def seed_key(rollout: Rollout) -> str:
    """What is mixed into the seeds of a rollout's calls: validations of one task agree, samples of a group differ."""
    task_index = rollout.metadata.get("task_index")
    if rollout.mode == "train" or task_index is None:
        return rollout.rollout_id
    return f"val/{task_index}"
