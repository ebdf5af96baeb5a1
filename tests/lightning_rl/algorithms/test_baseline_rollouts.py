"""What a baseline asks of the store, and which rollouts it measures."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_rl.algorithms.baseline import Baseline
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Claim, ErrorInfo, Finish
from tests.lightning_rl.control_plane.conftest import served

__all__ = ["served"]

URL = "http://127.0.0.1:1/v1"
RIGHT = Finish(status="succeeded", reward=1.0)
BUG = Finish(status="failed", error=ErrorInfo(type="ValueError", message="no"))


def over(store: HttpStore, work: Callable[[Claim], Finish | None], run_dir: Path, **given: Any) -> Baseline:
    """A baseline of a service, whose rollouts end as `work` says; None: somebody cancels them."""
    baseline = Baseline("m", base_url=URL, **given)
    baseline.store, baseline.run_id, baseline.run_dir = store, "run", run_dir

    def run_them() -> None:
        for claim in store.claim("w", limit=9):
            rollout_id, finish = claim.rollout.rollout_id, work(claim)
            if finish is None:
                store.cancel(rollout_id)
            else:
                store.finish(rollout_id, claim.attempt.attempt_id, finish)

    baseline.check = run_them
    return baseline


def test_its_rollouts_are_validation_of_this_run_with_its_own_sampling(served: Any, tmp_path: Path) -> None:
    seen: list[Claim] = []
    baseline = over(served.client(), lambda claim: seen.append(claim) or RIGHT, tmp_path, n=2)
    baseline.sampling_parameters = {"temperature": 0.5}
    baseline.answer_for(["planner+"])
    assert baseline.evaluate("val", ["a", "b"]).rollouts == 4
    assert {claim.rollout.mode for claim in seen} == {"val"}
    assert all(claim.rollout.rollout_id.endswith(".run") for claim in seen)
    [resources_id] = {str(claim.rollout.resources_id) for claim in seen}
    assert resources_id.endswith(".run")
    main = {"type": "proxy_llm", "model": "m", "val_sampling_parameters": {"temperature": 0.5}}
    published = served.client().resources(resources_id).resources
    assert published == {"main_llm": main, "planner+": main | {"agents": r"planner\+"}}


def test_failures_count_as_nothing_and_what_infrastructure_ended_is_left_out(served: Any, tmp_path: Path) -> None:
    baseline = over(served.client(), lambda claim: {"right": RIGHT, "wrong": BUG}.get(claim.rollout.task), tmp_path)
    found = baseline.evaluate("val", ["right", "wrong", "gone"])
    assert (found.mean, found.failed, found.left_out, found.rollouts, found.without_calls) == (0.5, 1, 1, 3, 2)


def test_what_was_cancelled_before_this_session_is_asked_for_again_and_nothing_else(
    served: Any, tmp_path: Path
) -> None:
    store, asked = served.client(), list[str]()

    def work(claim: Claim) -> Finish | None:
        asked.append(claim.rollout.rollout_id.partition("-")[0] + f" {claim.rollout.task}")
        return BUG if claim.rollout.task == "wrong" else None if len(asked) < 3 else RIGHT

    baseline = over(store, work, tmp_path)
    baseline.evaluate("val", ["wrong", "gone"])
    assert asked == ["val wrong", "val gone"]
    later = over(store, work, tmp_path, resume=True)
    later.began_ns = time.time_ns() + 10**10
    found = later.evaluate("val", ["wrong", "gone"])
    assert asked[2:] == ["again.val gone"]
    assert (found.mean, found.failed, found.left_out) == (0.5, 1, 0)


def test_another_model_service_or_sampling_is_another_evaluation() -> None:
    made = [
        Baseline("m", base_url=URL),
        Baseline("m", base_url=f"{URL}/other"),
        Baseline("n", base_url=URL),
        Baseline("m", base_url=URL, sampling_parameters={"temperature": 0.5}),
        Baseline("m", chat_backend="litellm"),
    ]
    assert len({baseline._digest() for baseline in made}) == len(made)


def test_openais_key_is_given_to_a_service_and_not_to_litellm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    [service] = Baseline("m", base_url=URL).open(tmp_path).engines
    assert service == {"model": "m", "kind": "openai", "url": URL, "api_key": "secret"}
    [by_litellm] = Baseline("m", chat_backend="litellm").open(tmp_path).engines
    assert by_litellm == {"model": "m", "kind": "litellm", "url": None}
    [named] = Baseline("m", chat_backend="litellm", api_key="mine").open(tmp_path).engines
    assert named["api_key"] == "mine"
    with pytest.raises(ValueError, match="name the model"):
        Baseline(chat_backend="litellm")
