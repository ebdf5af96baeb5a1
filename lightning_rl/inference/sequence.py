"""What is asked of the engine and what it answers, as plain records.

Invariant: an `Output` holds every sampled token once, each with its logprob and rank, and its version
spans cover the tokens exactly once, in order.
"""

import math
from collections.abc import Sequence as Tokens
from typing import Literal, NamedTuple

import msgspec

from lightning_rl.vision import PlacedImage

FinishReason = Literal["stop", "length", "abort"]


class GenerationSampling(msgspec.Struct, frozen=True, kw_only=True):
    """How one answer is sampled.

    `max_tokens` None means: up to the engine's `max_model_len`. `temperature` 0 is greedy. `top_p` 1 and
    `top_k` 0 (or -1, as vLLM has it) keep the whole vocabulary. `seed` None draws one from the engine.
    A token of `stop_token_ids`, or one of the model's end tokens unless `ignore_eos`, ends the answer and
    stays in it.

    Raises:
        ValueError: a value is outside its range.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be at least 1, or 0 or -1 for no limit, got {self.top_k}")


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue once. `request_id` is unique among the requests in flight. `images` are those that the
    prompt shows, in their order. `adapter` is that of the engine's adapters which answers; 0: its model without one. Of
    those that wait the one with the lowest `priority` is first, of equal ones the one that came first."""

    request_id: str
    token_ids: Tokens[int]
    sampling: GenerationSampling = GenerationSampling()
    images: tuple[PlacedImage, ...] = ()
    adapter: int = 0
    priority: int = 0


class VersionSpan(msgspec.Struct, frozen=True):
    """The sampled tokens [start, end) came from the weights of policy version `version`."""

    version: int
    start: int
    end: int


class Token(NamedTuple):
    """One sampled token as it is made: natural-log probability, rank (1 is the likeliest), and the policy version of
    the weights."""

    request_id: str
    token_id: int
    logprob: float
    rank: int
    version: int


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """One finished answer: `token_ids`, `logprobs` and `ranks` are of one length.

    `stop_reason` is the stop token when it came from `stop_token_ids`, None for the model's own end
    token and for the other reasons.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    finish_reason: FinishReason
    stop_reason: int | None
    versions: list[VersionSpan]
    prompt_length: int


class Failure(NamedTuple):
    """A request that ended with the engine's own error."""

    request_id: str
    error: Exception


Event = Token | Output | Failure
