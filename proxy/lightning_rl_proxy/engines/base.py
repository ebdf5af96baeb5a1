"""All the gateway knows of inference: token ids in, token ids with logprobs out, and how it ended."""

from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple, Protocol

from lightning_rl_adapters.call import VersionRange
from lightning_rl_proxy.rendering.images import Shown
from lightning_rl_proxy.sampling import Sampling


class TokenRequest(NamedTuple):
    """What an engine is to sample an answer from.

    `prompt` is to be read, not kept: it may grow once the answer is committed. `encoded` is the same as a JSON list,
    where it is at hand. `media` are the images that the prompt shows, and where; an engine without the ability `images`
    is given none. With `stream` tokens are handed over as they are sampled.
    """

    prompt: list[int]
    sampling: Sampling
    request_id: str
    stream: bool = False
    media: Sequence[Shown] = ()
    encoded: bytes | None = None


class EngineTokens(NamedTuple):
    """Some sampled tokens with their logprobs (nats), or None where the engine gives none; `version` is the policy
    version that they are known to be of, None: what the gateway believes of the engine."""

    token_ids: list[int]
    logprobs: list[float] | None
    version: int | None = None


class EngineFinish(NamedTuple):
    """How a generation ended: `stop | length | abort`, the stop token that matched, and who sampled which tokens."""

    reason: str
    stop_match: int | None
    version_spans: list[VersionRange]


class Load(NamedTuple):
    """What an engine says of its queue: requests that wait for a place, others' too, and how many it works on at once.

    `capacity` is None where it does not say.
    """

    waiting: int
    capacity: int | None


class EngineUnavailable(Exception):
    """The engine could not be reached or failed: the request may be tried again, after `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineRefused(Exception):
    """The engine cannot serve this request as it is: trying again will not help. `status` is what the agent gets."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Engine(Protocol):
    """An engine behind the gateway. `logprob_kind` says what its logprobs are (see `Call.logprob_kind`).

    `abilities` are the parameters that it honours beyond temperature, top_p, top_k, max_tokens, seed and
    stop_token_ids; stop strings are the gateway's business; `images` is one of them. `policy_version` is what the
    gateway believes of the weights, and sets. `context` is how many tokens prompt and answer may have together; None
    where it does not say.
    """

    model: str
    policy_version: int
    abilities: frozenset[str]
    context: int | None

    def generate(self, request: TokenRequest) -> AsyncGenerator[EngineTokens | EngineFinish]:
        """Sample: yields `EngineTokens` one or more times and at last one `EngineFinish`, with which it ends.

        Leaving the iterator early aborts the generation. Raises EngineUnavailable, EngineRefused or PromptTooLong.
        """
        ...

    async def check(self) -> int | None:
        """The policy version that the engine itself says its weights have; None where it does not say.

        Raises EngineUnavailable where the engine does not answer, or says that it is not well.
        """
        ...

    async def load(self) -> Load | None:
        """How busy the engine says it is; None where it does not say. Raises EngineUnavailable."""
        ...

    async def pause(self) -> None:
        """Freeze what is in flight where it is, until `resume`. Raises EngineUnavailable or EngineRefused."""
        ...

    async def resume(self) -> None:
        """Go on with what is frozen, if anything is, under `policy_version`. Raises as `pause`."""
        ...

    def logprob_kind(self, sampling: Sampling) -> str:
        """What the logprobs of this engine are under `sampling`."""
        ...

    async def close(self) -> None:
        """Free the connections."""
        ...
