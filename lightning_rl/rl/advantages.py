"""Advantages of calls, by any estimator, under verl's names.

An outcome estimator says what a credit is compared with and what the difference is divided by; a token estimator works
on the forest itself. Whatever it is, the rollout is the unit: one of many calls or rows has one voice in its group.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from lightning_rl.rl import baselines, token_advantages
from lightning_rl.rl.baselines import BaselineSettings, EstimatorError, OutcomeEstimator, Outcomes, mean
from lightning_rl.rl.token_advantages import TokenEstimator
from lightning_rl_adapters.credit import GROUP, Credit, is_state

_PLAIN = BaselineSettings()
Voice = tuple[int, str, str | None]  # a rollout, whom it is compared with, and the call that speaks for itself


@dataclass(frozen=True)
class OfOutcomes:
    """An estimator by scores; `whitened` over the batch's trained tokens as a last step. With `needs_greedy` scores are
    compared with that of a greedy rollout of the same task."""

    function: OutcomeEstimator
    whitened: bool = False
    needs_greedy: bool = False


@dataclass(frozen=True)
class OfTokens:
    """An estimator of tokens over the forest. `compared_with` names whose returns the baseline is made of.

    With `needs_values` it is given a critic's values, and trained tokens alone, for no others have one.
    """

    function: TokenEstimator
    whitened: bool = False
    compared_with: str | None = None
    needs_values: bool = False


Estimator = OfOutcomes | OfTokens

ESTIMATORS: Final[dict[str, Estimator]] = {
    "gae": OfTokens(token_advantages.gae_of_trees, whitened=True, needs_values=True),
    "grpo": OfOutcomes(baselines.grpo),
    "grpo_vectorized": OfOutcomes(baselines.grpo),
    "gdpo": OfOutcomes(baselines.gdpo, whitened=True),
    "grpo_passk": OfOutcomes(baselines.grpo_passk),
    "reinforce_plus_plus_baseline": OfOutcomes(baselines.reinforce_plus_plus_baseline, whitened=True),
    "rloo": OfOutcomes(baselines.rloo),
    "rloo_vectorized": OfOutcomes(baselines.rloo),
    "opo": OfOutcomes(baselines.opo),
    "reinforce_plus_plus": OfTokens(token_advantages.reinforce_plus_plus, whitened=True),
    "remax": OfOutcomes(baselines.remax, needs_greedy=True),
    "gpg": OfOutcomes(baselines.gpg),
    "optimal_token_baseline": OfTokens(token_advantages.optimal_token_baseline, compared_with=GROUP),
    "tir_optimal_token_baseline": OfTokens(token_advantages.tir_optimal_token_baseline, compared_with=GROUP),
}


class Estimate(NamedTuple):
    """advantage = (credit - baseline) / scale, and that of `plus`. An infinite scale: nothing can be said."""

    advantage: float
    baseline: float
    scale: float
    plus: "Estimate | None" = None

    @property
    def silent(self) -> bool:
        """Whether there was nobody to compare with."""
        return math.isinf(self.scale) and (self.plus is None or self.plus.silent)

    def whitened(self, centre: float, divisor: float) -> "Estimate":
        """(advantage - centre) / divisor, told by baseline and scale; of a silent estimate, itself."""
        if math.isinf(self.scale):
            plus = None if self.plus is None else self.plus.whitened(centre, divisor)
            return self._replace(advantage=0.0 if plus is None else plus.advantage, plus=plus)
        plus = None if self.plus is None else self.plus.whitened(0.0, divisor)
        advantage = (self.advantage - centre) / divisor
        return Estimate(advantage, self.baseline + centre * self.scale, self.scale * divisor, plus)


def of_calls(
    credits: Sequence[Mapping[str, Credit]],
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    *,
    estimator: OutcomeEstimator = baselines.grpo,
    settings: BaselineSettings = _PLAIN,
    tokens: Sequence[Mapping[str, int]] | None = None,
    named: Sequence[Mapping[str, float]] | None = None,
    greedy: Sequence[float] | None = None,
) -> list[dict[str, Estimate]]:
    """What an outcome estimator makes of credits.

    A call's credit is compared within the group with what each rollout scored there: the mean credit of its calls that
    are compared with the same (`Credit.compared_with`), and its reward where no call of it has any. This baseline is
    one for a whole group, so it says nothing of what happened after the call; one by the place of the call (the second
    with the second) would, since whether there is a second depends on the first. At a state, which a rollout may be in
    more than once, each call speaks for itself.

    Args:
        credits: per rollout, call id -> credit (`credit.resolved`). Length N.
        rewards: the rollouts' own rewards, shape [N].
        groups: the group of each rollout, length N.
        tokens: per rollout, call id -> sampled tokens (all 1 where not given).
        named: per rollout, its named rewards.
        greedy: per rollout, the reward of a greedy rollout of its task; NaN where it has none.

    Returns: per rollout, call id -> estimate; with credit `final` each is that of its rollout.

    Raises EstimatorError where the estimator gives what no call can be trained on.
    """
    lengths = tokens if tokens is not None else [dict.fromkeys(of_calls, 1) for of_calls in credits]
    scores: dict[Voice, float] = {}
    sizes: dict[Voice, int] = {}
    for rollout, (of_rollout, reward, length) in enumerate(zip(credits, rewards, lengths, strict=True)):
        for voice, (voice_rewards, size) in _voices(rollout, of_rollout, reward, length).items():
            scores[voice], sizes[voice] = mean(np.asarray(voice_rewards)), size
    kinds: defaultdict[str, list[Voice]] = defaultdict(list)
    for voice in scores:
        kinds[voice[1].partition(":")[0]].append(voice)
    compared: dict[Voice, tuple[float, float]] = {}
    for kind, voices in kinds.items():
        outcomes = Outcomes.of(
            [scores[voice] for voice in voices],
            [(groups[rollout], name) for rollout, name, _ in voices],
            lengths=[sizes[voice] for voice in voices],
            named=_by_name([named[rollout] for rollout, _, _ in voices] if named else []),
            greedy=None if greedy is None else [greedy[rollout] for rollout, _, _ in voices],
        )
        # A prompt that only one call answered says nothing, whatever is held of a rollout without others.
        rules = replace(settings, lone_raw=False) if is_state(kind + ":") else settings
        compared |= dict(zip(voices, _checked(estimator, outcomes, rules), strict=True))
    return [
        {call_id: _estimate(credit, rollout, call_id, compared) for call_id, credit in of_rollout.items()}
        for rollout, of_rollout in enumerate(credits)
    ]


def _voices(
    rollout: int, credits: Mapping[str, Credit], reward: float, tokens: Mapping[str, int]
) -> dict[Voice, tuple[list[float], int]]:
    """What a rollout says wherever it is compared: the credits that speak there, and in how many sampled tokens."""
    rewards: dict[Voice, list[float]] = defaultdict(list)
    size: dict[Voice, int] = defaultdict(int)
    for call_id, credit in credits.items():
        for part in credit.parts():
            if part.compared_with is not None:
                voice = _voice(rollout, call_id, part.compared_with)
                rewards[voice].append(part.reward)
                size[voice] += tokens[call_id]
    whole = (rollout, GROUP, None)
    rewards.setdefault(whole, [reward])
    size[whole] = sum(tokens.values())
    return {voice: (rewards[voice], size[voice]) for voice in rewards}


def _voice(rollout: int, call_id: str, compared_with: str) -> Voice:
    return rollout, compared_with, call_id if is_state(compared_with) else None


def _by_name(rewards: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Named rewards as columns; one that a rollout was not given counts as 0."""
    names = dict.fromkeys(name for of_rollout in rewards for name in of_rollout)
    return {name: [of_rollout.get(name, 0.0) for of_rollout in rewards] for name in names}


def _checked(estimator: OutcomeEstimator, outcomes: Outcomes, settings: BaselineSettings) -> list[tuple[float, float]]:
    """What the estimator gives, if calls can be trained on it."""
    result = estimator(outcomes, settings)
    name, voices = getattr(estimator, "__name__", repr(estimator)), (len(outcomes.scores),)
    for field, values in zip(("baseline", "scale"), result, strict=True):
        if np.shape(values) != voices or np.isnan(values).any():
            raise EstimatorError(f"the estimator {name} gave a {field} of {values}; it must be {voices[0]} numbers")
    if np.isinf(result[0]).any() or not np.all(result[1]):
        raise EstimatorError(f"the estimator {name} gave an infinite baseline or a scale of 0: {result}")
    return list(zip(result[0].tolist(), result[1].tolist(), strict=True))


def _estimate(credit: Credit, rollout: int, call_id: str, compared: Mapping[Voice, tuple[float, float]]) -> Estimate:
    baseline, scale = (0.0, 1.0)
    if credit.compared_with is not None:
        baseline, scale = compared[_voice(rollout, call_id, credit.compared_with)]
    scale = scale / credit.weight if credit.weight else math.inf
    plus = None if credit.plus is None else _estimate(credit.plus, rollout, call_id, compared)
    own = (credit.reward - baseline) / scale
    return Estimate(own if plus is None else own + plus.advantage, baseline, scale, plus)
