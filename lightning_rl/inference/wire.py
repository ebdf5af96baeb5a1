"""vLLM's token wire format, `POST /inference/v1/generate`: records in, records out, no IO.

Invariant: what is answered is what happened. A sampling key that this engine does not honour is refused
by name, where vLLM passes over it in silence.
"""

from typing import Annotated, Any, Literal

import msgspec

from lightning_rl.inference.sequence import GenerationRequest, GenerationSampling, Output, Token
from lightning_rl.vision import PlacedImage

DEFAULT_MAX_TOKENS = 16  # vLLM's


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's names. `logprobs` 0 asks for the sampled tokens' own, null for none. `detokenize` is there to be false."""

    max_tokens: int | None = DEFAULT_MAX_TOKENS
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, msgspec.Meta(lt=2**31)] = 0
    seed: int | None = None
    n: Annotated[int, msgspec.Meta(ge=1)] = 1
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=0)] | None = None
    stop_token_ids: tuple[TokenId, ...] | None = None
    ignore_eos: bool = False
    detokenize: Literal[False] = False


class Media(msgspec.Struct, forbid_unknown_fields=True):
    """An image of the prompt, `data` its bytes in base64, and the tokens [start, start + length) that stand for it."""

    start: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(ge=1)]
    sha256: str
    data: bytes


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request. Of those that wait the one with the lowest `priority` is taken first, of equal ones the
    one that came first. `media` is this engine's own: vLLM takes images in other words."""

    token_ids: list[TokenId]
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    request_id: str | None = None
    stream: bool = False
    model: str | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] = 0
    media: list[Media] = []


class WireLogprob(msgspec.Struct):
    """One token's natural-log probability and rank."""

    token_id: int
    logprob: float
    rank: int
    top_logprobs: list[Any] = msgspec.field(default_factory=list)


class Logprobs(msgspec.Struct):
    """One entry per token of its choice."""

    content: list[WireLogprob]


class Version(msgspec.Struct):
    """The tokens [start, end) came from the weights `version`."""

    version: str
    start: int
    end: int


class WireChoice(msgspec.Struct):
    """One answer, or in a stream one piece of it."""

    index: int
    token_ids: list[int]
    logprobs: Logprobs | None
    finish_reason: str | None = None
    stop_reason: int | None = None
    weight_versions: list[Version] | None = None


class Usage(msgspec.Struct):
    """Token counts; the prompt counts once, whatever `n` is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class GenerateResponse(msgspec.Struct):
    """The answer; in a stream, one chunk of it."""

    request_id: str
    choices: list[WireChoice]
    usage: Usage | None = None


class WireError(msgspec.Struct):
    """What went wrong, as vLLM says it."""

    message: str
    type: str
    code: int
    param: str | None = None


class ErrorResponse(msgspec.Struct):
    """The body of every answer that is not 2xx."""

    error: WireError


_request_decoder = msgspec.json.Decoder(GenerateRequest)
encode = msgspec.json.Encoder().encode


def decode_request(body: bytes) -> GenerateRequest:
    """Parse a body.

    Raises:
        ValueError: it is no such JSON; the message names the field.
    """
    return _request_decoder.decode(body)


def engine_id(request_id: str, index: int) -> str:
    """The engine's id of choice `index` of a request."""
    return f"{request_id}/{index}"


def engine_requests(body: GenerateRequest, request_id: str, adapter: int = 0) -> list[GenerationRequest]:
    """One engine request per choice, for that adapter; choice i of a seeded request has seed + i, as in vLLM.

    Raises:
        ValueError: a sampling value is out of its range.
    """
    params = body.sampling_params
    return [
        GenerationRequest(
            request_id=engine_id(request_id, index),
            token_ids=body.token_ids,
            adapter=adapter,
            priority=body.priority,
            images=tuple(PlacedImage(one.start, one.length, one.sha256, one.data) for one in body.media),
            sampling=GenerationSampling(
                max_tokens=params.max_tokens,
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=params.top_k,
                seed=None if params.seed is None else params.seed + index,
                stop_token_ids=params.stop_token_ids or (),
                ignore_eos=params.ignore_eos,
            ),
        )
        for index in range(params.n)
    ]


def piece(index: int, token: Token, *, logprobs: bool, tells_version: bool) -> WireChoice:
    """One token of a stream. vLLM's pieces tell no versions; these may, so that those who leave before the end know."""
    content = [WireLogprob(token.token_id, token.logprob, token.rank)]
    made = WireChoice(index, [token.token_id], Logprobs(content) if logprobs else None)
    if tells_version:
        made.weight_versions = [Version(str(token.version), 0, 1)]
    return made


def choice(index: int, output: Output, *, logprobs: bool) -> WireChoice:
    """A whole answer."""
    rows = zip(output.token_ids, output.logprobs, output.ranks, strict=True)
    content = Logprobs([WireLogprob(*row) for row in rows]) if logprobs else None
    return finish(WireChoice(index, output.token_ids, content), output)


def finish(last: WireChoice, output: Output) -> WireChoice:
    """Add to a choice how its answer ended."""
    last.finish_reason = output.finish_reason
    last.stop_reason = output.stop_reason
    last.weight_versions = [Version(str(span.version), span.start, span.end) for span in output.versions]
    return last


def usage(outputs: list[Output]) -> Usage:
    """Counts over the choices of one request."""
    prompt = outputs[0].prompt_length
    completion = sum(len(output.token_ids) for output in outputs)
    return Usage(prompt, completion, prompt + completion)
