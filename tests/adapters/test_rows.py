"""Laws 1 to 3 on rows: exact tokens at their places, nothing lost, each sampled token trained exactly once."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lightning_rl_adapters import credit, forest, rows
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.rows import Row
from lightning_rl_adapters.triplet import prompt_ids, triplets
from tests.adapters.forests import attempts, make_call


def cut(calls: list[Call], max_tokens: int | None = None) -> list[Row]:
    built = forest.build(calls)
    return rows.cut(built, credit.final_values(built, 1.0), max_tokens=max_tokens)


def trained(cut_rows: list[Row]) -> Counter[int]:
    return Counter(token for row in cut_rows for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask)


@given(attempts())
def test_each_sampled_token_has_mask_1_in_exactly_one_row(calls: list[Call]) -> None:
    sampled = Counter(token for call in calls if call.delivered for token in call.response_ids)
    assert trained(cut(calls)) == sampled


@given(attempts(), st.integers(1, 40))
def test_tokens_are_conserved_when_rows_are_dropped(calls: list[Call], max_tokens: int) -> None:
    cut_rows = cut(calls, max_tokens)
    kept = trained([row for row in cut_rows if row.excluded is None])
    dropped = trained([row for row in cut_rows if row.excluded is not None])
    assert kept + dropped == Counter(t for call in calls if call.delivered for t in call.response_ids)
    assert not kept & dropped
    built = forest.build(calls)
    for row, leaf in zip(cut_rows, built.leaves(), strict=True):
        assert (row.excluded == "overlong") == (len(row.token_ids) > max_tokens), leaf


@given(attempts())
def test_a_row_is_its_path_token_by_token(calls: list[Call]) -> None:
    built = forest.build(calls)
    for row, leaf in zip(cut(calls), built.leaves(), strict=True):
        expected = [t for node in leaf.path() for t in node.call.prompt_ids + node.call.response_ids]
        assert row.token_ids == expected
        lengths = {
            len(column)
            for column in (
                row.loss_mask, row.logprobs, row.rewards, row.policy_versions, row.call_ids, row.temperature,
            )
        }  # fmt: skip
        assert lengths == {len(row.token_ids)}


@given(attempts())
def test_a_trained_token_carries_its_own_call_logprob_and_version(calls: list[Call]) -> None:
    by_token = {
        token: (call.call_id, logprob, call.number)
        for call in calls
        for token, logprob in zip(call.response_ids, call.logprobs or [], strict=True)
    }
    for row in cut(calls):
        for i, mask in enumerate(row.loss_mask):
            if mask:
                expected = by_token[row.token_ids[i]]
                assert (row.call_ids[i], row.logprobs[i], row.policy_versions[i]) == expected
            else:
                assert row.call_ids[i] is row.logprobs[i] is row.policy_versions[i] is None
                assert row.rewards[i] == 0


@given(attempts())
def test_each_call_gets_its_reward_once_on_its_last_token(calls: list[Call]) -> None:
    built = forest.build(calls)
    given_rewards = {call_id: float(i + 1) for i, call_id in enumerate(built.nodes)}
    found: Counter[str] = Counter()
    for row in rows.cut(built, given_rewards):
        for i, reward in enumerate(row.rewards):
            if reward:
                call_id = row.call_ids[i]
                assert call_id is not None
                assert row.token_ids[i] == built.nodes[call_id].call.response_ids[-1]
                found[call_id] += 1
                assert reward == given_rewards[call_id]
    assert found == Counter(c.call_id for c in calls if c.delivered and c.response_ids)


def test_fan_out_then_continuing_one_branch_is_three_rows() -> None:
    """P->A, P->B, P->C, then continue A."""
    calls = [make_call(0, None), make_call(1, 0), make_call(2, 0), make_call(3, 0), make_call(4, 1)]
    cut_rows = cut(calls)
    assert [sorted({c for c in row.call_ids if c}) for row in cut_rows] == [["c0", "c1", "c4"], ["c2"], ["c3"]]


def test_the_trunk_goes_to_the_branch_that_arrived_first() -> None:
    calls = [make_call(0, None), make_call(1, 0), make_call(2, 0)]
    first, second = cut(calls)
    assert "c0" in first.call_ids
    assert "c0" not in second.call_ids


def test_dropping_a_row_does_not_drop_a_trunk_whose_sibling_trains() -> None:
    calls = [make_call(0, None), make_call(1, 0, response=30), make_call(2, 0)]
    first, second = cut(calls, max_tokens=20)
    assert first.excluded == "overlong"
    assert second.excluded is None
    assert "c0" in second.call_ids


def test_an_undelivered_call_is_left_out_by_name() -> None:
    first, second = cut([make_call(0, None), make_call(1, 0), make_call(2, 0, delivered=False)])
    assert first.excluded is None
    assert (second.excluded, second.excluded_calls) == ("undelivered", {"c2": "undelivered"})
    assert not any(second.loss_mask)


def test_a_row_with_a_call_that_nobody_told_the_tokens_of_is_inexact_and_left_out() -> None:
    """Call 1 is unknown: its branch is inexact, whatever comes after; its sibling trains, and the trunk with it."""
    unknown = make_call(1, 0, prompt=0, response=0, exact=False)
    calls = [make_call(0, None), unknown, make_call(2, 1), make_call(3, 0)]
    first, second = cut(calls)
    assert (first.exact, first.excluded) == (False, "inexact")
    assert first.token_ids == [0, 1, 50, 51, 200, 201, 250, 251]
    assert (second.exact, second.excluded, sum(second.loss_mask)) == (True, None, 4)
    assert "c0" in second.call_ids
    built = forest.build(calls)
    assert [triplet.exact for triplet in triplets(built, {})] == [True, False, False, True]


def test_a_row_of_no_tokens_at_all_is_a_row() -> None:
    [row] = cut([make_call(0, None, prompt=0, response=0, exact=False)], max_tokens=1)
    assert (row.token_ids, row.loss_mask, row.rewards, row.excluded) == ([], [], [], "inexact")


def test_a_frozen_models_row_keeps_its_mask_and_is_left_out() -> None:
    [row] = cut([make_call(0, None, trainable=False)])
    assert (row.exact, row.excluded, row.loss_mask) == (True, "frozen", [0, 0, 1, 1])


@given(attempts())
def test_triplets_hold_whole_prompts(calls: list[Call]) -> None:
    built = forest.build(calls)
    for triplet in triplets(built, credit.final_values(built, 0.5)):
        node = built.nodes[triplet.call_id]
        assert triplet.prompt_token_ids == prompt_ids(node)
        assert triplet.prompt_token_ids[-len(node.call.prompt_ids) :] == node.call.prompt_ids
        assert triplet.response_token_ids == node.call.response_ids
        assert triplet.reward == 0.5
