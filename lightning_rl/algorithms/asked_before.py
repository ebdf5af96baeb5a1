"""Rollouts that a run asked for before it was cut off, and asks for again when it is resumed.

Invariant: what the store holds is kept. A rollout runs, and is trained on, as it was asked for first, also where the
run is resumed with other keys; one of another task is an error. Groups that were lost to infrastructure are sampled
anew, beside what was lost.
"""

import logging
import re
from collections.abc import Sequence
from itertools import groupby

import msgspec

from lightning_rl.errors import Explained
from lightning_rl.store.contract import RolloutRequest, body_of, same_body
from lightning_rl.store.errors import NotFound
from lightning_rl.store.run_store import RunStore

_log = logging.getLogger(__name__)


class OtherTask(Explained, ValueError):
    """A run that goes on asks for a rollout of another task than before."""

    comes_again = True


def with_lost_groups_anew(requests: Sequence[RolloutRequest], store: RunStore) -> list[RolloutRequest]:
    """The requests, group by group, and behind those of a group that the store holds as lost whole to infrastructure
    the same under other ids. What was lost stays asked for: it counts in the account of tokens, and trains nothing."""
    return [
        request
        for _, group in groupby(requests, key=lambda request: request.group_id)
        for request in _until_not_lost(list(group), store)
    ]


def _until_not_lost(group: list[RolloutRequest], store: RunStore) -> list[RolloutRequest]:
    if not all(_is_lost(str(request.rollout_id), store) for request in group):
        return group
    return group + _until_not_lost([again(request) for request in group], store)


def again(request: RolloutRequest) -> RolloutRequest:
    """The same under another id, where what was asked for before is lost."""
    return msgspec.structs.replace(request, rollout_id=again_id(str(request.rollout_id)))


def again_id(rollout_id: str) -> str:
    """The id under which a rollout that was lost is asked for again: `again.NAME`, then `again2.NAME`, ..."""
    prefix, dot, name = rollout_id.partition(".")
    if not (before := re.fullmatch(r"again(\d*)", prefix)):
        return f"again.{rollout_id}"
    return f"again{int(before[1] or 1) + 1}{dot}{name}"


def _is_lost(rollout_id: str, store: RunStore) -> bool:
    """Whether infrastructure failed on every attempt of a rollout that was asked for."""
    try:
        there = store.rollout(rollout_id)
    except NotFound:
        return False
    return there.status == "failed" and there.counting_attempt_id is None


def as_asked_before(requests: Sequence[RolloutRequest], store: RunStore) -> list[RolloutRequest]:
    """The requests, those that the store holds as it holds them. Raises OtherTask."""
    resolved = [_stored_request(request, store) for request in requests]
    changed = [(now, before) for now, before in zip(requests, resolved, strict=True) if before is not now]
    if changed:
        now, before = changed[0]
        _log.warning(
            "%d rollouts (the first is %s) were asked for before the run was cut off, with other keys (%s): they run, "
            "and are trained on, as they were asked for; the keys of now hold for all later ones",
            len(changed),
            before.rollout_id,
            ", ".join(_differences(now, before)),
        )
    return resolved


def _stored_request(request: RolloutRequest, store: RunStore) -> RolloutRequest:
    try:
        there = store.rollout(str(request.rollout_id))
    except NotFound:
        return request
    before = there.as_request()
    if not same_body(body_of(request.task), body_of(before.task)):
        raise OtherTask(
            f"rollout {there.rollout_id} was asked for before with another task: {str(before.task)[:80]!r}, and now "
            f"{str(request.task)[:80]!r}; go on with the tasks of then, or begin a new run"
        )
    return request if same_body(body_of(request), body_of(before)) else before


def _differences(now: RolloutRequest, before: RolloutRequest) -> list[str]:
    """What differs, told as people know it."""
    then, there = msgspec.structs.asdict(before.config), msgspec.structs.asdict(now.config)
    differences = [f"{name} {then[name]} -> {value}" for name, value in there.items() if then[name] != value]
    if now.resources_id != before.resources_id:
        differences.append("the model's sampling parameters, or prompts")
    return differences or ["metadata"]
