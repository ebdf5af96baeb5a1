"""Credit by hand: each strategy on trees small enough to compute in the head, and what every strategy must keep."""

import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from lightning_rl_adapters import credit, forest
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.credit import GROUP, Credit, CreditError, Rewards, Strategy
from lightning_rl_adapters.forest import Forest
from lightning_rl_adapters.media import Placed
from tests.adapters.forests import attempts, make_call


def line(*agents: str | None) -> Forest:
    """Calls c0, c1, ... that continue each other."""
    made = [make_call(i, i - 1 if i else None) for i in range(len(agents))]
    return forest.build([replace(call, agent=agent) for call, agent in zip(made, agents, strict=True)])


def numbers(credits: Mapping[str, Credit]) -> dict[str, float]:
    return {call_id: found.reward for call_id, found in credits.items()}


THREE = line(None, None, None)
STEPS = Rewards(final=1.0, of_calls={"c0": {"tool": 0.5}, "c1": {"tool": -1.0, "format": 0.25}})


@pytest.mark.parametrize(
    ("strategy", "rewards", "expected"),
    [
        (credit.final, Rewards(final=2.0), {"c0": 2.0, "c1": 2.0, "c2": 2.0}),
        (credit.final, STEPS, {"c0": 1.0, "c1": 1.0, "c2": 1.0}),
        (credit.last_call, Rewards(final=2.0), {"c2": 2.0}),
        (credit.discounted(0.5), Rewards(final=2.0), {"c0": 0.5, "c1": 1.0, "c2": 2.0}),
        (credit.discounted(1.0), Rewards(final=2.0), {"c0": 2.0, "c1": 2.0, "c2": 2.0}),
        (credit.per_step, Rewards(final=2.0), {"c2": 2.0}),
        (credit.per_step, STEPS, {"c0": 0.5, "c1": -0.75, "c2": 1.0}),
        (credit.return_to_go(1.0), STEPS, {"c0": 0.75, "c1": 0.25, "c2": 1.0}),
        (credit.return_to_go(0.5), STEPS, {"c0": 0.375, "c1": -0.25, "c2": 1.0}),
        (credit.return_to_go(0.5), Rewards(final=2.0), {"c0": 0.5, "c1": 1.0, "c2": 2.0}),
        (credit.return_to_go(1.0), Rewards(of_calls={"c1": {"tool": 3.0}}), {"c0": 3.0, "c1": 3.0, "c2": 0.0}),
        (credit.per_agent, Rewards(final=2.0, named={"reward": 2.0}), {"c0": 2.0, "c1": 2.0, "c2": 2.0}),
        (credit.leave_one_out, STEPS, {"c0": 1.0, "c1": 1.0, "c2": 1.0}),  # no fork, so nobody to leave out
        (credit.counterfactual, STEPS, {"c0": 1.0, "c1": 1.0, "c2": 1.0}),
        (credit.step_groups(0.5), STEPS, {"c0": 1.0, "c1": 1.0, "c2": 1.0}),
        (credit.step_groups(0.5), Rewards(of_calls={"c1": {"tool": 3.0}}), {"c0": 3.0, "c1": 3.0, "c2": 3.0}),
        (credit.final, Rewards(of_calls={"c1": {"tool": 3.0}}), {"c0": 3.0, "c1": 3.0, "c2": 3.0}),
        (credit.discounted(0.5), Rewards(of_calls={"c1": {"tool": 4.0}}), {"c0": 1.0, "c1": 2.0, "c2": 4.0}),
    ],
)
def test_a_line_of_three_calls(strategy: Strategy, rewards: Rewards, expected: dict[str, float]) -> None:
    assert numbers(credit.assign(strategy, THREE, rewards)) == pytest.approx(expected)


@pytest.mark.parametrize(
    "strategy",
    [credit.by_name(name, gamma=0.9) for name in ("final", "last_call", "discounted", "per_step", "return_to_go",
                                                  "per_agent", "leave_one_out", "counterfactual", "step_groups")],
)  # fmt: skip
def test_without_a_reward_nobody_has_credit(strategy: Strategy) -> None:
    assert credit.assign(strategy, THREE, Rewards()) == {}
    assert credit.assign(strategy, forest.build([]), Rewards(final=1.0)) == {}


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (credit.final, {"c0": 2.0, "c1": 2.0}),
        (credit.counterfactual, {"c0": 2.0, "c1": 2.0}),
        (credit.last_call, {"c1": 2.0}),
        (credit.discounted(0.5), {"c0": 1.0, "c1": 2.0}),
        (credit.per_step, {"c1": 2.0}),
        (credit.return_to_go(0.5), {"c0": 1.0, "c1": 2.0}),
        (credit.step_groups(0.5), {"c0": 2.0, "c1": 2.0}),
        (credit.per_agent, {"c0": 2.0, "c1": 2.0}),
        (credit.leave_one_out, {"c0": 2.0, "c1": 2.0}),
    ],
)
def test_housekeeping_earns_nothing_of_the_task(strategy: Strategy, expected: dict[str, float]) -> None:
    built = line(None, None, "housekeeping")
    assert numbers(credit.assign(strategy, built, Rewards(final=2.0))) == expected


def test_each_agent_has_the_reward_of_its_name_and_is_compared_with_itself() -> None:
    tree = line("write", "check", "write")
    found = credit.assign(credit.per_agent, tree, Rewards(final=1.0, named={"reward": 1.0, "write": 0.25}))
    assert found == {
        "c0": Credit(0.25, "agent:write"),
        "c1": Credit(1.0, credit.GROUP),
        "c2": Credit(0.25, "agent:write"),
    }


def test_an_agent_named_reward_is_not_taken_for_the_final_reward() -> None:
    found = credit.assign(credit.per_agent, line("reward"), Rewards(final=1.0, named={"reward": 1.0}))
    assert found == {"c0": Credit(1.0, credit.GROUP)}


def fork() -> Forest:
    """c0, then c1, c2, c3 from one prompt; c4 continues c2; c5 asks c0 something else."""
    samples = [replace(make_call(i, 0), prompt_ids=[7, 7]) for i in (1, 2, 3)]
    return forest.build([make_call(0, None), *samples, make_call(4, 2), make_call(5, 0)])


def test_samples_of_one_prompt_are_compared_with_each_other() -> None:
    rewards = Rewards(final=1.0, of_calls={"c1": {"test": 1.0}, "c4": {"test": 0.5}})
    found = credit.assign(credit.leave_one_out, fork(), rewards)
    # Branch values: c1 1, c2 0 + 0.5 (of c4), c3 0.
    assert found["c1"] == Credit(1.0 - 0.25, None)
    assert found["c2"] == Credit(0.5 - 0.5, None)
    assert found["c3"] == Credit(0.0 - 0.75, None)
    assert found["c0"] == found["c4"] == found["c5"] == Credit(1.0, credit.GROUP)


def test_samples_are_compared_where_only_what_came_of_one_was_rewarded() -> None:
    found = credit.assign(credit.leave_one_out, fork(), Rewards(final=1.0, of_calls={"c4": {"test": 0.5}}))
    assert [found[call] for call in ("c1", "c2", "c3")] == [Credit(-0.25, None), Credit(0.5, None), Credit(-0.25, None)]


@pytest.mark.parametrize("given", [Rewards(final=1.0), Rewards(of_calls={"c0": {"test": 0.75}, "c1": {"test": 0.25}})])
def test_penalties_of_a_rollout_add_up(given: Rewards) -> None:
    both = credit.with_penalty(credit.with_penalty(given, "overlong", -0.5), "kl", -0.25)
    assert credit.counting(both) == 0.25
    assert both.named == {"overlong": -0.5, "kl": -0.25}


def test_answers_to_other_images_are_no_samples_of_one_prompt() -> None:
    one = [replace(make_call(number, None), prompt_ids=[7], media=[Placed(0, 1, "cat")]) for number in (0, 1)]
    rewards = Rewards(of_calls={"c0": {"test": 1.0}, "c1": {"test": 0.0}})
    assert numbers(credit.assign(credit.leave_one_out, forest.build(one), rewards)) == {"c0": 1.0, "c1": -1.0}
    apart = [one[0], replace(one[1], media=[Placed(0, 1, "dog")])]
    assert credit.assign(credit.leave_one_out, forest.build(apart), rewards) == {}


def test_a_fork_below_a_branch_counts_with_its_mean() -> None:
    below = [make_call(3, 1), make_call(4, 1)]
    samples = [replace(make_call(i, None), prompt_ids=[7]) for i in (1, 2)]
    tree = forest.build([make_call(0, None), *samples, *below])
    rewards = Rewards(of_calls={"c1": {"a": 1.0}, "c3": {"a": 4.0}, "c4": {"a": 2.0}, "c2": {"a": 1.0}})
    found = credit.assign(credit.leave_one_out, tree, rewards)
    assert numbers(found) == {"c1": 1.0 + 3.0 - 1.0, "c2": 1.0 - 4.0}


def test_a_fork_without_rewards_of_its_own_has_the_final_one() -> None:
    found = credit.assign(credit.leave_one_out, fork(), Rewards(final=1.0))
    assert set(found.values()) == {Credit(1.0, credit.GROUP)}


def test_calls_whose_tokens_are_unknown_are_no_samples_of_one_prompt() -> None:
    samples = [replace(make_call(i, None, prompt=0), exact=False) for i in (0, 1)]
    rewards = Rewards(final=1.0, of_calls={"c0": {"test": 1.0}})
    found = credit.assign(credit.leave_one_out, forest.build(samples), rewards)
    assert found == {"c0": Credit(1.0, credit.GROUP), "c1": Credit(1.0, credit.GROUP)}


def test_weighted_sums_of_named_rewards() -> None:
    rewards = Rewards(
        final=9.0,
        named={"correct": 1.0, "short": -2.0, "unused": 5.0},
        of_calls={"c0": {"correct": 1.0, "unused": 1.0}, "c1": {"unused": 4.0}},
    )
    found = credit.weighed(rewards, {"correct": 1.0, "short": 0.25, "absent": 3.0})
    assert found.final == pytest.approx(0.5)
    assert found.of_calls == {"c0": {"reward": 1.0}}
    assert found.named == rewards.named  # agents have rewards by these names
    assert credit.weighed(rewards, {"absent": 3.0}).final is None


def test_a_step_is_compared_with_what_came_of_the_same_prompt() -> None:
    found = credit.assign(credit.step_groups(0.5, 0.25), THREE, STEPS)
    plus = {call_id: given_credit.plus for call_id, given_credit in found.items()}
    expected = numbers(credit.assign(credit.return_to_go(0.5), THREE, STEPS))
    assert {call_id: part.reward for call_id, part in plus.items() if part} == expected
    assert {part.weight for part in plus.values() if part} == {0.25}
    assert all(part and part.compared_with and credit.is_state(part.compared_with) for part in plus.values())
    assert not credit.is_state(credit.GROUP)


def test_a_state_is_the_whole_prompt_however_the_calls_were_cut() -> None:
    """c0 answers [0, 1] with [50, 51] and c1 goes on; another rollout comes to the same tokens in one call."""
    first, second = make_call(0, None), make_call(1, 0)
    whole = [*first.prompt_ids, *first.response_ids, *second.prompt_ids]
    other = replace(make_call(0, None, response=5), prompt_ids=whole)
    states = credit.prompts(forest.build([first, second]))
    assert credit.prompts(forest.build([other])) == {"c0": states["c1"]}
    assert states["c0"] != states["c1"]
    shown, asked = [Placed(1, 1, "cat")], [Placed(0, 2, "dog")]
    apart = credit.prompts(forest.build([replace(first, media=shown), replace(second, media=asked)]))
    behind = len(first.prompt_ids) + len(first.response_ids)
    together = replace(other, media=[*shown, asked[0].moved(behind)])
    assert credit.prompts(forest.build([together])) == {"c0": apart["c1"]}


@pytest.mark.parametrize(
    "change",
    [
        {"model": "another"}, {"prompt_ids": [0]}, {"prompt_ids": [1, 0]}, {"prompt_ids": [0, 1, 50]}, {"media": []},
        {"media": [Placed(0, 1, "dog")]}, {"media": [Placed(1, 1, "cat")]},
    ],
)  # fmt: skip
def test_another_model_token_or_image_is_another_state(change: dict[str, Any]) -> None:
    call = replace(make_call(0, None), media=[Placed(0, 1, "cat")])
    assert credit.prompts(forest.build([call])) != credit.prompts(forest.build([replace(call, **change)]))


def test_where_tokens_are_unknown_there_is_no_state() -> None:
    calls = [replace(make_call(0, None), exact=False), make_call(1, 0), make_call(2, None)]
    assert list(credit.prompts(forest.build(calls))) == ["c2"]
    found = credit.assign(credit.step_groups(1.0), forest.build(calls), Rewards(final=1.0))
    assert [found[call_id].plus is None for call_id in ("c0", "c1", "c2")] == [True, True, False]


@given(attempts())
def test_calls_have_one_state_exactly_if_they_have_one_prompt(calls: list[Call]) -> None:
    tree = forest.build(calls)
    states = credit.prompts(tree)

    def whole(call_id: str) -> tuple[int, ...]:
        *before, last = tree.nodes[call_id].path()
        tokens = [token for node in before for token in (*node.call.prompt_ids, *node.call.response_ids)]
        return (*tokens, *last.call.prompt_ids)

    for one in states:
        for other in states:
            assert (states[one] == states[other]) == (whole(one) == whole(other))


def test_a_function_of_the_users_may_give_numbers() -> None:
    def second(forest: Forest, rewards: Rewards) -> dict[str, Credit | float]:
        return {"c1": 3, "c0": Credit(1.0, None)}

    assert credit.assign(second, THREE, Rewards(final=0.0)) == {"c0": Credit(1.0, None), "c1": Credit(3.0)}


@pytest.mark.parametrize(
    ("given_credit", "message"),
    [
        ({"nobody": 1.0}, "credit was given to call 'nobody'"),
        ({"c0": float("nan")}, "the credit of call c0 is nan"),
        ({"c0": Credit(1.0, plus=Credit(float("inf")))}, "the credit of call c0 is inf"),
        ({"c0": Credit(1.0, weight=float("nan"))}, r"the credit of call c0 is 1\.0 \(weight nan\)"),
    ],
)
def test_what_no_call_can_be_trained_on_is_refused(given_credit: dict[str, float | Credit], message: str) -> None:
    with pytest.raises(CreditError, match=message):
        credit.assign(lambda *_: given_credit, THREE, Rewards())


STRATEGIES = st.sampled_from(
    [credit.by_name(name, gamma=gamma) for gamma in (0.0, 0.5, 1.0) for name in
     ("final", "last_call", "discounted", "per_step", "return_to_go", "per_agent", "leave_one_out", "step_groups")]
)  # fmt: skip


@given(attempts(), STRATEGIES, st.randoms(), st.floats(-10, 10), st.data())
def test_only_arrival_orders_the_calls(
    calls: list[Call], strategy: Strategy, order: random.Random, final: float, data: st.DataObject
) -> None:
    of_calls = {
        call.call_id: {"step": data.draw(st.floats(-10, 10))}
        for call in calls
        if data.draw(st.booleans(), call.call_id)
    }
    rewards = Rewards(final=final, named={"reward": final}, of_calls=of_calls)
    found = credit.assign(strategy, forest.build(calls), rewards)
    shuffled = list(calls)
    order.shuffle(shuffled)
    backwards = Rewards(final=final, named=rewards.named, of_calls=dict(reversed(of_calls.items())))
    assert credit.assign(strategy, forest.build(shuffled), backwards) == found
    assert list(found) == [call.call_id for call in calls if call.call_id in found]


@given(st.permutations([0.0, 1.0, 4.0]))
def test_which_of_equal_siblings_was_rewarded_changes_nothing_but_whose_credit_it_is(
    given_rewards: list[float],
) -> None:
    of_calls = {f"c{i}": {"test": reward} for i, reward in zip((1, 2, 3), given_rewards, strict=True)}
    samples = [replace(make_call(i, 0), prompt_ids=[7, 7]) for i in (1, 2, 3)]
    tree = forest.build([make_call(0, None), *samples])
    found = credit.assign(credit.leave_one_out, tree, Rewards(final=1.0, of_calls=of_calls))
    by_reward = {of_calls[call_id]["test"]: found[call_id].reward for call_id in of_calls}
    assert by_reward == {0.0: -2.5, 1.0: -1.0, 4.0: 3.5}
    assert sum(by_reward.values()) == 0


def test_a_call_is_compared_with_rollouts_that_had_its_prompt_and_else_with_the_group() -> None:
    """b and c go on behind the same answer; a has another one there, and asks its second call twice."""
    begin, second = make_call(0, None, response=1), make_call(1, 0, response=1)
    a = forest.build([replace(begin, response_ids=[7]), second, make_call(2, 0)])
    b, c = (forest.build([begin, replace(second, response_ids=[last])]) for last in (8, 9))
    credits = [credit.assign(credit.counterfactual, one, Rewards(final=1.0)) for one in (a, b, c)]
    ours = credit.resolved(credits, ["g", "g", "g"])
    assert [ours[0][name].compared_with for name in ("c1", "c2")] == [GROUP, GROUP]  # with itself alone
    first = {one["c0"].compared_with for one in ours}
    assert len(first) == 1
    assert first != {GROUP}
    assert ours[1]["c1"].compared_with == ours[2]["c1"].compared_with != GROUP
    assert ours[1]["c1"].compared_with not in first
    apart = credit.resolved(credits, ["g", "g", "other"])
    assert apart[1]["c1"].compared_with == apart[2]["c0"].compared_with == GROUP
    assert credit.resolved(ours, ["g", "g", "g"]) == ours
