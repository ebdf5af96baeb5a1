"""Rewards that come after the end: they win, reach only the attempt that counts, and change nothing else."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.store.contract import ErrorInfo, Finish, Reward, RolloutConfig, RolloutRequest
from lightning_rl.store.errors import Conflict, Invalid, NotFound
from lightning_rl.store.sql import SqlStore

SUCCEEDED = Finish(status="succeeded", reward={"reward": 1.0, "format": 0.5})
AGENT_FAILED = Finish(status="failed", error=ErrorInfo(type="ValueError", message="no"))
INFRASTRUCTURE = Finish(status="failed", error=ErrorInfo(type="Gone", message="engine", infrastructure=True))


def claimed(store: SqlStore, **config: Any) -> str:
    store.enqueue([RolloutRequest(task={}, rollout_id="r1", config=RolloutConfig(**config))])
    return store.claim("w")[0].attempt.attempt_id


def ended(store: SqlStore, finish: Finish = SUCCEEDED, **config: Any) -> str:
    attempt = claimed(store, **config)
    store.finish("r1", attempt, finish)
    return attempt


def late(store: SqlStore, attempt: str, *rewards: Reward) -> list[Reward]:
    return store.add_rewards("r1", attempt, rewards, late=True)


def test_a_late_reward_wins_even_over_a_returned_one_and_leaves_other_names(store: SqlStore) -> None:
    attempt = ended(store)
    late(store, attempt, Reward(value=0.0), Reward(value=0.25, name="judge"))
    rollout = store.rollout("r1")
    assert (rollout.reward, rollout.rewards) == (0.0, {"reward": 0.0, "format": 0.5, "judge": 0.25})
    assert (rollout.attempts[0].reward, rollout.attempts[0].rewards) == (rollout.reward, rollout.rewards)
    trace = store.traces(["r1"])["r1"]
    assert (trace.rollout.rewards, len(trace.attempts[0].rewards)) == (rollout.rewards, 2)


def test_who_was_given_rewards_since_is_told(store: SqlStore) -> None:
    attempt = ended(store)
    _, before = store.rewarded()
    assert store.rewarded(before) == ([], before)
    late(store, attempt, Reward(value=2.0), Reward(value=0.5, name="judge"))
    found, now = store.rewarded(before)
    assert (found, now > before) == (["r1"], True)
    assert store.rewarded(now) == ([], now)
    assert store.rewarded() == ([], now)
    store.enqueue([RolloutRequest(task={}, rollout_id="r2")])
    (claim,) = store.claim("w")
    store.add_rewards("r2", claim.attempt.attempt_id, [Reward(value=1.0)])
    assert store.rewarded(now)[0] == ["r2"]


def test_among_late_rewards_the_last_of_a_name_wins(store: SqlStore) -> None:
    attempt = ended(store)
    late(store, attempt, Reward(value=2.0), Reward(value=3.0))
    assert store.rollout("r1").reward == 3.0
    late(store, attempt, Reward(value=-1.0))
    assert store.rollout("r1").reward == -1.0


def test_a_late_reward_of_a_call_is_kept_for_that_call_and_changes_no_other(store: SqlStore) -> None:
    attempt = ended(store)
    given = Reward(value=9.0, call_id="c1", reward_id="w1")
    late(store, attempt, given)
    assert store.rollout("r1").rewards == {"reward": 1.0, "format": 0.5}
    assert store.trace("r1", attempt).rewards == [given]


def test_an_attempt_that_gave_no_reward_has_the_late_one_for_its_final_one(store: SqlStore) -> None:
    attempt = ended(store, Finish(status="succeeded"))
    late(store, attempt, Reward(value=0.5))
    assert store.rollout("r1").reward == 0.5


def test_an_attempt_whose_agent_failed_takes_late_rewards_and_stays_failed(store: SqlStore, clock: Any) -> None:
    attempt = ended(store, AGENT_FAILED)
    before = store.rollout("r1")
    clock.advance(5)
    late(store, attempt, Reward(value=0.5))
    after = store.rollout("r1")
    assert (after.status, after.reward) == ("failed", 0.5)
    told = {"reward": None, "rewards": {}}
    assert msgspec.structs.replace(after, attempts=[], **told) == msgspec.structs.replace(before, attempts=[], **told)


def test_an_attempt_past_its_deadline_counts_and_takes_late_rewards(store: SqlStore, clock: Any) -> None:
    attempt = claimed(store, timeout_seconds=5)
    clock.advance(6)
    store.sweep()
    late(store, attempt, Reward(value=0.5))
    assert store.rollout("r1").reward == 0.5


def test_only_who_may_give_late_rewards_may(store: SqlStore) -> None:
    attempt = ended(store)
    with pytest.raises(Conflict, match="succeeded"):
        store.add_rewards("r1", attempt, [Reward(value=0.0)])
    assert store.rollout("r1").reward == 1.0


def test_a_superseded_attempt_takes_none_and_names_the_one_that_counts(store: SqlStore, clock: Any) -> None:
    superseded = ended(store, INFRASTRUCTURE)
    with pytest.raises(Conflict, match=f"{superseded} of rollout r1 is failed and does not count: .* queued"):
        late(store, superseded, Reward(value=0.0))
    clock.advance(60)  # as long as it pauses, at most
    (claim,) = store.claim("w")
    store.finish("r1", claim.attempt.attempt_id, SUCCEEDED)
    with pytest.raises(Conflict, match=f"so reward attempt {claim.attempt.attempt_id}"):
        late(store, superseded, Reward(value=0.0))
    assert store.rollout("r1").reward == 1.0
    assert store.trace("r1", superseded).rewards == []


def test_an_attempt_that_infrastructure_ended_takes_none(store: SqlStore) -> None:
    attempt = ended(store, INFRASTRUCTURE, max_attempts=1)
    with pytest.raises(Conflict, match="none of its attempts takes late rewards"):
        late(store, attempt, Reward(value=0.0))


def test_a_cancelled_attempt_takes_none(store: SqlStore) -> None:
    attempt = claimed(store)
    store.cancel("r1")
    with pytest.raises(Conflict, match="is cancelled and does not count"):
        late(store, attempt, Reward(value=0.0))


def test_a_running_attempt_takes_them_as_any_other(store: SqlStore) -> None:
    attempt = claimed(store)
    late(store, attempt, Reward(value=0.0), Reward(value=0.25, name="judge"))
    _, told = store.finish("r1", attempt, SUCCEEDED)
    assert told.rewards == {"reward": 1.0, "format": 0.5, "judge": 0.25}, "a returned one comes after it"


def test_a_late_reward_is_given_once_by_its_id(store: SqlStore) -> None:
    attempt = ended(store)
    first, second = Reward(value=0.5, reward_id="w1"), Reward(value=0.25, reward_id="w2")
    assert late(store, attempt, first, first) == [first, first]
    late(store, attempt, second)
    late(store, attempt, first)  # a repeat: it does not come after the second
    assert (store.rollout("r1").reward, store.trace("r1", attempt).rewards) == (0.25, [first, second])
    with pytest.raises(Conflict, match="w1"):
        late(store, attempt, Reward(value=0.75, reward_id="w1"))
    with pytest.raises(Conflict, match="w3"):
        late(store, attempt, Reward(value=1.0, reward_id="w3"), Reward(value=2.0, reward_id="w3"))
    assert store.rollout("r1").reward == 0.25


def test_a_bad_late_reward_changes_nothing(store: SqlStore) -> None:
    attempt = ended(store)
    with pytest.raises(Invalid, match="rollout r1"):
        late(store, attempt, Reward(value=0.0), Reward(value=float("nan"), name="judge"))
    with pytest.raises(NotFound, match="nope"):
        late(store, "nope", Reward(value=0.0))
    assert store.rollout("r1").rewards == {"reward": 1.0, "format": 0.5}


def test_finishing_again_the_same_way_is_answered_and_takes_no_late_reward_away(store: SqlStore) -> None:
    attempt = ended(store)
    late(store, attempt, Reward(value=0.0))
    _, told = store.finish("r1", attempt, SUCCEEDED)
    assert (told.reward, store.rollout("r1").reward) == (0.0, 0.0)


def test_late_rewards_outlive_the_store(tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path / 'run.db'}"
    store = SqlStore(url)
    late(store, ended(store), Reward(value=0.0))
    store.close()
    store = SqlStore(url)
    assert store.rollout("r1").rewards == {"reward": 0.0, "format": 0.5}
    store.close()


REWARDS = st.builds(
    Reward,
    value=st.sampled_from([-1.0, 0.0, 0.5, 1.0]),
    name=st.sampled_from(["reward", "format", "judge"]),
    call_id=st.sampled_from([None, None, "c1"]),
    reward_id=st.sampled_from([None, "w1", "w2"]),
)


@given(
    st.lists(REWARDS, max_size=5),
    st.dictionaries(st.sampled_from(["format", "judge"]), st.sampled_from([2.0, 3.0]), max_size=2),
    st.lists(st.lists(REWARDS, max_size=3), max_size=5),
)
def test_whatever_comes_when_the_last_new_one_of_a_name_holds(
    emitted: list[Reward], returned: dict[str, float], batches: list[list[Reward]]
) -> None:
    store = SqlStore("sqlite://")
    attempt = claimed(store)
    known: dict[str, Reward] = {}

    def give(batch: list[Reward], *, late: bool) -> list[Reward]:
        """Those of the batch that are new, or none where it is refused."""
        new, ids = [], dict(known)
        for reward in batch:
            if reward.reward_id is None or reward.reward_id not in ids:
                new.append(reward)
                ids |= {reward.reward_id: reward} if reward.reward_id is not None else {}
            elif ids[reward.reward_id] != reward:
                with pytest.raises(Conflict):
                    store.add_rewards("r1", attempt, batch, late=late)
                return []
        store.add_rewards("r1", attempt, batch, late=late)
        known.update(ids)
        return new

    expected: dict[str, float] = {}
    for reward in give(emitted, late=False):
        expected |= {reward.name: reward.value} if reward.call_id is None else {}
    store.finish("r1", attempt, Finish(status="succeeded", reward=returned | {"reward": 4.0} if returned else None))
    expected |= returned | {"reward": 4.0} if returned else {}
    for batch in batches:
        for reward in give(batch, late=True):
            expected |= {reward.name: reward.value} if reward.call_id is None else {}
        rollout = store.rollout("r1")
        assert (rollout.rewards, rollout.reward) == (expected, expected.get("reward"))
        assert rollout.status == "succeeded"
    assert store.rollout("r1").rewards == expected
    store.close()
