"""vLLM's token wire (`POST /inference/v1/generate`), which the embedded engine speaks too.

Token in, token out: no text crosses this wire. Needs `--enable-scale-out` on a vLLM server. An answer comes whole, or
as server-sent events with some tokens each. Logprobs that are of no kind in `Call.logprob_kind` are not handed on.
"""

import base64
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, TypeVar

import msgspec

from lightning_rl_proxy.engines.base import (
    EngineFinish,
    EngineRefused,
    EngineTokens,
    EngineUnavailable,
    Load,
    TokenRequest,
)
from lightning_rl_proxy.engines.client import HttpResponse
from lightning_rl_proxy.engines.http import EngineConnection, Problem, events, finish, refusal
from lightning_rl_proxy.engines.probe import GENERATE, MODELS, LogprobsMode
from lightning_rl_proxy.engines.token_labels import Labelled, Labels, is_biased, known
from lightning_rl_proxy.rendering.images import Shown
from lightning_rl_proxy.sampling import Sampling

T = TypeVar("T")

# What vLLM honours by the names of `Sampling`, but for what an answer must fit: `structured_outputs` on its wire.
_CONSTRAINTS = ("regex", "choice", "grammar")
_ABILITIES = {
    "embedded": frozenset({"images", "ignore_eos"}),
    "vllm": frozenset(
        {
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "logit_bias",
            "json_schema",
            "images",
            "min_tokens",
            "ignore_eos",
            "bad_words",
            "allowed_token_ids",
            *_CONSTRAINTS,
        }
    ),
}
_NEEDS = "start the vLLM server with VLLM_SERVER_DEV_MODE=1"
_WAITING = b"vllm:num_requests_waiting{"  # a line of the metrics for each of a server's data-parallel ranks
_CONFIG = "/server_info?config_format=json"
_ASK_AGAIN_SECONDS = 30.0  # a server looks around its machine before it answers this for the first time


class _VllmLogprob(msgspec.Struct):
    logprob: float


class _VllmLogprobs(msgspec.Struct):
    content: list[_VllmLogprob]


class _VllmChoice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _VllmLogprobs | None = None
    weight_versions: list[Labelled] | None = None


class _VllmGenerated(msgspec.Struct):
    choices: list[_VllmChoice] = []
    prompt_token_ids: list[int] | None = None
    error: Problem | None = None


class _ListedModel(msgspec.Struct):
    id: str = ""
    policy_version: int | None = None
    max_num_seqs: int | None = None
    waiting: int = 0


class _Models(msgspec.Struct):
    data: list[_ListedModel]


class _WeightInfo(msgspec.Struct):
    weight_version: str | int | None = None


class _Scheduler(msgspec.Struct):
    max_num_seqs: int


class _Parallel(msgspec.Struct):
    data_parallel_size: int = 1


class _Config(msgspec.Struct):
    scheduler_config: _Scheduler
    parallel_config: _Parallel


class _ServerInfo(msgspec.Struct):
    vllm_config: _Config


_decoder = msgspec.json.Decoder(_VllmGenerated)


class TokenEngine:
    """One engine server. `kind` is `embedded` (its logprobs are of the effective temperature) or `vllm` (`logprobs`).

    A vLLM server labels its tokens with the policy version that it was told of last; what it sampled before is believed
    to be of the version that it was registered with. With `adapter` it samples this model as one of several adapters,
    each version of which it knows as `model@version`: an answer is of the version that it began with, and ends with it.
    """

    def __init__(
        self,
        *,
        model: str,
        kind: str,
        url: str,
        stop_token_ids: list[int],
        policy_version: int,
        logprobs: LogprobsMode = "raw",
        context: int | None = None,
        adapter: bool = False,
    ) -> None:
        self.model = model
        self._adapter = adapter
        self.kind = kind
        self.policy_version = policy_version
        self.abilities = _ABILITIES[kind]
        self.context = context
        self._logprobs = logprobs
        self._stop_token_ids = stop_token_ids
        self._labels = Labels(policy_version)
        self._capacity: int | None = None
        self._ask_capacity_at = 0.0
        self._server = EngineConnection(url)
        self.url = self._server.url

    async def generate(self, request: TokenRequest) -> AsyncGenerator[EngineTokens | EngineFinish]:
        """See `Engine`. Leaving the iterator early closes the connection, which aborts the generation."""
        body: dict[str, Any] = {
            "token_ids": request.prompt if request.encoded is None else msgspec.Raw(request.encoded),
            "sampling_params": self._parameters(request.sampling),
            "request_id": request.request_id,
        }
        if request.sampling.priority:
            body["priority"] = request.sampling.priority
        if request.stream:
            body["stream"] = True
        if request.media:
            body |= _shown(request.media) if self.kind == "embedded" else _content_parts(request.prompt, request.media)
        version: int | None = None
        if self._adapter:
            version = self.policy_version
            body["model"] = f"{self.model}@{version}"
        else:
            await self._tell_version()
        async with self._server.post(GENERATE, body) as response:
            if not request.stream:
                generated = _generated(self.url, await response.read())
                if len(generated.choices) != 1:
                    raise EngineUnavailable(f"engine {self.url} gave {len(generated.choices)} answers to one request")
                [choice] = generated.choices
                self._check_prompt(request, generated.prompt_token_ids)
                yield self._tokens(choice, version)
                yield self._finish(choice, len(choice.token_ids), version)
                return
            sampled, token_version = 0, version
            read = not request.media
            async for event, choice in _choices(response):
                if not read:  # the first event tells
                    self._check_prompt(request, event.prompt_token_ids)
                    read = True
                if choice.token_ids:
                    sampled += len(choice.token_ids)
                    if version is None and choice.weight_versions:  # as they change, of the embedded engine; at the end
                        token_version = self._labels.number(choice.weight_versions[-1].version)
                    yield self._tokens(choice, token_version)
                if choice.finish_reason is not None:
                    yield self._finish(choice, sampled, version)
                    await finish(response)
                    return

    async def check(self) -> int | None:
        """See `Engine`. The embedded engine knows its version, a vLLM server the label that it was told last, or the
        names of its adapters: -1 where it has none of this model."""
        status, _ = await self._server.get("/health")
        if status != 200:
            raise EngineUnavailable(f"{self.url}/health answered {status}")
        listed = self.kind == "embedded" or self._adapter
        status, body = await self._server.get(MODELS if listed else "/weight_info")
        if status != 200:
            return None
        if self._adapter:
            names = (model.id.rpartition("@") for model in self._decoded(body, _Models).data)
            return max((int(n) for model, _, n in names if model == self.model and n.isdecimal()), default=-1)
        if listed:
            return self._decoded(body, _Models).data[0].policy_version
        return self._labels.fingerprint_of(self._decoded(body, _WeightInfo).weight_version)

    async def load(self) -> Load | None:
        """See `Engine`. A vLLM server with --disable-log-stats does not say."""
        if self.kind == "embedded":
            status, body = await self._server.get(MODELS)
            if status != 200:
                return None
            model = self._decoded(body, _Models).data[0]
            return Load(model.waiting, model.max_num_seqs)
        status, body = await self._server.get("/metrics")
        counts = [float(line.rpartition(b" ")[2]) for line in body.splitlines() if line.startswith(_WAITING)]
        if status != 200 or not counts:
            return None
        return Load(int(sum(counts)), await self._told_capacity())

    async def pause(self) -> None:
        """See `Engine`. A vLLM server has this route only with VLLM_SERVER_DEV_MODE=1. Answers of an adapter go on:
        they end with what they began with, and the server samples other models, too."""
        if not self._adapter:
            await self._order("/pause?mode=keep")

    async def resume(self) -> None:
        """See `Engine`."""
        if self._adapter:
            return
        await self._tell_version()
        await self._order("/resume")

    def logprob_kind(self, sampling: Sampling) -> str:
        """See `Engine`: vLLM's default logprobs are before temperature, and so are raw unless temperature is 1."""
        if sampling.temperature == 0:
            return "greedy"
        tempered = self.kind == "embedded" or self._logprobs == "processed"
        return "sampled" if tempered or sampling.temperature == 1 else "raw"

    async def close(self) -> None:
        """See `Engine`."""
        await self._server.close()

    def _parameters(self, sampling: Sampling) -> dict[str, Any]:
        parameters: dict[str, Any] = msgspec.to_builtins(sampling)
        parameters.pop("stop", None)
        parameters.pop("priority", None)  # it is the request's
        if self.kind == "vllm":
            parameters["detokenize"] = False
        if (json_schema := parameters.pop("json_schema", None)) is not None:
            parameters["structured_outputs"] = {"json": json_schema} if json_schema else {"json_object": True}
        for name in _CONSTRAINTS:
            if (value := parameters.pop(name, None)) is not None:
                parameters["structured_outputs"] = {name: value}
        ends = [] if sampling.ignore_eos else self._stop_token_ids
        # An absent max_tokens means 16 to the embedded engine; null the end of the context, as chat clients expect.
        return parameters | {
            "logprobs": 0 if self._has_logprobs(sampling) else None,
            "stop_token_ids": [*ends, *(sampling.stop_token_ids or ())],
            "max_tokens": sampling.max_tokens,
        }

    def _has_logprobs(self, sampling: Sampling) -> bool:
        """Whether a kind is known for its logprobs: a grammar's mask is in vLLM's raw ones too."""
        if self.kind == "embedded":
            return True
        if self._logprobs == "raw":
            return not sampling.constrained
        return not _reshaped(sampling)

    async def _told_capacity(self) -> int | None:
        """What a vLLM server's own configuration says, asked until it has answered."""
        if self._capacity is None and time.monotonic() >= self._ask_capacity_at:
            self._ask_capacity_at = time.monotonic() + _ASK_AGAIN_SECONDS
            with contextlib.suppress(EngineUnavailable):
                status, body = await self._server.get(_CONFIG)
                if status == 200:
                    config = self._decoded(body, _ServerInfo).vllm_config
                    self._capacity = config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size
        return self._capacity

    def _decoded(self, body: bytes, expected: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=expected)
        except msgspec.DecodeError as error:
            raise EngineUnavailable(f"engine {self.url} does not answer as vLLM does ({error})") from error

    async def _tell_version(self) -> None:
        """Let a vLLM server label what it samples from now on, where the version is another than it was told."""
        version = self.policy_version
        if self.kind == "vllm" and version != self._labels.current:
            await self._order("/update_weight_version", {"new_version": str(version)})
            self._labels.current = version

    async def _order(self, path: str, body: Any = None) -> None:
        await self._server.order(path, body, needs=_NEEDS)

    def _check_prompt(self, request: TokenRequest, read: list[int] | None) -> None:
        """Raises EngineRefused where a vLLM server has made another prompt of the images than is recorded."""
        if request.media and self.kind == "vllm" and read != request.prompt:
            problem = "does not tell which prompt it read" if read is None else f"read {len(read)} tokens"
            raise EngineRefused(
                f"engine {self.url} {problem}, of the {len(request.prompt)} that the images make here: give it and the "
                "gateway the same preprocessor_config.json",
                status=502,
            )

    def _tokens(self, choice: _VllmChoice, version: int | None) -> EngineTokens:
        """Raises EngineUnavailable where there is not one logprob for each token."""
        if choice.logprobs is None:
            return EngineTokens(choice.token_ids, None, version)
        logprobs = known([entry.logprob for entry in choice.logprobs.content])
        if logprobs is not None and len(logprobs) != len(choice.token_ids):
            raise EngineUnavailable(
                f"engine {self.url} gave {len(logprobs)} log probabilities for {len(choice.token_ids)} tokens"
            )
        return EngineTokens(choice.token_ids, logprobs, version)

    def _finish(self, choice: _VllmChoice, sampled: int, version: int | None) -> EngineFinish:
        stop = choice.stop_reason
        if stop is None and choice.finish_reason == "stop" and choice.token_ids:
            stop = choice.token_ids[-1]  # the model's own end of text, which vLLM does not name
        stop = stop if isinstance(stop, int) else None
        labelled = choice.weight_versions if version is None else None
        versions = self._labels.ranges(labelled, self.policy_version if version is None else version, sampled)
        return EngineFinish(choice.finish_reason or "abort", stop, versions)


def _generated(url: str, body: bytes) -> _VllmGenerated:
    """Raises EngineUnavailable for what is no answer or event of vLLM's."""
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise EngineUnavailable(f"engine {url} does not answer as vLLM does ({error})") from error


async def _choices(response: HttpResponse) -> AsyncIterator[tuple[_VllmGenerated, _VllmChoice]]:
    """The choices of a stream's events, each with its event."""
    async for data in events(response):
        event = _generated(response.url, data)
        if event.error is not None:  # a request that vLLM refuses has its 400 here, below a status of 200
            raise refusal(response.url, event.error.status, data)
        for choice in event.choices:
            yield event, choice


def _shown(media: Sequence[Shown]) -> dict[str, Any]:
    """Images as the embedded engine takes them: their bytes, and where they stand."""
    return {
        "media": [
            {"start": one.start, "length": one.length, "sha256": one.image.sha256, "data": one.image.data}
            for one in media
        ]
    }


def _content_parts(prompt: list[int], media: Sequence[Shown]) -> dict[str, Any]:
    """Images as vLLM takes them: in order, each for the next placeholder of a prompt that has one for each; it puts in
    the others itself, and tells the prompt that it read. What comes behind the last image it takes for tokens.

    Raises EngineRefused where a placeholder was sampled before an image: vLLM would put that image there.
    """
    ids: list[int] = []
    at = 0
    for one in media:
        ids += prompt[at : one.start + 1]
        at = one.start + one.length
    if ids.count(prompt[media[0].start]) != len(media):
        raise EngineRefused(
            "the model has sampled an image placeholder, and vLLM would put there the image that was shown after it"
        )
    ids += prompt[at:]
    parts = [
        {
            "type": "image_url",
            "url": f"data:{one.image.media_type};base64,{base64.b64encode(one.image.data).decode()}",
            "uuid": one.image.sha256,
        }
        for one in media
    ]
    return {"token_ids": ids, "content_parts": parts, "return_token_ids": True}


def _reshaped(sampling: Sampling) -> bool:
    """Whether more than the temperature lies between the logits and what is sampled from."""
    cut = sampling.top_p not in (None, 1) or sampling.top_k not in (None, -1, 0)
    return (cut and sampling.temperature != 0) or bool(sampling.min_p) or is_biased(sampling)
