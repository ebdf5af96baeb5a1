"""A task's `data_source` names its scorer; whether the scores are verl's, `tests/oracle` shows."""

import pytest

from lightning_rl.rewards.by_data_source import DataSourceReward, scorer_of, unscored
from lightning_rl.rewards.checked import RewardError
from tests.lightning_rl.rewards.rollouts import finished

SEARCH = {"target": ["The Eiffel Tower", "Tour Eiffel"]}


@pytest.mark.parametrize(
    ("source", "truth", "answer", "reward"),
    [
        ("openai/gsm8k", "1234", "2 + 2 = 4\n#### 7\n#### 1,234", 1.0),
        ("openai/gsm8k", "1234", "The answer is 1234.", 0.0),
        ("openai/gsm8k", "4", "#### 4" + " " * 300, 0.0),
        ("openai/gsm8k", "4", "#### 4" + " " * 294, 1.0),
        ("HuggingFaceH4/MATH-500", "\\frac{1}{2}", "so \\boxed{0.5}", 1.0),
        ("lighteval/MATH", "\\frac{3}{4}", "\\boxed{1}, no, \\boxed{x = 3/4}", 1.0),
        ("lighteval/MATH", "\\frac{3}{4}", "\\boxed{\\dfrac34}", 1.0),
        ("lighteval/MATH", "90", "$\\boxed{90^\\circ}$", 1.0),
        ("lighteval/MATH", "\\sqrt{2}", "\\boxed{\\sqrt2}", 1.0),
        ("lighteval/MATH", "\\frac{1}{2}", "\\boxed{\\frac{2}{4}}", 0.0),
        ("lighteval/MATH", "\\frac12", "\\boxed{1/2}", 1.0),
        ("lighteval/MATH", "5", "5", 0.0),
        ("lighteval/MATH", "5", "$\\boxed 4$, no, $\\boxed 5$ it is", 1.0),
        ("lighteval/MATH", "5", "\\boxed{5}, so \\boxed(4)", 0.0),
        ("lighteval/MATH", "\\frac{3}{4}", "\\boxed{\\frac{3}{4}}", 1.0),
        ("lighteval/MATH", "3", "\\boxed{3\\text{ cm}}", 1.0),
        ("lighteval/MATH", "0.25", "\\boxed{.25}", 1.0),
        ("lighteval/MATH", "\\frac{-1}{2}", "\\boxed{-1/2}", 1.0),
        ("lighteval/MATH", "5", "\\boxed{abc=5}", 0.0),  # a name has two letters at most
        ("lighteval/MATH", "z=y=5", "\\boxed{x=y=5}", 0.0),
        ("aime2024", "204", "Answer: 113\nAnswer: $204$", 1.0),
        ("math_dapo", "34", "Answer: 34 units", 1.0),
        ("math_dapo", "34", "\\boxed{34}", 1.0),
        ("math_dapo", "34", "Answer: 35, or \\boxed{34}", -1.0),
        ("math_dapo", "34", "34", -1.0),
        ("math_dapo", "$34$", "the answer : x = 34", 1.0),
        ("math_dapo", "1234", "Answer: 1,234", 1.0),
        ("math_dapo", "34", "Answer: 34" + " " * 300, -1.0),
        ("math_dapo", "34", "\\boxed{34}" + " " * 89, 1.0),
        ("math_dapo", "34", "\\boxed{34}" + " " * 100, -1.0),
        ("searchR1_nq", SEARCH, "<answer>Rome</answer> <answer> the eiffel tower! </answer>", 1.0),
        ("searchR1_nq", SEARCH, "<answer>tour eiffel</answer>" * 11, 0.25),
        ("searchR1_nq", SEARCH, "The Eiffel Tower", 0.0),
        ("searchR1_nq", {"target": "Rome"}, "<answer>\nRome\n</answer>", 1.0),
        ("searchR1_nq", SEARCH, "<answer>an Eiffel tower</answer>" * 10, 1.0),
        ("searchR1_nq", SEARCH, "</answer>" * 11 + "<answer>Tour Eiffel</answer>", 0.25),
    ],
)
def test_an_answer_is_scored_by_its_data_set(source: str, truth: object, answer: str, reward: float) -> None:
    task = {"data_source": source, "reward_model": {"ground_truth": truth}}
    [score] = DataSourceReward()([finished(answer, task=task)])
    assert score["reward"] == reward
    assert score.keys() == ({"reward", "acc"} if scorer_of(source) is scorer_of("math") else {"reward"})


def test_what_has_no_scorer_is_named() -> None:
    assert unscored([{"data_source": "aime2025"}, {"data_source": "openai/gsm8k"}]) is None
    told = unscored([{"data_source": "openai/gsm8k"}, {"data_source": "apps"}, {"prompt": "x"}])
    assert told is not None
    assert told.startswith("`data_source` is 'apps', None, and scorers are there for openai/gsm8k, lighteval/MATH, ")
    assert str(unscored(["a task"])).startswith("no task has a `data_source`")
    with pytest.raises(RewardError, match="rollout r0: there is no scorer for `data_source` 'sums'"):
        DataSourceReward()([finished("4")])


def test_a_ground_truth_of_another_form_is_an_error_that_names_the_rollout() -> None:
    task = {"data_source": "searchR1_nq", "reward_model": {"ground_truth": "x"}}
    with pytest.raises(RewardError, match=r"rollout r0: .* is 'x'; make it a dict with \"target\""):
        DataSourceReward()([finished("4", task=task)])
    task = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": 4}}
    with pytest.raises(RewardError, match=r"rollout r0: .* is 4; make it text"):
        DataSourceReward()([finished("4", task=task)])
