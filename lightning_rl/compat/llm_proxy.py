"""Agent-lightning's `LLMProxy` over ours, for those who compose store, proxy and algorithm by hand.

Invariant: it serves nothing itself. The gateway is that of the store's server; this tells it which models there are,
and takes them out again.
"""

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from lightning_rl.agents.resources import ProxyLLM
from lightning_rl.compat.lightning_store import LightningStore
from lightning_rl.store.errors import NotFound, StoreError

_TOKENS = "hosted_vllm/"  # litellm's prefix of a vLLM server, which the gateway asks for token ids
_ENVIRONMENT = "os.environ/"  # litellm's way to name a variable that holds a key
_SERVERS = ("host", "port", "num_workers", "launch_mode", "launcher_args", "num_retries")
_INSTEAD = {
    "litellm_config": "settings of litellm's own server; models are in model_list",
    "middlewares": "the gateway takes no middleware; what it records are the spans of the store",
    "callbacks": "the gateway records token ids, logprobs and messages of every call",
}
_log = logging.getLogger(__name__)


class _Registration(NamedTuple):
    """How the gateway is told of a model: `register_engine`'s arguments."""

    model: str
    kind: str
    url: str | None
    api_key: str | None
    remote_model: str | None


class LLMProxy:
    """The models of `model_list` behind the gateway of a store's server: `lightning-rl serve`.

    Args:
        port: Agent-lightning's, which started a server; it has no effect, and is told of.
        model_list: litellm's form, `{"model_name": ..., "litellm_params": {"model": ..., "api_base"?, "api_key"?}}`.
            `hosted_vllm/NAME` with the server's own model is a token engine, whose calls can be trained; any other is a
            frozen chat model.
        store: of the server; `LightningStoreClient(url)`, or an algorithm's.
        theirs: as `port`: `host`, `num_workers`, `launch_mode`, `launcher_args`, `num_retries`.

    Raises ValueError for a model that is not in that form, and TypeError for `litellm_config`, `middlewares` and
    `callbacks`.
    """

    def __init__(
        self,
        port: int | None = None,
        model_list: Sequence[Mapping[str, Any]] | None = None,
        store: LightningStore | None = None,
        **options: Any,
    ) -> None:
        options = {name: value for name, value in ({"port": port} | options).items() if value is not None}
        for name in options:
            if name not in _SERVERS:
                raise TypeError(f"LLMProxy takes no {name!r}: {_INSTEAD.get(name, 'there is no such argument')}")
        if options:
            _log.warning(
                "LLMProxy starts no server, so %s have no effect: lightning-rl serve has them", sorted(options)
            )
        self._models = [_model(each) for each in model_list or ()]
        self._store = store
        self._engines: list[str] | None = None

    def set_store(self, store: LightningStore) -> None:
        """The store whose server is told of the models. Raises RuntimeError while it is running."""
        if self.is_running():
            raise RuntimeError("the proxy is running: stop it before another store is set")
        self._store = store

    def is_running(self) -> bool:
        """Whether the gateway was told of the models."""
        return self._engines is not None

    async def start(self) -> None:
        """Tell the gateway of the models: of all, or of none where it refuses one.

        Raises a StoreError for one that it refuses, RuntimeError without a store.
        """
        if self.is_running():
            return
        store, engine_ids = self._server().store, list[str]()
        try:
            for each in self._models:
                engine = await asyncio.to_thread(
                    store.register_engine,
                    each.model,
                    each.kind,
                    each.url,
                    api_key=each.api_key,
                    remote_model=each.remote_model,
                )
                engine_ids.append(str(engine["engine_id"]))
        except StoreError:
            await self._remove(engine_ids)
            raise
        self._engines = engine_ids

    async def stop(self) -> None:
        """Take the models out of the gateway: they get no new calls, and those in flight end.

        Raises a StoreError where the server does not answer; the proxy then still runs, and can be stopped again.
        """
        if self._engines is not None:
            await self._remove(self._engines)
        self._engines = None

    async def restart(self) -> None:
        """Stop and start."""
        await self.stop()
        await self.start()

    async def update_model_list(self, model_list: Sequence[Mapping[str, Any]]) -> None:
        """Other models from now on."""
        models = [_model(each) for each in model_list]
        running = self.is_running()
        await self.stop()
        self._models = models
        if running:
            await self.start()

    def as_resource(
        self,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        model: str | None = None,
        sampling_parameters: Mapping[str, Any] | None = None,
    ) -> ProxyLLM:
        """What an algorithm publishes: `store.add_resources({"main_llm": proxy.as_resource()})`. The gateway applies
        the sampling parameters to calls of the server's own model; a frozen one is asked as its agent asks.

        Raises ValueError where there are several models and none is named, and for an attempt of its own: its URL has a
        key, which whoever claims it is given.
        """
        if rollout_id is not None or attempt_id is not None:
            raise ValueError("the LLM of an attempt comes with its claim: resources['main_llm'].resolve(rollout)")
        names = [each.model for each in self._models]
        if model is None and len(names) != 1:
            raise ValueError(f"which of the models {names}? Name it: as_resource(model=...)")
        sampling = dict(sampling_parameters or {})
        return ProxyLLM(model or names[0], sampling, sampling)

    async def _remove(self, engines: list[str]) -> None:
        """Empties the list as the gateway forgets them; one that it does not know is gone already."""
        while engines:
            with suppress(NotFound):
                await asyncio.to_thread(self._server().store.remove_engine, engines[-1])
            engines.pop()

    def _server(self) -> LightningStore:
        if self._store is None:
            raise RuntimeError("the proxy has no store: LLMProxy(..., store=lrl.LightningStoreClient(url))")
        return self._store


def _model(entry: Mapping[str, Any]) -> _Registration:
    """An entry of litellm's `model_list`."""
    name, params = entry.get("model_name"), dict(entry.get("litellm_params") or {})
    there, url, key = (params.pop(field, None) for field in ("model", "api_base", "api_key"))
    if not isinstance(name, str) or not isinstance(there, str):
        raise ValueError(f"{dict(entry)!r:.200} is no model: give model_name, and litellm_params with model")
    if params:
        raise ValueError(f"model {name!r}: litellm_params {sorted(params)} are not taken; sampling is as_resource's")
    if there.startswith(_TOKENS) and url:
        return _Registration(name, "vllm", str(url).rstrip("/").removesuffix("/v1"), None, None)
    return _Registration(name, "litellm", url, _key(key), there)


def _key(key: Any) -> str | None:
    """A service's key, which may name the variable that holds it."""
    if isinstance(key, str) and key.startswith(_ENVIRONMENT):
        variable = key.removeprefix(_ENVIRONMENT)
        if variable not in os.environ:
            raise ValueError(f"api_key names the environment variable {variable}, which is not set")
        return os.environ[variable]
    return None if key is None else str(key)
