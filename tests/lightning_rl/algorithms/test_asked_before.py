"""A run that was cut off is resumed with other keys: what it had asked for stays, and nothing is refused."""

from typing import Any

import msgspec
import pytest

from lightning_rl.algorithms.asked_before import OtherTask, with_lost_groups_anew
from lightning_rl.algorithms.baseline import Baseline
from lightning_rl.store.contract import ErrorInfo, Finish, RolloutConfig, RolloutRequest
from lightning_rl.store.errors import Conflict
from tests.lightning_rl.control_plane.conftest import served

__all__ = ["served"]


def requests(*names: str, timeout: float = 600.0, task: Any = (1, 2), **more: Any) -> list[RolloutRequest]:
    config = RolloutConfig(timeout_seconds=timeout)
    return [RolloutRequest(task=task, rollout_id=name, group_id="g", config=config, **more) for name in names]


def test_what_was_asked_for_before_is_as_it_was_then(served: Any, caplog: pytest.LogCaptureFixture) -> None:
    algorithm = Baseline("m", base_url="http://127.0.0.1:9/v1")
    algorithm.store = store = served.client()
    store.publish({}, "then")
    algorithm.ask(requests("ended", "waits", resources_id="then"))
    [claim] = store.claim("w", limit=1)
    store.finish("ended", claim.attempt.attempt_id, Finish(status="succeeded", reward=1.0))
    store.publish({}, "now")
    asked = algorithm.ask(requests("ended", "waits", "new", timeout=100.0, resources_id="now"))
    assert [rollout.status for rollout in asked] == ["succeeded", "queued", "queued"]
    assert [rollout.config.timeout_seconds for rollout in asked] == [600.0, 600.0, 100.0]
    assert [rollout.resources_id for rollout in asked] == ["then", "then", "now"]
    [told] = caplog.messages
    assert told.startswith(
        "2 rollouts (the first is ended) were asked for before the run was cut off, with other keys ("
    )
    assert "(timeout_seconds 600.0 -> 100.0, the model's sampling parameters, or prompts): they run" in told


def test_those_that_are_asked_for_as_before_are_not_told_of(served: Any, caplog: pytest.LogCaptureFixture) -> None:
    algorithm = Baseline("m", base_url="http://127.0.0.1:9/v1")
    algorithm.store = store = served.client()
    store.publish({}, "then")
    same = requests("r1", resources_id="then")
    algorithm.ask([*same, *requests("r2", resources_id="then", metadata={"step": 1})])
    assert caplog.messages == []
    algorithm.ask([*same, *requests("r2", resources_id="then", metadata={"step": 2})])
    [told] = caplog.messages
    assert told.startswith("1 rollouts (the first is r2) were asked for before")
    assert "with other keys (metadata): they run" in told


def test_of_groups_that_were_lost_whole_others_are_asked_for_until_one_is_not(served: Any) -> None:
    algorithm = Baseline("m", base_url="http://127.0.0.1:9/v1")
    algorithm.store = store = served.client()
    store.publish({}, "then")
    once, all_ids = RolloutConfig(max_attempts=1), ("kept", "kept_lost", "lost", "lost_too")
    asked = [
        msgspec.structs.replace(request, config=once, group_id=str(request.rollout_id)[:4])
        for request in requests(*all_ids)
    ]
    for times in range(3):
        asked_now = with_lost_groups_anew(asked, store)
        assert [request.rollout_id for request in asked_now] == ["kept", "kept_lost"] + [
            before + name for before in ("", "again.", "again2.")[: times + 1] for name in all_ids[2:]
        ]
        algorithm.ask(asked_now)
        for claim in store.claim("w", limit=9):
            gone = claim.rollout.rollout_id != "kept"
            error = ErrorInfo(type="E", message="gone", infrastructure=gone)
            store.finish(claim.rollout.rollout_id, claim.attempt.attempt_id, Finish(status="failed", error=error))


def test_a_rollout_of_another_task_is_an_error_that_names_both(served: Any) -> None:
    algorithm = Baseline("m", base_url="http://127.0.0.1:9/v1")
    algorithm.store = served.client()
    algorithm.ask(requests("r1"))
    with pytest.raises(OtherTask, match=r"rollout r1 was asked for before with another task: '\[1, 2\]', and now '3'"):
        algorithm.ask(requests("r1", task=3))


def test_a_conflict_that_stays_is_raised(served: Any) -> None:
    algorithm = Baseline("m", base_url="http://127.0.0.1:9/v1")
    algorithm.store = served.client()
    with pytest.raises(Conflict, match="another body"):
        algorithm.ask([*requests("r1"), *requests("r1", timeout=1.0)])
