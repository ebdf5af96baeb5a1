"""Who may reward an attempt that has ended: whoever holds the admin key, and no runner."""

import threading

import pytest

from lightning_rl.store.contract import ErrorInfo, Finish, Reward, RolloutRequest
from lightning_rl.store.errors import Conflict, NotFound
from lightning_rl.store.rewards import with_late_rewards

INFRASTRUCTURE = Finish(status="failed", error=ErrorInfo(type="Gone", message="engine", infrastructure=True))


def ended(served, *ids: str, finish: Finish | None = None) -> list[tuple[str, str]]:
    client = served.client()
    client.enqueue([RolloutRequest(task=None, rollout_id=rollout_id) for rollout_id in ids])
    places = [(c.rollout.rollout_id, c.attempt.attempt_id) for c in client.claim("w", limit=len(ids))]
    for place in places:
        client.finish(*place, finish or Finish(status="succeeded", reward=1.0))
    return places


def test_the_admin_key_rewards_an_attempt_that_has_ended_and_a_runners_does_not(served) -> None:
    [place] = ended(served, "r1")
    with pytest.raises(Conflict, match="r1 is no longer yours: it ended as succeeded"):
        served.client("runner").add_rewards(*place, [Reward(value=0.5)])
    assert served.client().rollout("r1").reward == 1.0
    [told] = served.client().add_rewards(*place, [Reward(value=0.5)])
    assert (told.value, served.client().rollout("r1").reward) == (0.5, 0.5)


def test_a_runner_may_repeat_what_it_gave_in_time(served) -> None:
    client = served.client("runner")
    served.client().enqueue([RolloutRequest(task=None, rollout_id="r1")])
    place = "r1", client.claim("w")[0].attempt.attempt_id
    client.add_rewards(*place, [Reward(value=0.5, reward_id="w1")])
    client.finish(*place, Finish(status="succeeded"))
    client.add_rewards(*place, [Reward(value=0.5, reward_id="w1")])
    assert served.client().rollout("r1").reward == 0.5


def test_an_attempt_that_does_not_count_is_409_to_the_admin_too(served) -> None:
    [(rollout_id, attempt_id)] = ended(served, "r1", finish=INFRASTRUCTURE)
    path = f"/api/v1/rollouts/{rollout_id}/attempts/{attempt_id}/rewards"
    status, body = served.call("POST", path, {"rewards": [{"value": 1.0}]})
    assert status == 409
    assert "does not count" in body["error"]["message"]


def test_a_steps_rewards_are_given_in_one_call(served) -> None:
    places = ended(served, *(f"r{n}" for n in range(20)))
    given = {place: [Reward(value=n / 2, reward_id="graded-reward")] for n, place in enumerate(places)}
    client = served.client()
    client.add_late_rewards(given)
    client.add_late_rewards(given)  # repeated as a whole, after a restart say
    assert [client.rollout(rollout_id).reward for rollout_id, _ in places] == [n / 2 for n in range(20)]
    client.add_late_rewards({})
    trace = client.traces(["r3"])["r3"]
    assert trace.attempts[0].rewards == [Reward(value=1.5, reward_id="graded-reward")]


def test_who_gives_them_knows_the_trace_without_reading_it_again(served) -> None:
    kept, cleared = Finish(status="succeeded", reward={"reward": 0.5, "polite": 1.0}), Finish(status="succeeded")
    given = [Reward(value=1.5, reward_id="graded-reward"), Reward(value=2.0, name="long", reward_id="graded-long")]
    places = [*ended(served, "r1", finish=kept), *ended(served, "r2", finish=cleared)]
    before = served.client().traces(["r1", "r2"])
    served.client().add_late_rewards(dict.fromkeys(places, given))
    after = served.client().traces(["r1", "r2"])
    assert {name: with_late_rewards(trace, given) for name, trace in before.items()} == after != before


def test_the_first_that_is_refused_is_raised_and_the_others_are_given(served) -> None:
    [first, last] = ended(served, "r1", "r2")
    given = {
        first: [Reward(value=0.5)],
        ("r1", "nope"): [Reward(value=0.5)],
        ("r9", "a9"): [],
        last: [Reward(value=0.25)],
    }
    with pytest.raises(NotFound, match="nope"):
        served.client().add_late_rewards(given)
    assert [served.client().rollout(rollout_id).reward for rollout_id, _ in (first, last)] == [0.5, 0.25]


def test_those_who_wait_for_the_rollout_see_its_late_reward(served) -> None:
    [place] = ended(served, "r1")
    threads = [
        threading.Thread(target=served.client().add_rewards, args=(*place, [Reward(value=0.5, reward_id="w")]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [rollout.reward for rollout in served.client().wait(["r1"], 1)] == [0.5]
    assert len(served.client().traces(["r1"])["r1"].attempts[0].rewards) == 1
