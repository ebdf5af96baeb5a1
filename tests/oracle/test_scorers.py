"""The scorers of known data sets: ours and verl's on answers of many forms."""

import contextlib
import io
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_rl.rewards.by_data_source import scorer_of
from lightning_rl.rewards.math_answers import boxed

verls: Any = pytest.importorskip("verl.utils.reward_score", exc_type=ImportError)

math_reward: Any = pytest.importorskip("verl.utils.reward_score.math_reward", exc_type=ImportError)

pytestmark = pytest.mark.oracle

PARTS = [
    "1", "2", "34", "1,234", "0.5", ".5", "-3", "/", "x = ", "x", " ", "{", "}", "$", "\\frac{1}{2}", "\\frac12",
    "\\dfrac", "\\sqrt2", "\\sqrt{3}", "\\left(", "\\right)", "^\\circ", "^{\\circ}", "\\%", "\\$", "\\!",
    "\\text{ cm}", "\\text{and}", "units", "dollars", "a ", "an ", "\\pi", "\\boxed{", "}", "\\boxed ", "Answer: ",
    "answer:", "#### ", "\n", "the ", ".", "<answer>", "</answer>", "Paris", "paris!",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)
VALUES = st.lists(st.sampled_from(PARTS[:26]), min_size=1, max_size=4).map("".join)
ANSWERS = st.one_of(
    TEXTS,
    st.builds(
        lambda before, form, value: before + form.format(value),
        TEXTS,
        st.sampled_from(["\\boxed{{{}}}", "Answer: {}", "#### {}", "<answer>{}</answer>", "\\boxed {}$", "{}"]),
        VALUES,
    ),
)


def verls_score(source: str, answer: str, truth: Any) -> float:
    with contextlib.redirect_stdout(io.StringIO()):
        score = verls.default_compute_score(source, answer, truth)
    return float(score["score"] if isinstance(score, dict) else score)


def has_form(answer: str) -> bool:
    """Whether verl makes a normal form of it: it raises, and then compares letters, of one that ends in `\\frac`."""
    try:
        math_reward.strip_string(answer)
    except (AssertionError, IndexError):
        return False
    return True


@pytest.mark.parametrize("source", ["openai/gsm8k", "lighteval/MATH", "math_dapo"])
@given(answer=ANSWERS, truth=VALUES)
def test_a_score_is_verls(source: str, answer: str, truth: str) -> None:
    scorer = scorer_of(source)
    assert scorer is not None
    if source == "lighteval/MATH":
        assume(has_form(truth) and has_form(boxed(answer) or ""))
    assert scorer(answer, truth)["reward"] == verls_score(source, answer, truth)


@given(answer=ANSWERS, targets=st.lists(VALUES, min_size=1, max_size=3))
def test_a_search_score_is_verls(answer: str, targets: list[str]) -> None:
    scorer = scorer_of("searchR1_nq")
    assert scorer is not None
    truth = {"target": targets}
    assert scorer(answer, truth)["reward"] == verls_score("searchR1_nq", answer, truth)
