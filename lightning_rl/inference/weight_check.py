"""Does an engine sample from the weights it was given? Its log probabilities of some tokens, beside the model's."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lightning_rl.errors import Explained

_PROMPT = 24  # tokens
_TOKENS = 8


class EngineMismatch(Explained, RuntimeError):
    """An engine's log probabilities are not those of the weights that it was given."""


class SampledTokens(NamedTuple):
    """Token ids and their log probabilities (nats) at temperature 1."""

    token_ids: list[int]
    logprobs: list[float]


@torch.no_grad()
def prove(
    model: Any, sample: Callable[[list[int], int], SampledTokens], *, engine: str, version: int, tolerance: float
) -> None:
    """Compare log probabilities of an engine with those of the causal LM `model`.

    Args:
        sample: lets the engine sample so many tokens behind a prompt.
        engine, version: what messages name.
        tolerance: how far they may be apart, in nats.

    Raises:
        EngineMismatch: they are further apart.
    """
    vocabulary = model.config.get_text_config().vocab_size
    prompt = [(7919 * i + 17) % vocabulary for i in range(_PROMPT)]  # anything: a model has an opinion on any tokens
    said = sample(prompt, _TOKENS)
    tokens = torch.tensor([prompt + said.token_ids], device=next(model.parameters()).device)
    own = model(input_ids=tokens).logits[0, _PROMPT - 1 : -1].float().log_softmax(-1)
    own = own.gather(-1, tokens[0, _PROMPT:, None])[:, 0].cpu()
    gap = float((own - torch.tensor(said.logprobs)).abs().max())
    if not gap <= tolerance:
        raise EngineMismatch(
            f"{engine} gives log probabilities up to {gap:.3g} apart from those of the weights of version {version} "
            f"(trainer.sampler_tolerance is {tolerance:g}): it does not compute what is trained; check its dtype, "
            "quantization and further flags"
        )
