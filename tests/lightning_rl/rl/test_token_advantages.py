"""Advantages of tokens by hand, against verl's numbers, and what they must not depend on."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.rl.advantages import ESTIMATORS, OfTokens
from lightning_rl.rl.baselines import BaselineSettings, EstimatorError, Floats
from lightning_rl.rl.token_advantages import (
    TokenTree,
    discounted_returns,
    gae,
    gae_of_trees,
    optimal_token_baseline,
    reinforce_plus_plus,
    tir_optimal_token_baseline,
)
from tests.lightning_rl.rl.golden import whiten

RAW = BaselineSettings(lone_raw=True)
TOKENS = [name for name, found in ESTIMATORS.items() if isinstance(found, OfTokens) and name != "gae"]


def floats(*values: float) -> Floats:
    return np.array(values, dtype=np.float64)


def test_gae_along_a_branch_by_hand() -> None:
    # One token each, gamma 0.5, lambda 0.5: A3 = 2 - 1, A2 = 0 + .5*1 - .5 + .25*A3, A1 = 1 + .5*.5 - 0 + .25*A2.
    advantages, returns = gae(
        [None, 0, 1], [floats(1), floats(0), floats(2)], [floats(0), floats(0.5), floats(1)], gamma=0.5, lam=0.5
    )
    assert [a.tolist() for a in advantages] == [[1.3125], [0.25], [1.0]]
    assert [r.tolist() for r in returns] == [[1.3125], [0.75], [2.0]]


def test_gae_at_a_fork_goes_on_from_the_mean_of_its_branches() -> None:
    # The branches begin with values 1 and 3 and have rewards 5 and 1: advantages 4 and -2.
    advantages, _ = gae(
        [None, 0, 0], [floats(0, 1), floats(5), floats(1)], [floats(0.5, 1), floats(1), floats(3)], gamma=1.0, lam=0.5
    )
    # Last token of the trunk: 1 + mean(1, 3) - 1 + .5 * mean(4, -2) = 2.5; first: 0 + 1 - .5 + .5 * 2.5.
    assert [a.tolist() for a in advantages] == [[1.75, 2.5], [4.0], [-2.0]]


def test_gae_of_verl() -> None:
    """Its example with gamma 1, lambda 0.95, row by row: observation tokens are not there at all here."""
    values = [
        floats(0.1, 0.2, 0.3),
        floats(0, 0.1, 0.2),
        floats(0.5, 0.4),
        floats(0.1, 0.1, 0.1, 0.1),
        floats(0.3, 0.6),
    ]
    rewards = [floats(0, 0, 1), floats(0, 0, 0), floats(0, 2), floats(0, 0, 0, 0.5), floats(0, 1)]
    _, returns = gae([None] * 5, rewards, values, gamma=1.0, lam=0.95)
    expected = [[0.92675, 0.965, 1], [0.0145, 0.01, 0], [1.92, 2], [0.44295, 0.461, 0.48, 0.5], [0.98, 1]]
    for found, row in zip(returns, expected, strict=True):
        assert found.tolist() == pytest.approx(row, abs=1e-6)


@given(st.data(), st.randoms())
def test_gae_does_not_depend_on_the_order_of_siblings(data: st.DataObject, order: random.Random) -> None:
    branches = data.draw(
        st.lists(
            st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=3), min_size=1, max_size=4
        )
    )

    def trunk(shape: list[list[tuple[float, float]]]) -> list[float]:
        calls = [[(0.0, 0.25), (1.0, 0.5)], *shape]
        advantages, _ = gae(
            [None, *[0] * len(shape)],
            [floats(*(reward for reward, _ in call)) for call in calls],
            [floats(*(value for _, value in call)) for call in calls],
            gamma=0.9,
            lam=0.8,
        )
        return advantages[0].tolist()

    shuffled = list(branches)
    order.shuffle(shuffled)
    assert trunk(shuffled) == pytest.approx(trunk(branches))
    assert trunk([branches[0]] * 3) == pytest.approx(trunk([branches[0]]))  # three like ones are as one


def test_a_call_without_tokens_hands_on_what_comes_after_it() -> None:
    with_empty, _ = gae([None, 0, 1], [floats(0), floats(), floats(1)], [floats(0.5), floats(), floats(0.25)])
    without, _ = gae([None, 0], [floats(0), floats(1)], [floats(0.5), floats(0.25)])
    assert with_empty[0].tolist() == without[0].tolist()


# verl's batch of five rows; a call per stretch of sampled tokens, so that what stands between them is context.
MASK = [[1, 1, 0, 1], [1, 1, 1, 0], [1, 0, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
SCORES = [1.0, 0.0, 2.0, 0.5, 1.0]
GROUPS = list("aabbc")
P_OLD = [[0.5, 0.4, 0.3, 0.6], [0.9, 0.2, 0.5, 0.5], [0.3, 0.5, 0.8, 0.5], [0.25, 0.5, 0.75, 0.9], [0.6, 0.7, 0.5, 0.5]]
VALUES = [[0.1, 0.2, 0.9, 0.3], [0, 0.1, 0.2, 0.9], [0.5, 0.9, 0.4, 0.9], [0.1, 0.1, 0.1, 0.1], [0.3, 0.6, 0.9, 0.9]]


def row(mask: list[int], score: float, p_old: list[float], values: list[float]) -> TokenTree:
    """A row of verl's as a line of calls, the first of them with its first sampled token."""
    places = np.flatnonzero(mask)
    calls = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    rewards = [np.zeros(len(call)) for call in calls]
    rewards[-1][-1] = score
    pi = [np.array(p_old)[call] for call in calls]
    return TokenTree(
        parents=[None, *range(len(calls) - 1)],
        context=[int(call[0] - before) for call, before in zip(calls, [0, *(c[-1] + 1 for c in calls)], strict=False)],
        rewards=rewards,
        log_probs=[np.log(p) for p in pi],
        sum_pi_squared=[p**2 + (1 - p) ** 2 for p in pi],
        values=[np.array(values)[call] for call in calls],
    )


ROWS = [row(*given_row) for given_row in zip(MASK, SCORES, P_OLD, VALUES, strict=True)]


def advantages(
    name: str, trees: list[TokenTree], groups: list[str], settings: BaselineSettings = RAW
) -> list[list[float]]:
    """Of each rollout its tokens' advantages, one call after the other."""
    estimator = ESTIMATORS[name]
    assert isinstance(estimator, OfTokens)
    found = [
        np.concatenate([np.zeros(0), *(g - b for g, b in zip(*estimate, strict=True))])
        for estimate in estimator.function(trees, groups, settings)
    ]
    return [values.tolist() for values in (whiten(found) if estimator.whitened else found)]


def close(found: list[list[float]], expected: list[list[float]]) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-6)


def test_gae_whitened_equals_verl() -> None:
    expected = [
        [0.552477, 0.432301, 0.3058],
        [-1.028303, -1.231678, -1.445758],
        [1.707046, 2.057357],
        [-0.389082, -0.353953, -0.316976, -0.278053],
        [0.266876, -0.278053],
    ]
    close(advantages("gae", ROWS, GROUPS, BaselineSettings(gamma=1.0, lam=0.95)), expected)


def test_reinforce_plus_plus_equals_verl() -> None:
    settings = BaselineSettings(gamma=0.5)
    returns = [np.concatenate(found.returns).tolist() for found in reinforce_plus_plus(ROWS, GROUPS, settings)]
    close(returns, [[0.25, 0.5, 1], [0, 0, 0], [1, 2], [0.0625, 0.125, 0.25, 0.5], [0.5, 1]])
    expected = [
        [-0.463146, -0.02355, 0.855642],
        [-0.902741] * 3,
        [0.855642, 2.614025],
        [-0.792842, -0.682943, -0.463146, -0.02355],
        [-0.02355, 0.855642],
    ]
    close(advantages("reinforce_plus_plus", ROWS, GROUPS, settings), expected)


def test_tool_tokens_are_no_steps_of_time() -> None:
    [found] = reinforce_plus_plus([row([1, 1, 0, 0, 1], 2.0, [0.5] * 5, [0.0] * 5)], ["g"], BaselineSettings(gamma=0.5))
    assert np.concatenate(found.returns).tolist() == [0.5, 1, 2]


def test_the_token_baseline_for_tools_equals_verl() -> None:
    expected = [
        [0.038462, 0.515873, 0.538922],
        [-0.961538, -0.484127, -0.461078],
        [0.801663, 0.907821],
        [-0.698337, -0.592179, 0.5, 0.5],
        [1, 1],
    ]
    close(advantages("tir_optimal_token_baseline", ROWS, GROUPS), expected)


def test_the_token_baseline_equals_verl_but_where_a_column_has_one_row() -> None:
    """verl: [.038462 .515873 0], [-.961538 -.484127 0], [.801663 .934164], [-.698337 0 .5 .5], [1 1].

    In a column of one row it takes the row's own return for a baseline, so the advantage is 0 whatever came out. And it
    counts the tail beyond the second longest row in tokens, but cuts it by columns: in the third column of group b two
    rows live, and only one of them is compared.
    """
    expected = [
        [0.038462, 0.515873, 1.0],
        [-0.961538, -0.484127, 0.0],  # the reward is 0, and nobody else is there
        [0.801663, 0.934164],
        [-0.698337, 0.5, 0.5 - (2.0 - 0.934164), 0.5],
        [1, 1],
    ]
    close(advantages("optimal_token_baseline", ROWS, GROUPS), expected)


def test_a_group_of_one_has_no_token_baseline() -> None:
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        assert advantages(name, ROWS, GROUPS, BaselineSettings())[4] == [0.0, 0.0]
        assert advantages(name, ROWS, GROUPS, RAW)[4] == [1.0, 1.0]


def test_what_stands_for_the_sum_of_squares_has_its_mean() -> None:
    """Over the tokens that a distribution gives, 1 - pi has the mean of 1 - 2 pi + sum pi^2."""
    pi = np.random.default_rng(0).dirichlet(np.ones(9))
    assert (pi * (1 - pi)).sum() == pytest.approx((pi * (1 - 2 * pi + (pi**2).sum())).sum())


def test_tokens_that_could_not_have_been_others_are_compared_plainly() -> None:
    certain = [TokenTree(parents=[None], context=[1], rewards=[floats(r)], log_probs=[floats(0)]) for r in (0.0, 1.0)]
    assert advantages("optimal_token_baseline", certain, ["g", "g"]) == [[-0.5], [0.5]]


def test_a_token_of_unknown_probability_counts_as_an_unlikely_one() -> None:
    def one(reward: float, log_prob: float) -> TokenTree:
        return TokenTree(parents=[None], context=[1], rewards=[floats(reward)], log_probs=[floats(log_prob)])

    unknown = advantages("optimal_token_baseline", [one(1, np.nan), one(0, np.log(0.5))], ["g", "g"])
    assert unknown == advantages("optimal_token_baseline", [one(1, -1e9), one(0, np.log(0.5))], ["g", "g"])
    assert unknown[0] == pytest.approx([1 - 1 / 1.5])


def test_gae_says_what_it_lacks() -> None:
    tree = TokenTree(parents=[None], context=[1], rewards=[floats(1)], log_probs=[floats(0)])
    with pytest.raises(EstimatorError, match="gae needs a critic's value"):
        gae_of_trees([tree], ["g"], BaselineSettings())


@pytest.mark.parametrize("values", [[], [floats()], [floats(3.0)], [floats(2.0), floats(2.0, 2.0)]])
def test_whitening_none_one_or_like_tokens_is_finite(values: list[Floats]) -> None:
    """verl's raises for a batch of one token and for one of none."""
    assert [of_call.tolist() for of_call in whiten(values)] == [[0.0] * len(of_call) for of_call in values]


NUMBER = st.floats(-2, 2)


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    """Calls that continue any earlier one, some without tokens."""
    parents = [draw(st.sampled_from([None, *range(call)])) for call in range(draw(st.integers(0, 5)))]
    tokens = [draw(st.lists(st.tuples(NUMBER, st.floats(-3, 0)), max_size=3)) for _ in parents]
    return TokenTree(
        parents=parents,
        context=[draw(st.integers(0, 3)) for _ in parents],
        rewards=[floats(*(reward for reward, _ in call)) for call in tokens],
        log_probs=[floats(*(log_prob for _, log_prob in call)) for call in tokens],
    )


STEPS = st.lists(st.tuples(trees(), st.sampled_from("ab")), max_size=5)


@given(STEPS, st.sampled_from(TOKENS), st.randoms(), st.booleans())
def test_the_order_of_rollouts_changes_nothing(
    step: list[tuple[TokenTree, str]], name: str, order: random.Random, lone_raw: bool
) -> None:
    settings = BaselineSettings(gamma=0.9, lone_raw=lone_raw)
    places = list(range(len(step)))
    order.shuffle(places)
    shuffled = [step[place] for place in places]
    found = advantages(name, [tree for tree, _ in step], [group for _, group in step], settings)
    again = advantages(name, [tree for tree, _ in shuffled], [group for _, group in shuffled], settings)
    close(again, [found[place] for place in places])


@given(STEPS, st.sampled_from(TOKENS), st.integers(0, 2))
def test_cutting_a_call_in_two_changes_nothing(step: list[tuple[TokenTree, str]], name: str, at: int) -> None:
    """What one call samples, two in a line may: the second continues the first with nothing in between."""

    def halved(tree: TokenTree) -> TokenTree:
        def both(arrays: list[Floats]) -> list[Floats]:
            return [part for of_call in arrays for part in (of_call[:at], of_call[at:])]

        return TokenTree(
            parents=[
                p for call, parent in enumerate(tree.parents)
                for p in (None if parent is None else 2 * parent + 1, 2 * call)
            ],
            context=[tokens for given_tokens in tree.context for tokens in (given_tokens, 0)],
            rewards=both(list(tree.rewards)),
            log_probs=both(list(tree.log_probs)),
        )  # fmt: skip

    groups = [group for _, group in step]
    close(
        advantages(name, [halved(tree) for tree, _ in step], groups, BaselineSettings(gamma=0.9)),
        advantages(name, [tree for tree, _ in step], groups, BaselineSettings(gamma=0.9)),
    )


@given(st.lists(st.lists(NUMBER, min_size=1, max_size=3), min_size=1, max_size=4), st.randoms(), NUMBER)
def test_the_order_of_siblings_and_how_often_one_stands_there_change_nothing(
    branches: list[list[float]], order: random.Random, other: float
) -> None:
    def trunk(shape: list[list[float]]) -> list[float]:
        calls = [floats(0.5, 0.25), *(floats(*call) for call in shape)]
        tree = TokenTree(
            parents=[None, *[0] * len(shape)],
            context=[1] * len(calls),
            rewards=calls,
            log_probs=[-abs(c) for c in calls],
        )
        rival = TokenTree(parents=[None], context=[1], rewards=[floats(other, other)], log_probs=[floats(-1, -1)])
        [mine, _] = tir_optimal_token_baseline([tree, rival], ["g", "g"], BaselineSettings())
        return (mine.returns[0] - mine.baselines[0]).tolist() + mine.returns[0].tolist()

    shuffled = list(branches)
    order.shuffle(shuffled)
    assert trunk(shuffled) == pytest.approx(trunk(branches))
    assert trunk([branches[0]] * 3) == pytest.approx(trunk([branches[0]]))


def test_a_fork_has_one_voice_in_a_column() -> None:
    """Three equal samples beside one of another rollout: the baseline is between the two, not three to one."""
    fork = TokenTree(parents=[None] * 3, context=[1] * 3, rewards=[floats(1)] * 3, log_probs=[floats(-1)] * 3)
    line = TokenTree(parents=[None], context=[1], rewards=[floats(0)], log_probs=[floats(-1)])
    found = optimal_token_baseline([fork, line], ["g", "g"], BaselineSettings())
    assert found[1].baselines[0].tolist() == pytest.approx([0.5])


@given(st.sampled_from(TOKENS), st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=6))
def test_extreme_rewards_stay_finite(name: str, scores: list[float]) -> None:
    given_trees = [
        TokenTree(parents=[None], context=[1], rewards=[floats(0, score)], log_probs=[floats(-1, -2)])
        for score in scores
    ]
    found = advantages(name, given_trees, ["g"] * len(scores))
    assert np.isfinite(found).all()


@pytest.mark.parametrize("name", TOKENS)
def test_nothing_at_all(name: str) -> None:
    empty = TokenTree(parents=[], context=[], rewards=[], log_probs=[])
    silent = TokenTree(parents=[None], context=[1], rewards=[floats()], log_probs=[floats()])
    assert advantages(name, [], []) == []
    assert advantages(name, [empty, silent], ["g", "g"]) == [[], []]


def test_returns_at_a_fork_are_the_mean_of_its_branches() -> None:
    found = discounted_returns([None, 0, 0], [floats(0, 0), floats(4), floats(2)], 0.5)
    assert [of_call.tolist() for of_call in found] == [[0.75, 1.5], [4], [2]]
