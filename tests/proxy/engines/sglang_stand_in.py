"""A stand-in for an SGLang 0.5.23 server: its native wire over real HTTP, sampling from a tiny model of token ids.

It follows the server's source where the client stands on it: names that are refused, what streams repeat, prefixes of
request ids, pauses, labels. Its model is a formula, so that any token and logprob can be computed a second time.
"""

import asyncio
import hashlib
import json
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

STOP = 9
VOCABULARY = tuple(range(1, STOP + 1))
_PARAMETERS = {
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "max_new_tokens", "stop_token_ids", "ignore_eos", "sampling_seed", "logit_bias", "json_schema",
    "regex", "ebnf", "min_new_tokens",
}  # fmt: skip

Json = dict[str, Any]


def logits(context: list[int], vocabulary: tuple[int, ...] = VOCABULARY) -> dict[int, float]:
    """The model: what it makes of the tokens so far."""
    return {token: 2 * math.sin(3 * i + context[-1] + len(context)) for i, token in enumerate(vocabulary)}


def log_softmax(values: dict[int, float]) -> dict[int, float]:
    total = math.log(sum(math.exp(value) for value in values.values()))
    return {token: value - total for token, value in values.items()}


def sampled(values: dict[int, float], seed: int, position: int) -> int:
    """A token by its logprob: the same one for the same seed and position."""

    def noise(token: int) -> float:
        digest = hashlib.blake2b(f"{seed} {position} {token}".encode(), digest_size=8).digest()
        return -math.log(-math.log((int.from_bytes(digest, "big") + 1) / (2**64 + 2)))

    return max(values, key=lambda token: values[token] + noise(token))


@dataclass
class Running:
    """A request in the server."""

    body: Json
    ids: list[int] = field(default_factory=list)
    logprobs: list[list[Any]] = field(default_factory=list)
    top: list[list[list[Any]]] = field(default_factory=list)
    changes: list[tuple[str, int]] = field(default_factory=list)  # versions until a number of tokens
    aborted: bool = False


class StandIn:
    """One server. `raw`: SGLANG_RETURN_ORIGINAL_LOGPROB; `interval`: tokens in an event; `pieces`: bytes in a write."""

    def __init__(
        self,
        *,
        version: str = "0.5.23",
        incremental: bool = False,
        raw: bool = False,
        seeded: bool = True,
        tokenizer: bool = True,
        context: int = 64,
        interval: int = 1,
        pieces: int | None = None,
        vocabulary: tuple[int, ...] = VOCABULARY,
        endless: bool = False,
    ) -> None:
        self.version, self.incremental, self.raw, self.seeded = version, incremental, raw, seeded
        self.tokenizer, self.context, self.interval, self.pieces = tokenizer, context, interval, pieces
        self.vocabulary = tuple(t for t in vocabulary if t != STOP) if endless else vocabulary
        self.logits: Callable[[list[int], tuple[int, ...]], dict[int, float]] = logits
        self.weight_version = "default"
        self.status = 200
        self.fails: Json | None = None  # instead of answers
        self.breaks_after: int | None = None  # tokens, where the connection is cut
        self.waits_at: int | None = None  # tokens, where it waits to be paused
        self.nan_after: int | None = None  # tokens, where the logits are none
        self.ranks: list[Json] = []  # the queues, per data-parallel rank
        self.requests: list[Running] = []
        self.orders: list[tuple[str, Json]] = []
        self.running = asyncio.Event()
        self.running.set()

    @property
    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**24)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_get("/model_info", self.model_info)
        app.router.add_get("/ready", self.ready)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/loads", self.loads)
        app.router.add_post("/generate", self.generate)
        for path in ("abort_request", "pause_generation", "continue_generation"):
            app.router.add_post(f"/{path}", self.order)
        for path in ("update_weight_version", "update_weights_from_disk"):
            app.router.add_post(f"/{path}", self.order)
        return app

    async def server_info(self, request: web.Request) -> web.Response:
        told = {
            "version": self.version,
            "skip_tokenizer_init": not self.tokenizer,
            "grammar_backend": "xgrammar",
            "enable_deterministic_inference": self.seeded,
            "incremental_streaming_output": self.incremental,
            "speculative_algorithm": None,
            "frontend": "python",
        }
        return web.json_response(told, status=self.status)

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "m", "weight_version": self.weight_version})

    async def ready(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.running.is_set() else 503)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "max_model_len": self.context}]})

    async def loads(self, request: web.Request) -> web.Response:
        assert request.query["include"] == "core"
        return web.json_response({"version": self.version, "loads": self.ranks}, status=self.status)

    async def order(self, request: web.Request) -> web.Response:
        path, body = request.path, await request.json()
        self.orders.append((path, body))
        if path == "/abort_request":
            for each in self.requests:
                each.aborted |= each.body["rid"].startswith(body["rid"])
        elif path == "/pause_generation":
            assert body["mode"] in ("in_place", "retract")
            self.running.clear()
            self.waits_at = None
        elif path == "/continue_generation":
            self.running.set()
        elif path == "/update_weight_version":
            if body.get("abort_all_requests", True):
                for each in self.requests:
                    each.aborted = True
            self.label(body["new_version"])
        else:
            return self.update(body)
        return web.json_response({"success": True, "status": "ok"})

    def update(self, body: Json) -> web.Response:
        if "missing" in body["model_path"]:
            told = {"success": False, "message": "Failed to get weights iterator", "num_paused_requests": 0}
            return web.json_response(told, status=400)
        self.label(body["weight_version"])
        return web.json_response({"success": True, "message": "Succeeded.", "num_paused_requests": 0})

    def label(self, version: str) -> None:
        for each in self.requests:
            if each.ids:
                each.changes.append((self.weight_version, len(each.ids)))
        self.weight_version = version

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        unknown = set(body["sampling_params"]) - _PARAMETERS
        if unknown:
            return web.json_response({"error": f"sampling_params: unknown field `{min(unknown)}`"}, status=400)
        running = Running({"stream": False, "return_logprob": False, "rid": "probe"} | body)
        self.requests.append(running)
        if self.fails is not None:
            return web.json_response(self.fails, status=self.status)
        await self.running.wait()
        refused = self.refused(running.body)
        if running.body["stream"]:
            return await self.stream(request, running, refused)
        if refused:
            return web.json_response({"error": {"message": refused}}, status=400)
        *_, (reason, _) = [step async for step in self.steps(running)]
        return web.json_response(self.answer(running, 0, reason))

    def refused(self, body: Json) -> str | None:
        prompt, limit = len(body["input_ids"]), body["sampling_params"].get("max_new_tokens", 128)
        if prompt >= self.context:
            return f"The input ({prompt} tokens) is longer than the model's context length ({self.context} tokens)."
        if limit is not None and prompt + limit > self.context:
            return f"Requested token count exceeds the model's maximum context length of {self.context} tokens."
        if body["sampling_params"].get("top_p") == 0:
            return "top_p must be in (0, 1], got 0."
        return None

    async def stream(self, request: web.Request, running: Running, refused: str | None) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        if refused:
            error = {"message": refused, "type": "invalid_request_error", "code": 400, "retryable": False}
            await self.write(response, {"error": error})
        else:
            sent = 0
            async for reason, end in self.steps(running):
                if reason is None and (len(running.ids) - sent) % self.interval:
                    continue
                if self.breaks_after is not None and len(running.ids) > self.breaks_after:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                await self.write(response, self.answer(running, sent, reason))
                sent = end
        await response.write(b"data: [DONE]\n\n")
        return response

    async def write(self, response: web.StreamResponse, event: Json) -> None:
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        size = self.pieces or len(data)
        for i in range(0, len(data), size):
            await response.write(data[i : i + size])

    async def steps(self, running: Running) -> AsyncIterator[tuple[Json | None, int]]:
        """Why it ended, if it has, and the number of tokens, after each token."""
        limit = running.body["sampling_params"].get("max_new_tokens", 128)
        room = self.context - len(running.body["input_ids"]) - 1
        limit = room if limit is None else min(limit, room)
        while True:
            await asyncio.sleep(0)
            while len(running.ids) == self.waits_at:
                await asyncio.sleep(0.001)
            if not running.aborted:
                await self.running.wait()
            if running.aborted:
                yield {"type": "abort", "message": "Aborted"}, len(running.ids)
                return
            reason = self.step(running, limit)
            yield reason, len(running.ids)
            if reason:
                return

    def step(self, running: Running, limit: int) -> Json | None:
        asked = running.body["sampling_params"]
        biased = self.logits([*running.body["input_ids"], *running.ids], self.vocabulary)
        for token, bias in asked.get("logit_bias", {}).items():
            biased[int(token)] += bias
        heat = asked["temperature"] or 1.0
        tempered = log_softmax({token: value / heat for token, value in biased.items()})
        top = asked.get("top_k", -1)
        kept = sorted(tempered, key=lambda token: -tempered[token])[: top if top > 0 else None]
        seed = asked.get("sampling_seed", 42) if self.seeded else len(self.requests)
        token = sampled({t: tempered[t] for t in kept}, seed, len(running.ids)) if asked["temperature"] else kept[0]
        told = log_softmax(biased) if self.raw else tempered
        if self.nan_after is not None and len(running.ids) >= self.nan_after:
            running.ids.append(asked["stop_token_ids"][0])
            running.logprobs.append([None, -1, None])
            return {"type": "stop", "matched": "NaN happened"}
        running.ids.append(token)
        running.logprobs.append([told[token], token, None])
        most = sorted(told, key=lambda token: -told[token])[: running.body.get("top_logprobs_num", 0)]
        running.top.append([[told[token], token, None] for token in most])
        if token in asked.get("stop_token_ids", ()):
            return {"type": "stop", "matched": token}
        return {"type": "length", "length": limit} if len(running.ids) >= limit else None

    def answer(self, running: Running, sent: int, reason: Json | None) -> Json:
        start = sent if self.incremental and running.body["stream"] else 0
        aborted = reason is not None and reason["type"] == "abort"
        if aborted and start:
            ids, start = running.ids[-1:], 0  # as the server has it: the last token again, with all logprobs
        else:
            ids = running.ids[start:]
        meta: Json = {"id": running.body["rid"], "finish_reason": reason, "weight_version": self.weight_version}
        meta["completion_tokens"] = len(running.ids)
        if running.body["return_logprob"]:
            meta["output_token_logprobs"] = running.logprobs[start:]
            meta["output_top_logprobs"] = running.top[start:]
        if reason is not None:
            meta["weight_versions"] = self.spans(running)
        return ({"text": "..."} if self.tokenizer else {}) | {"output_ids": ids, "meta_info": meta}

    def spans(self, running: Running) -> list[Json]:
        found: list[Json] = []
        for version, end in [*running.changes, (self.weight_version, len(running.ids))]:
            start = found[-1]["end"] if found else 0
            if end > start or not found:
                found.append({"version": version, "start": start, "end": end})
        return found
