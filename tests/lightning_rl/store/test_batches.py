"""Operations on many attempts at a time: one transaction, and the same as each alone."""

import pytest

from lightning_rl.store.contract import Ending, ErrorInfo, Finish, Reward, RolloutConfig, RolloutRequest
from lightning_rl.store.errors import Conflict, Invalid, NotFound

SUCCEEDED = Finish(status="succeeded", reward=1.0)
INFRASTRUCTURE = Finish(status="failed", error=ErrorInfo(type="Gone", message="engine", infrastructure=True))


def claimed(store, n: int, **config) -> list[tuple[str, str]]:
    store.enqueue([RolloutRequest(task=i, rollout_id=f"r{i}", config=RolloutConfig(**config)) for i in range(n)])
    return [(claim.rollout.rollout_id, claim.attempt.attempt_id) for claim in store.claim("w", limit=n)]


def ending(place: tuple[str, str], finish: Finish = SUCCEEDED, rewards=()) -> Ending:
    return Ending(rollout_id=place[0], attempt_id=place[1], finish=finish, rewards=list(rewards))


def test_many_leases_are_renewed_at_once_and_those_that_are_over_are_left_out(store, clock) -> None:
    first, second, third = claimed(store, 3, unresponsive_seconds=10)
    store.finish(*third, SUCCEEDED)
    clock.advance(6)
    leases = store.heartbeats([first, third, ("r0", "unknown"), ("r0", second[1])])
    assert leases == {first[1]: clock() + 10}
    clock.advance(6)
    assert [(late.rollout_id, late.attempt_id) for late in store.overdue()] == [second]
    assert store.heartbeats([]) == {}


def test_many_end_at_once_each_with_its_rewards(store) -> None:
    first, second = claimed(store, 2, max_attempts=2)
    store.add_rewards(*first, [Reward(value=0.25, name="early")])
    outcomes = store.finish_many(
        [ending(second, INFRASTRUCTURE), ending(first, rewards=[Reward(value=0.5, name="format", reward_id="w1")])]
    )
    assert [(rollout.rollout_id, rollout.status, attempt.status) for rollout, attempt in outcomes] == [
        ("r1", "queued", "failed"),
        ("r0", "succeeded", "succeeded"),
    ]
    assert store.rollout("r0").rewards == {"early": 0.25, "format": 0.5, "reward": 1.0}
    assert [reward.name for reward in store.trace(*first).rewards] == ["early", "format"]


def test_the_same_end_again_gives_the_same_answer(store) -> None:
    places = claimed(store, 2)
    endings = [ending(place, rewards=[Reward(value=0.5, name="n", reward_id="w1")]) for place in places]
    assert store.finish_many(endings) == store.finish_many(endings)
    assert [len(store.trace(*place).rewards) for place in places] == [1, 1]
    more = [Reward(value=0.5, name="n", reward_id="another")]
    with pytest.raises(Conflict, match="r1 is no longer yours: it ended as succeeded"):
        store.finish_many([ending(places[1], rewards=more)])


@pytest.mark.parametrize(
    ("second", "error", "match"),
    [
        (ending(("r1", "unknown")), NotFound, "no attempt unknown of rollout r1"),
        (ending(("r0", "FIRST")), Invalid, "is there 2 times"),
        (ending(("r1", "SECOND"), Finish(status="succeeded", reward={"a": 1.0})), Invalid, "rollout r1"),
        (ending(("r1", "SECOND"), rewards=[Reward(value=1.0, reward_id="w1")]), Conflict, "rollout r1.*w1"),
    ],
    ids=["unknown", "twice", "bad reward", "other reward"],
)
def test_where_one_is_refused_none_ends(store, second: Ending, error: type[Exception], match: str) -> None:
    first, other = claimed(store, 2)
    store.add_rewards(*other, [Reward(value=0.5, reward_id="w1")])
    named = {"FIRST": first[1], "SECOND": other[1]}.get(second.attempt_id, second.attempt_id)
    refused = ending((second.rollout_id, named), second.finish, second.rewards)
    with pytest.raises(error, match=match):
        store.finish_many([ending(first, rewards=[Reward(value=0.5, name="n")]), refused])
    assert [store.rollout(name).status for name in ("r0", "r1")] == ["running", "running"]
    assert store.trace(*first).rewards == []


def test_the_statuses_of_many_attempts_are_told_at_once(store) -> None:
    first, second = claimed(store, 2)
    store.finish(*second, SUCCEEDED)
    assert store.statuses([first, second, ("r0", "unknown"), ("r1", first[1])]) == {
        first: "running",
        second: "succeeded",
    }
