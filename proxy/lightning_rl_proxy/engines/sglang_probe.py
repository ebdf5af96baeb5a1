"""What an SGLang server is able to do, asked once when it is registered.

SGLang takes token ids, gives logprobs and is paused without any flag; what depends on flags is told by `Abilities`.
"""

import re
from typing import NamedTuple

import msgspec

from lightning_rl_proxy.engines.base import EngineRefused, EngineUnavailable
from lightning_rl_proxy.engines.probe import TOP, ProbedServer, asked, context_of, logprobs_mode

GENERATE = "/generate"
READY = "/ready"
OLDEST = (0, 5, 23)  # what is said here of SGLang was read in its source; older ones die of a flush while paused
NAME = "SGLang " + ".".join(map(str, OLDEST))
_INFO = "/server_info"


class Abilities(NamedTuple):
    """What the flags of a server decide.

    `tempered`: its logprobs are of the effective temperature, and not raw (SGLANG_RETURN_ORIGINAL_LOGPROB). `room`:
    how many tokens prompt and answer may have together, where that is known. `schemas`: it can keep to a JSON schema.
    `seeded`: a seed has an effect. `incremental`: an event of a stream holds only what is new in it.
    """

    tempered: bool = True
    room: int | None = None
    schemas: bool = True
    seeded: bool = True
    incremental: bool = True

    @property
    def lacks(self) -> list[str]:
        """What the server does without, each by the flag that it was not given."""
        words = []
        if not self.tempered:
            words.append(
                "logprobs of the temperature (SGLANG_RETURN_ORIGINAL_LOGPROB is set): away from temperature 1 they are "
                "computed anew"
            )
        if not self.schemas:
            words.append("JSON schemas (--skip-tokenizer-init or --grammar-backend none)")
        if not self.seeded:
            words.append("seeds (no --enable-deterministic-inference): a validation does not repeat exactly")
        if not self.incremental:
            words.append("short streams (no --incremental-streaming-output): every event holds all tokens so far")
        return words


class _Info(msgspec.Struct):
    version: str
    skip_tokenizer_init: bool = False
    grammar_backend: str | None = None
    enable_deterministic_inference: bool = False
    incremental_streaming_output: bool = False
    speculative_algorithm: str | None = None
    speculative_eagle_topk: int | None = None
    speculative_num_steps: int | None = None
    speculative_num_draft_tokens: int | None = None

    @property
    def reserved(self) -> int:
        """Tokens of the context that speculative decoding keeps for its drafts."""
        if self.speculative_algorithm is None:
            return 0
        steps = (self.speculative_eagle_topk or 1) * (self.speculative_num_steps or 0)
        return max(steps, self.speculative_num_draft_tokens or 0)


class _SglangInfo(msgspec.Struct):
    output_top_logprobs: list[list[tuple[float | None, int, str | None]]]


class _SglangAnswer(msgspec.Struct):
    meta_info: _SglangInfo


async def probe_sglang(url: str) -> Abilities:
    """What the SGLang server at `url` is able to do.

    Raises EngineUnavailable where it does not answer, or is paused, and EngineRefused where it is not SGLang, or too
    old.
    """
    return await asked(url, NAME, _questions)


async def _questions(server: ProbedServer) -> Abilities:
    status, answer = await server.ask("GET", _INFO)
    if status == 404:
        raise EngineRefused(f"{server.url}{_INFO} is not there: this is no SGLang server, or one older than {NAME}")
    server.check(status, answer, _INFO)
    info = server.decoded(answer, _Info, _INFO)
    if _number(info.version) < OLDEST:
        raise EngineRefused(f"engine {server.url} is SGLang {info.version}; {NAME} is the oldest that is understood")
    await _check_ready(server)
    mode = logprobs_mode(await _top_logprobs(server, 1.0), await _top_logprobs(server, 0.5))
    if mode is None:
        raise EngineRefused(f"engine {server.url} gives logprobs whose probabilities add up to more than 1")
    context = await context_of(server)
    return Abilities(
        tempered=mode == "processed",
        room=None if context is None else context - info.reserved,
        schemas=not info.skip_tokenizer_init and info.grammar_backend != "none",
        seeded=info.enable_deterministic_inference,
        incremental=info.incremental_streaming_output,
    )


async def _check_ready(server: ProbedServer) -> None:
    status, answer = await server.ask("GET", READY)
    if status == 503:
        raise EngineUnavailable(
            f"engine {server.url} is paused, or not yet up: it answers nothing until POST "
            f"{server.url}/continue_generation with {{}}"
        )
    server.check(status, answer, READY)


async def _top_logprobs(server: ProbedServer, temperature: float) -> dict[int, float]:
    """As with vLLM: the likeliest tokens behind one fixed token; none where the server refuses to tell them."""
    parameters = {"max_new_tokens": 1, "temperature": temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    body = {"input_ids": [0], "sampling_params": parameters, "return_logprob": True, "top_logprobs_num": TOP}
    status, answer = await server.ask("POST", GENERATE, body)
    if status == 400:
        return {}
    server.check(status, answer, GENERATE)
    positions = server.decoded(answer, _SglangAnswer, GENERATE).meta_info.output_top_logprobs
    return {token: logprob for logprob, token, _ in positions[0] if logprob is not None} if positions else {}


def _number(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: `0.5.23.dev7+g1` is (0, 5, 23)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
