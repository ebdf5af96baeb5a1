"""The scorers of known data sets: a task's `data_source` names its own, as verl's `default_compute_score` does.

Invariant: the scores are verl's (`tests/oracle` compares them), of the policy's last answer; a data source without a
scorer is refused before anything is rolled out.
"""

import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lightning_rl.rewards import FinishedRollout
from lightning_rl.rewards.checked import RewardError
from lightning_rl.rewards.functions import task_arguments
from lightning_rl.rewards.math_answers import boxed, in_braces, math_form, minerva_form
from lightning_rl_adapters.credit import FINAL

Score = dict[str, float]  # by name; the final one is `reward`
_LAST = 300  # characters of an answer that GSM8K's and Minerva's scorers read
_LAST_BOXED = 100  # those that are read for a boxed expression, where there is no `Answer:`
_MANY_TAGS = 10  # of <answer> in one text, beyond which it counts a quarter
_OTHERS = "name a function of yours, reward.custom_reward_function.path=FILE.py (docs/concepts/rewards.md)"


def gsm8k(answer: str, truth: str) -> Score:
    """1 where the number behind the last `#### ` is the truth, else 0."""
    numbers = re.findall(r"#### (-?[0-9.,]+)", answer[-_LAST:])
    return {FINAL: float(bool(numbers) and numbers[-1].replace(",", "") == truth)}


def math(answer: str, truth: str) -> Score:
    """1 where the last boxed expression is the truth, by MATH's normal form; else 0."""
    expression = boxed(answer)
    return {FINAL: float(expression is not None and math_form(expression) == math_form(truth))}


def dapo(answer: str, truth: str) -> Score:
    """1 where the text behind the last `Answer:` is the truth, by Minerva's normal form; else -1. `acc` is 1 or 0.

    Without an `Answer:` it is the last boxed expression that must be the truth, letter by letter.
    """
    answers = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", answer[-_LAST:])
    if answers:
        right = minerva_form(answers[-1]) == minerva_form(truth)
    else:
        right = in_braces(answer[-_LAST_BOXED:]) == truth
    return {FINAL: 1.0 if right else -1.0, "acc": float(right)}


def search(answer: str, truth: Mapping[str, Any]) -> Score:
    """1 where the text in the last `<answer>` is one of `target`, without case, articles and punctuation; else 0."""
    answers = re.findall(r"<answer>(.*?)</answer>", answer, re.DOTALL)
    target = truth["target"]
    texts = [target] if isinstance(target, str) else target
    right = bool(answers) and _words(answers[-1]) in [_words(str(text)) for text in texts]
    many = max(answer.count("<answer>"), answer.count("</answer>")) > _MANY_TAGS
    return {FINAL: right * (0.25 if many else 1.0)}


def _words(text: str) -> list[str]:
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


_SCORERS: dict[Callable[[str, Any], Score], str] = {
    gsm8k: "openai/gsm8k",
    math: "lighteval/MATH DigitalLearningGmbH/MATH-lighteval HuggingFaceH4/MATH-500",
    dapo: "math_dapo math math_dapo_reasoning",
    search: "searchR1_nq searchR1_triviaqa searchR1_popqa searchR1_hotpotqa searchR1_2wikimultihopqa searchR1_musique "
    "searchR1_bamboogle",
}
_BY_NAME = {name: scorer for scorer, names in _SCORERS.items() for name in names.split()}


def scorer_of(data_source: Any) -> Callable[[str, Any], Score] | None:
    """The scorer of a data source; None where there is none."""
    if not isinstance(data_source, str):
        return None
    return dapo if data_source.startswith("aime") else _BY_NAME.get(data_source)


def unscored(tasks: Iterable[Any]) -> str | None:
    """Why some of the tasks have no score by their `data_source`; None where all have one."""
    sources: dict[str, None] = {}
    for task in tasks:
        source = task.get("data_source") if isinstance(task, Mapping) else None
        if scorer_of(source) is None:
            sources[repr(source)] = None
    if not sources:
        return None
    missing = "no task has a `data_source`" if list(sources) == ["None"] else f"`data_source` is {', '.join(sources)}"
    return f"{missing}, and scorers are there for {', '.join(_BY_NAME)} and aime*: {_OTHERS}"


class DataSourceReward:
    """A `GroupReward`: each rollout's last answer, scored as its task's `data_source` says."""

    def __call__(self, rollouts: Sequence[FinishedRollout]) -> list[Score]:
        """The rewards of a group's rollouts, in their order.

        Raises:
            RewardError: naming a rollout, whose task has no ground truth, or one of another form than its scorer's.
        """
        return [_scored(rollout) for rollout in rollouts]


def _scored(rollout: FinishedRollout) -> Score:
    arguments = task_arguments(rollout)
    source, truth = arguments["data_source"], arguments["ground_truth"]
    scorer = scorer_of(source)
    if scorer is None:
        raise RewardError(f"rollout {rollout.rollout_id}: there is no scorer for `data_source` {source!r}; {_OTHERS}")
    held = isinstance(truth, Mapping) and "target" in truth if scorer is search else isinstance(truth, str)
    if not held:
        wanted = 'a dict with "target"' if scorer is search else "text"
        raise RewardError(
            f"rollout {rollout.rollout_id}: reward_model.ground_truth of `data_source` {source!r} is {truth!r:.80}; "
            f"make it {wanted}"
        )
    return scorer(rollout.answer, truth)
