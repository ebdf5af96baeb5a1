"""A small OpenAI-compatible (and Anthropic-shaped) service on the loopback, for the tests of chat backends.

Its tokenizer: a message is a 1, the code points of its text, and a 2; an answer's tokens are its code points and a 2.
"""

import asyncio
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

_ASSISTANT = 3  # the token that lets the assistant begin


def prompt_ids(messages: list[dict[str, Any]]) -> list[int]:
    ids: list[int] = []
    for message in messages:
        text = [ord(c) for c in message["content"]]
        ids += [_ASSISTANT, *text, 2] if message["role"] == "assistant" else [1, *text, 2]
    return [*ids, _ASSISTANT]


class Service:
    """Answers `script` in turn, then `ok`. `tokens`, `known_fields`, `status` make it another kind of service."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.script: deque[str | dict[str, Any]] = deque()
        self.reply: Callable[[dict[str, Any]], str] | None = None  # instead of the script
        self.tokens = True  # whether it tells of tokens when asked
        self.known_fields: frozenset[str] | None = None  # others are refused
        self.unknown_status = 400
        self.status = 200
        self.error = "scripted"
        self.headers: dict[str, str] = {}
        self.retokenizes: Callable[[list[int]], list[int]] = lambda ids: ids
        self.drops_logprobs = 0
        self.told: dict[str, Any] | None = None  # the body of an error
        self.failures: deque[tuple[int, dict[str, str]]] = deque()  # status and headers of the next answers
        self.cuts = False  # off in the middle of an answer
        self.raw: bytes | None = None
        self.hold: threading.Event | None = None

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("authorization"))
        if self.hold is not None:
            await asyncio.to_thread(self.hold.wait, 20)
        unknown = set() if self.known_fields is None else set(body) - self.known_fields
        if unknown:
            return _error(self.unknown_status, f"Unrecognized request argument supplied: {sorted(unknown)[0]}")
        if self.failures:
            return _error(self.failures[0][0], self.error, self.failures.popleft()[1])
        if self.told is not None:
            return web.json_response(self.told, status=self.status, headers=self.headers)
        if self.status != 200:
            return _error(self.status, self.error, self.headers)
        if self.cuts:
            return await _cut(request)
        if self.raw is not None:
            return web.Response(body=self.raw, content_type="text/html")
        return web.json_response(self._completion(body))

    def _said(self, body: dict[str, Any]) -> Any:
        if self.reply is not None:
            return self.reply(body)
        return self.script.popleft() if self.script else "ok"

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        said = self._said(body)
        message = {"role": "assistant", "content": said} if isinstance(said, str) else {"role": "assistant", **said}
        prompt = self.retokenizes(prompt_ids(body["messages"]) if self.tokens else [])
        ids = [*map(ord, message.get("content") or ""), 2]
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
            "logprobs": None,
        }
        answer = {
            "id": f"chatcmpl-service-{len(self.requests)}",
            "object": "chat.completion",
            "created": 1700000000,
            "model": "the-service-model-2026",
            "choices": [choice],
            "usage": {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16},
            "provider_extra": {"region": "here"},
        }
        if body.get("logprobs"):
            entries = [{"token": "t", "logprob": -0.5 * (i + 1), "bytes": None} for i in range(len(ids))]
            choice["logprobs"] = {"content": entries[self.drops_logprobs :]}
        if self.tokens and body.get("return_token_ids"):
            answer["prompt_token_ids"] = prompt
            choice["token_ids"] = ids
        return answer

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        if self.status != 200:
            return _error(self.status, self.error, self.headers)
        data = [{"object": "embedding", "index": 0, "embedding": [0.5, -0.25]}]
        return web.json_response(
            {"object": "list", "model": "e", "data": data, "usage": {"prompt_tokens": 3, "total_tokens": 3}}
        )

    async def messages(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("x-api-key"))
        if self.hold is not None:
            await asyncio.to_thread(self.hold.wait, 20)
        if self.status != 200:
            error = {"type": "error", "error": {"type": "authentication_error", "message": self.error}}
            return web.json_response(error, status=self.status, headers=self.headers)
        if self.cuts:
            return await _cut(request)
        said = self._said(body)
        content = [{"type": "text", "text": said}] if isinstance(said, str) else said["content"]
        called = any(block["type"] == "tool_use" for block in content)
        answer = {
            "id": f"msg_{len(self.requests)}",
            "type": "message",
            "role": "assistant",
            "model": "claude-stand-in",
            "content": content,
            "stop_reason": "tool_use" if called else "end_turn",
            "usage": {"input_tokens": 7, "output_tokens": 2},
        }
        return web.json_response(answer)


async def _cut(request: web.Request) -> web.StreamResponse:
    """An answer that ends before the length that it said."""
    answer = web.StreamResponse(headers={"content-length": "1000", "content-type": "application/json"})
    await answer.prepare(request)
    await answer.write(b'{"choi')
    assert request.transport is not None
    request.transport.abort()
    return answer


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    text = json.dumps({"error": {"message": message, "type": "service_error", "code": None}})
    return web.Response(text=text, status=status, content_type="application/json", headers=headers)


@contextmanager
def running() -> Iterator[Service]:
    """A service that listens, from a thread of its own."""
    service = Service()
    loop = asyncio.new_event_loop()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", service.chat)
    app.router.add_post("/v1/messages", service.messages)
    app.router.add_post("/v1/embeddings", service.embeddings)
    runner = web.AppRunner(app)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        service.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield service
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()
