"""Which tasks make a batch, and which groups of rollouts a step trains."""

from itertools import islice

import pytest
from msgspec.structs import replace

from lightning_rl.config import compose
from lightning_rl.config.schema import FilterGroups
from lightning_rl.ppo.collector import Collected, Purpose, requests, shuffled_batches, together, why_not, with_variance
from lightning_rl.ppo.off_policy.schedules import Async
from lightning_rl.ppo.reporting import rollout_metrics
from lightning_rl.store.contract import ErrorInfo
from lightning_rl.trajectories.trajectory import Trajectory
from lightning_rl_adapters.call import VersionRange
from tests.adapters.forests import make_call
from tests.lightning_rl.ppo.test_batch import rollout


def sampled_by(*versions: int) -> Trajectory:
    """A rollout whose call has a token of each version."""
    ranges = [VersionRange(version, at, at + 1) for at, version in enumerate(versions)]
    return rollout("r", replace(make_call(0, None, response=len(versions)), versions=ranges))


@pytest.mark.parametrize(
    ("versions", "now", "reason"),
    [((3, 5), 5, None), ((3, 5), 6, "stale"), ((5, 3), 6, "stale"), ((6,), 6, None), ((), 6, None)],
)
def test_a_group_is_stale_whose_oldest_token_is_older_than_the_bound(
    versions: tuple[int, ...], now: int, reason: str | None
) -> None:
    group = [sampled_by(6), sampled_by(*versions)]
    assert why_not(FilterGroups(), Async(1, 2), group, {"": now}) == reason


def test_rollouts_and_groups_are_the_runs_own() -> None:
    purpose = Purpose(name="train-0-3", mode="train", step=3, run="4f2a", resources_id="s")
    asked = requests(compose(), purpose, [(7, {"question": "?"})], 2)
    assert [one.rollout_id for one in asked] == ["train-0-3-7-0.4f2a", "train-0-3-7-1.4f2a"]
    assert {one.group_id for one in asked} == {"train-0-3-7.4f2a"}


def test_a_group_is_stale_where_it_is_to_one_of_several_policies() -> None:
    old, new = sampled_by(3), sampled_by(6)
    group = [replace(new, of_policies={"p": new, "q": old})]
    found = [why_not(FilterGroups(), Async(1, 2), group, {"p": 6, "q": now}) for now in (5, 6)]
    assert found == [None, "stale"]


def test_rewards_of_policies_alone_are_no_failure_of_the_rollout() -> None:
    whole = replace(rollout("r"), agent_failed=True, reward=0.0)
    white, black = (replace(rollout("r"), reward=reward) for reward in (1.0, -0.5))
    failed = replace(rollout("r"), agent_failed=True, reward=0.0)
    found = together(whole, {"white": white, "black": black, "referee": failed})
    assert (found.agent_failed, found.reward, found.rewards.final) == (False, 0.25, 0.25)
    assert found.of("black").reward == -0.5
    referee = found.of("referee")
    assert (referee.agent_failed, referee.reward, referee.rewards.final) == (False, 0.25, 0.25)
    assert together(whole, {"white": failed, "black": failed}).agent_failed
    raised = replace(whole, error=ErrorInfo(type="ValueError", message="a bug"))
    assert together(raised, {"white": white, "black": black}).agent_failed
    rewarded = replace(whole, agent_failed=False, reward=0.5)
    assert together(rewarded, {"white": white, "black": black}).reward == 0.5


def test_a_greedy_rollout_makes_no_group_stale() -> None:
    group = [sampled_by(6), replace(sampled_by(1), group_id="greedy-g")]
    assert why_not(FilterGroups(), Async(1, 2), group, {"": 6}) is None


def test_of_groups_that_differ_as_many_as_a_step_takes_are_trained_and_each_other_has_its_reason() -> None:
    def group(name: str, *rewards: float) -> list[Trajectory]:
        return [rollout(f"{name}{k}", reward=reward, group=name) for k, reward in enumerate(rewards)]

    batches = iter([group("a", 0, 1) + group("b", 1, 1), group("c", 0, 1) + group("d", 1, 0), group("e", 0, 1)])
    rolled_out, trained, reasons = with_variance(batches, 2, "reward")
    assert [one.rollout_id for one in rolled_out] == ["a0", "a1", "b0", "b1", "c0", "c1", "d0", "d1"]
    assert [one.rollout_id for one in trained] == ["a0", "a1", "c0", "c1"]
    assert reasons == {"b": "zero_variance", "d": "surplus"}


def test_what_was_cancelled_before_a_call_and_what_another_session_sampled_counts_in_no_mean_and_no_speed() -> None:
    here = rollout("here", replace(make_call(0, None), start_ns=20, overshoot=1))
    before = rollout("before", replace(make_call(0, None), start_ns=5))
    cancelled, silent = rollout("cancelled"), rollout("silent")
    collected = Collected([here, before, cancelled, silent], [here, before, silent], {"cancelled": "surplus"})
    assert collected.begun == [here, before, silent]
    found = rollout_metrics(collected.begun, seconds=2.0, began_ns=10)
    assert (found["rollouts/without_calls"], found["num_turns/mean"]) == (1.0, 2 / 3)
    assert (found["perf/calls_per_s"], found["perf/tokens_per_s"]) == (0.5, 1.5)


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_has_every_task_once_but_for_the_remainder_and_the_next_another_order(shuffle: bool) -> None:
    config = compose({"data": {"train_batch_size": 3, "shuffle": shuffle, "seed": 1}})
    batches = list(islice(shuffled_batches(config, list("abcdefghi")), 6))
    first, second = ([task for batch in epoch for task in batch] for epoch in (batches[:3], batches[3:]))
    assert sorted(first) == sorted(second) == list(enumerate("abcdefghi"))
    assert (first != second) == shuffle
    with pytest.raises(KeyError) as raised:
        list(islice(shuffled_batches(config, {}.fromkeys(range(1, 9))), 2))  # type: ignore[arg-type]
    assert raised.value.__notes__ == ["raised by train_dataset[0]"]
    [of_seven, again] = islice(shuffled_batches(config, list("abcdefg")), 1, 3)
    assert (len(of_seven), len(again)) == (3, 3)
    assert shuffle or again == [(0, "a"), (1, "b"), (2, "c")]
