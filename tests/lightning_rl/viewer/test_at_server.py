"""A run that a server has is looked at as one in a folder: what the doctor finds, and rewards that come late."""

import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from lightning_rl.control_plane.launch import launch
from lightning_rl.inspect.rollout_source import PagedStore
from lightning_rl.store.contract import ErrorInfo, Reward
from lightning_rl.viewer.run import ViewedRun
from tests.lightning_rl.inspect.runs import TALK, open_store, record
from tests.lightning_rl.runner.conftest import policy_of

KEY = "an-admin-key-of-the-tests"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address; it has three rollouts that were rewarded, and one whose agent failed."""
    served = tmp_path_factory.mktemp("served")
    with open_store(served) as store:
        for number in range(3):
            record(store, f"r{number}", TALK, reward=0.0)
        record(store, "r3", TALK, error=ErrorInfo(type="KeyError", message="no such tool"))
    with launch(served, policy_of(engines=[]), admin_key=KEY, runner_key="runner") as serving:
        yield serving.url


@pytest.fixture
def run(server: str) -> Iterator[ViewedRun]:
    with closing(ViewedRun(None, [PagedStore(server, KEY)])) as viewed:
        viewed.start()
        assert viewed.indexer.ready.wait(20)
        yield viewed


def test_the_doctor_looks_at_what_the_server_has(run: ViewedRun) -> None:
    run.answer("doctor", {})  # begins the look
    told = run.diagnosis()
    assert (told["looked_at"]["rollouts"], told["looked_at"]["calls"]) == (4, 8)
    [failing] = [finding for finding in told["findings"] if finding["name"] == "agent_error_KeyError"]
    assert failing["rollout"] == "r3"


def test_a_reward_that_comes_late_is_listed_and_shown(run: ViewedRun, server: str) -> None:
    def reward() -> float:
        listed = {row["rollout_id"]: row["reward"] for row in run.answer("rollouts", {})["rollouts"]}
        return float(listed["r1"])

    before = run.answer("rollouts/r1", {})
    assert (reward(), before["reward"]) == (0.0, 0.0)
    with closing(PagedStore(server, KEY)) as store:
        store.add_rewards("r1", before["counting_attempt_id"], [Reward(value=0.75)])
    until = time.monotonic() + 20
    while reward() != 0.75:  # the next look at the server
        assert time.monotonic() < until
        time.sleep(0.05)
    assert run.answer("rollouts/r1", {})["reward"] == 0.75
