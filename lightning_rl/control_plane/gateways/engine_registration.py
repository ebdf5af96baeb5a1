"""What a registration makes: a token engine or a chat backend, behind the gateway's router."""

import logging
from collections.abc import Awaitable, Callable

from lightning_rl.control_plane.gateways.engines import EngineRequest
from lightning_rl.store.errors import Conflict, Invalid
from lightning_rl_proxy.engines.base import Engine, EngineRefused, EngineUnavailable
from lightning_rl_proxy.engines.chat_backend import ChatBackend, LitellmBackend, OpenAIBackend
from lightning_rl_proxy.engines.probe import probe, probe_context
from lightning_rl_proxy.engines.sglang import SGLangEngine
from lightning_rl_proxy.engines.sglang_probe import probe_sglang
from lightning_rl_proxy.engines.vllm import TokenEngine
from lightning_rl_proxy.rendering.base import Renderer
from lightning_rl_proxy.routing.router import Router

_log = logging.getLogger(__name__)


def attacher(router: Router, renderer: Renderer | None) -> Callable[[EngineRequest], Awaitable[str]]:
    """A function that makes the router use an engine, and returns the router's name of it.

    It raises Invalid for what this server cannot use (a token engine, where nothing renders; a vLLM server that lacks a
    flag; an SGLang server that is too old; litellm, where it is not installed) and Conflict for a name that is taken by
    the other kind, and for a token engine that does not answer.
    """

    async def attach(request: EngineRequest) -> str:
        try:
            if request.is_backend:
                return router.register_backend(_backend(request))
            return router.register(await _engine(request, renderer))
        except EngineRefused as error:
            raise Invalid(str(error)) from error
        except (EngineUnavailable, ValueError) as error:
            raise Conflict(str(error)) from error

    return attach


async def _engine(request: EngineRequest, renderer: Renderer | None) -> Engine:
    if renderer is None:
        raise Invalid(
            f"engine {request.url} of kind {request.kind!r} takes tokens, but this server was started without a "
            "tokenizer: start it with the model's, or register the model as a chat backend (openai, litellm)"
        )
    url = request.url or ""
    if request.kind == "sglang":
        able = await probe_sglang(url)
        for lack in able.lacks:
            _log.warning("engine %s of model %s does without %s", url, request.model, lack)
        return SGLangEngine(
            model=request.model,
            url=url,
            stop_token_ids=renderer.stop_token_ids,
            policy_version=request.policy_version,
            able=able,
        )
    return TokenEngine(
        model=request.model,
        kind=request.kind,
        url=url,
        stop_token_ids=renderer.stop_token_ids,
        policy_version=request.policy_version,
        logprobs=await probe(url) if request.kind == "vllm" else "raw",
        context=await probe_context(url),
        adapter=request.adapter,
    )


def _backend(request: EngineRequest) -> ChatBackend:
    try:
        if request.kind == "openai":
            return OpenAIBackend(request.model, request.url or "", request.api_key, request.remote_model)
        return LitellmBackend(request.model, request.remote_model or request.model, request.url, request.api_key)
    except (ModuleNotFoundError, ValueError) as error:
        raise Invalid(str(error)) from error
