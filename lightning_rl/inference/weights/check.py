"""Does an engine sample from the weights it was given? Its log probabilities of some tokens, beside the model's."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_rl.errors import Explained

_PROMPT = 24  # tokens
_TOKENS = 8


class EngineMismatch(Explained, RuntimeError):
    """An engine's log probabilities are not those of the weights that it was given."""


class Tolerance(NamedTuple):
    """How far log probabilities of sampler and trainer may be apart, in nats: those of the worst token (`largest`),
    or the mean over tokens; None: not judged by it.

    In float32 each token agrees. In bfloat16 others report single tokens of healthy runs that differ by 0.3 and more,
    and means of 0.01 to 0.05; of weights that are wrong or old, means of 0.2 and more.
    """

    largest: float | None = None
    mean: float | None = None

    def exceeded_by(self, gaps: NDArray[Any]) -> str | None:
        """What of the gaps (nats, NaN where one is not known) is too large, in words; None: nothing."""
        largest, mean = largest_and_mean(gaps)
        if self.largest is not None and not largest <= self.largest:
            return f"up to {largest:.3g} apart (trainer.sampler_tolerance is {self.largest:g})"
        if self.mean is not None and not mean <= self.mean:
            return f"{mean:.3g} apart in the mean, up to {largest:.3g} (trainer.sampler_tolerance is {self.mean:g})"
        return None


FLOAT32 = Tolerance(largest=1e-3)  # vLLM's are up to 1e-4 apart


def largest_and_mean(gaps: NDArray[Any]) -> tuple[float, float]:
    """Of those that are known (not NaN); 0 where none is."""
    known = gaps[~np.isnan(gaps)]
    return (float(known.max()), float(known.mean())) if len(known) else (0.0, 0.0)


class SampledTokens(NamedTuple):
    """Token ids and their log probabilities (nats) at temperature 1."""

    token_ids: list[int]
    logprobs: list[float]


LogProbs = Callable[[list[int], int], list[float]]  # of tokens from a place on: log probabilities (nats)


@torch.no_grad()
def log_probs_of(model: Any, token_ids: list[int], first: int) -> list[float]:
    """What the causal LM `model` says of the tokens from `first` on, at temperature 1."""
    tokens = torch.tensor([token_ids], device=next(model.parameters()).device)
    own = model(input_ids=tokens).logits[0, first - 1 : -1].float().log_softmax(-1)
    log_probs: list[float] = own.gather(-1, tokens[0, first:, None])[:, 0].tolist()
    return log_probs


def prove(
    score: LogProbs,
    vocabulary: int,
    sample: Callable[[list[int], int], SampledTokens],
    *,
    engine: str,
    version: int,
    tolerance: Tolerance,
) -> None:
    """Compare log probabilities of an engine with those of a model.

    Args:
        score: what the model says.
        vocabulary: how many tokens it knows.
        sample: lets the engine sample so many tokens behind a prompt.
        engine, version: what messages name.
        tolerance: how far they may be apart.

    Raises:
        EngineMismatch: they are further apart.
    """
    prompt = [(7919 * i + 17) % vocabulary for i in range(_PROMPT)]  # anything: a model has an opinion on any tokens
    sampled = sample(prompt, _TOKENS)
    own = torch.tensor(score(prompt + sampled.token_ids, _PROMPT))
    gaps = (own - torch.tensor(sampled.logprobs)).abs().nan_to_num(nan=math.inf)  # none of these is unknown
    if (apart := tolerance.exceeded_by(gaps.numpy())) is not None:
        raise EngineMismatch(
            f"the log probabilities of {engine} and of the weights of version {version} are {apart}: it does not "
            "compute what is trained; check its dtype, quantization and further flags"
        )
