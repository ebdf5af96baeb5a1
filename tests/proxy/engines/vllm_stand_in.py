"""A stand-in for a vLLM server, as far as the probe at registration asks: with or without the flags that it needs."""

import asyncio
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

LOGITS = {3: 2.0, 4: 1.0, 5: 0.5, 6: -1.0, 7: -3.0}


class StandIn:
    """Answers the probe's questions as a vLLM server with these flags does; `most` is its --max-logprobs."""

    def __init__(
        self, *, scale_out: bool = True, dev_mode: bool = True, mode: str = "raw_logprobs", most: int = 20
    ) -> None:
        self.scale_out, self.dev_mode, self.mode, self.most = scale_out, dev_mode, mode, most
        self.paused = False
        self.status = 200
        self.sampled = 0
        self.told: list[str] = []

    @property
    def app(self) -> web.Application:
        app = web.Application()
        if self.dev_mode:
            app.router.add_get("/is_paused", self.is_paused)
        app.router.add_post("/inference/v1/generate", self.generate)
        return app

    async def is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.paused}, status=self.status)

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not self.scale_out:
            return error(403, "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out.")
        if "token_ids" not in body:
            return error(400, "Field required")
        asked = body["sampling_params"]
        if asked["logprobs"] > self.most:
            return error(400, f"Requested sample logprobs of {asked['logprobs']}, which is greater than {self.most}")
        self.sampled += 1
        found = told(self.mode, asked["temperature"])
        top = [{"token_id": token, "logprob": value} for token, value in found.items()][: asked["logprobs"]]
        entry = {"token_id": 3, "logprob": found[3], "top_logprobs": top}
        choice = {"token_ids": [3], "finish_reason": "length", "logprobs": {"content": [entry]}}
        return web.json_response({"choices": [choice]})


def error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def told(mode: str, temperature: float) -> dict[int, float]:
    """What a server in this logprobs mode says of the tokens."""
    tempered = {token: logit / temperature for token, logit in LOGITS.items()} if "processed" in mode else LOGITS
    if "logits" in mode:
        return tempered
    total = math.log(sum(math.exp(logit) for logit in tempered.values()))
    return {token: logit - total for token, logit in tempered.items()}


@contextmanager
def serving(app: web.Application, port: int = 0) -> Iterator[str]:
    """The URL of an application that listens, from a thread of its own."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(app)

    async def start() -> str:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    url = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield url
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()
