"""The watchdog names who waits for whom, once in a while, and only when nothing ends."""

from typing import Any

import pytest

from lightning_rl.algorithms.watchdog import Watchdog
from lightning_rl.store.contract import Attempt, RolloutConfig, RolloutDetail

NOW = 1000.0  # seconds since the epoch


class Store:
    """One rollout that runs, all others queued."""

    def __init__(self, **state: Any) -> None:
        model = {"paused": False, "paused_seconds": None, "in_flight": 0, **state.pop("model", {})}
        self._state = {"models": {"policy": model}, "engines": {}, "claims_held_back": 0, "claims_waiting": 1} | state

    def state(self) -> dict[str, Any]:
        return self._state

    def rollout(self, rollout_id: str, /) -> RolloutDetail:
        attempt = Attempt(
            attempt_id="a1", rollout_id=rollout_id, sequence=1, status="running", worker_id="runner-7",
            lease_expires_at=0.0, started_at=NOW - 70,
        )  # fmt: skip
        running = rollout_id == "runs"
        return RolloutDetail(
            rollout_id=rollout_id, task=None, mode="train", status="running" if running else "queued", group_id=None,
            agent=None, resources_id=None, config=RolloutConfig(), metadata={}, attempt_count=int(running),
            created_at=NOW - 80, attempts=[attempt] if running else [],
        )  # fmt: skip


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def watchdog(store: Store, seconds: float | None = 60.0) -> tuple[Watchdog, Clock]:
    clock = Clock()
    return Watchdog(store, seconds, clock=clock, now=lambda: NOW), clock


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return texts


def test_it_names_rollouts_attempts_and_workers(caplog: pytest.LogCaptureFixture) -> None:
    dog, clock = watchdog(Store(model={"in_flight": 2}))
    clock.now = 60.0
    dog.look({"runs", "waits"}, any_ended=False)
    [text] = told(caplog)
    assert text.splitlines() == [
        "no rollout has ended for 60 s; the trainer waits for 2 rollouts:",
        "- rollout runs: attempt a1 is open since 70 s, claimed by worker runner-7",
        "- rollout waits: queued, asked for 80 s ago, no runner has it",
        "- model policy samples 2 calls now",
    ]


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ({"model": {"paused": True, "paused_seconds": 45.0}}, "calls of model policy wait: it is paused since 45 s"),
        ({"engines": {"policy 0": {"away": "it does not answer"}}}, "engine policy 0 is away: it does not answer"),
        ({"claims_held_back": 3}, "3 slots of runners wait until the engines bear one more rollout"),
        ({"claims_waiting": 0}, "no runner asks for a rollout: all are busy, or none runs"),
        ({}, "no model samples and no engine is away: the agents are busy with something else"),
    ],
)
def test_it_says_what_may_be_the_cause(state: dict[str, Any], cause: str, caplog: pytest.LogCaptureFixture) -> None:
    dog, clock = watchdog(Store(**state))
    clock.now = 60.0
    dog.look({"runs"}, any_ended=False)
    assert told(caplog)[0].endswith(f"\n- {cause}")


def test_it_is_quiet_while_rollouts_end_and_repeats_itself_while_none_does(caplog: pytest.LogCaptureFixture) -> None:
    dog, clock = watchdog(Store())
    for clock.now, any_ended, warns in [
        (59.0, False, 0), (59.5, True, 0), (119.0, False, 0), (119.5, False, 1), (150.0, False, 0), (180.0, False, 1),
        (200.0, True, 0), (259.0, False, 0),
    ]:  # fmt: skip
        dog.look({"runs"}, any_ended=any_ended)
        assert len(told(caplog)) == warns


def test_what_was_before_a_wait_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    dog, clock = watchdog(Store())
    clock.now = 500.0  # an update
    dog.begin()
    dog.look(["runs"], any_ended=False)
    assert told(caplog) == []


def test_of_many_it_names_the_first(caplog: pytest.LogCaptureFixture) -> None:
    dog, clock = watchdog(Store())
    clock.now = 60.0
    dog.look([f"r{i}" for i in range(8)], any_ended=False)
    [text] = told(caplog)
    assert "- rollout r4: " in text
    assert "r5" not in text
    assert "- and 3 more" in text


def test_it_can_be_turned_off(caplog: pytest.LogCaptureFixture) -> None:
    dog, clock = watchdog(Store(), seconds=None)
    clock.now = 1e9
    dog.look({"runs"}, any_ended=False)
    assert told(caplog) == []
