"""The embedded engine in a process of its own, where vLLM would be: what a run keeps, gives weights to, and may lose.

It is called as vLLM is (`python engine.py -m vllm.entrypoints.openai.api_server --model FOLDER --port N ...`), samples
with the same engine as any run without vLLM, and takes weights as the plugin for vLLM does: from a file.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import load_file
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lightning_rl.inference.engine import EmbeddedEngine
from lightning_rl.inference.load import load_model
from lightning_rl.inference.server import EngineServer


class Weights:
    """The routes by which a vLLM server is given weights, and told their version."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self.given: dict[str, Any] = {}
        self.label = "default"  # as vLLM has it before it is told

    async def nothing(self, _: Request) -> Response:
        return JSONResponse({"success": True})

    async def update(self, request: Request) -> Response:
        self.given = load_file((await request.json())["update_info"]["path"])
        return JSONResponse({})

    async def finish(self, request: Request) -> Response:
        self.label = (await request.json())["weight_version"]
        # The file names tied weights once, as checkpoints do.
        self.engine.update_weights(self.given, int(self.label), partial=True)
        return JSONResponse({})

    async def name(self, request: Request) -> Response:
        self.label = (await request.json())["new_version"]
        return JSONResponse({})

    async def info(self, _: Request) -> Response:
        return JSONResponse({"weight_version": self.label})

    def routes(self) -> list[Route]:
        orders = {
            "/init_weight_transfer_engine": self.nothing,
            "/start_weight_update": self.nothing,
            "/update_weights": self.update,
            "/finish_weight_update": self.finish,
            "/reset_prefix_cache": self.nothing,
            "/reset_encoder_cache": self.nothing,
            "/update_weight_version": self.name,
        }
        return [
            *(Route(path, order, methods=["POST"]) for path, order in orders.items()),
            Route("/weight_info", self.info),
        ]


def main() -> None:
    """Serve until killed."""
    flags = dict(zip(sys.argv, sys.argv[1:], strict=False))
    model: Any = load_model(Path(flags["--model"]))
    engine = EmbeddedEngine(model, max_model_len=int(flags["--max-model-len"]))
    server = EngineServer(engine, port=int(flags["--port"]))
    server.app.router.routes.extend(Weights(engine).routes())
    engine.start()
    server.start()
    print("serving", msgspec.json.encode(server.url).decode(), flush=True)
    assert server._thread is not None
    server._thread.join()


if __name__ == "__main__":
    main()
