"""Agent-lightning's store over ours, for algorithms that are composed by hand: async methods under its names.

Invariant: nothing is kept here; each method is one or several requests of `HttpStore`, with its errors.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from lightning_rl.agents.resources import LLM, PromptTemplate, ProxyLLM
from lightning_rl.data.dataset import check_task
from lightning_rl.errors import Explained
from lightning_rl.processes.service_keys import ADMIN_KEY
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import (
    Attempt,
    AttemptedRollout,
    Resources,
    Rollout,
    RolloutConfig,
    RolloutDetail,
    RolloutRequest,
)
from lightning_rl.store.errors import NotFound
from lightning_rl_adapters.span import Span

_WAIT_SECONDS = 2.0  # of one long poll
_STATUSES = {"queuing": "queued", "preparing": "running", "requeuing": "queued"}  # theirs that ours has no name for
_SPANS = "an agent's calls are recorded by the gateway, its own spans come by OTLP (docs/opentelemetry.md)"
_INSTEAD = {
    "dequeue_rollout": "runners claim rollouts: lightning-rl runner, or Trainer(n_runners=...)",
    "dequeue_many_rollouts": "runners claim rollouts: lightning-rl runner, or Trainer(n_runners=...)",
    "start_attempt": "a rollout is tried again by itself, as its RolloutConfig says",
    "add_span": _SPANS,
    "add_many_spans": _SPANS,
    "add_otel_span": _SPANS,
    "update_attempt": "a runner ends its attempts",
    "query_workers": "HttpStore.workers()",
    "get_worker_by_id": "HttpStore.workers()",
    "update_worker": "runners tell the server themselves that they live",
    "query_resources": "get_latest_resources, or get_resources_by_id",
    "get_next_span_sequence_id": _SPANS,
    "otlp_traces_endpoint": "a runner sets OTEL_EXPORTER_OTLP_ENDPOINT for its agents (docs/opentelemetry.md)",
    "capabilities": "all that it can do is a method of it",
    "statistics": "GET /metrics of the server",
}


class StoreKeyMissing(Explained, ValueError):
    """A store elsewhere is named, and there is no key for it."""


class ResourcesUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """Published resources: prompts as `PromptTemplate`, models as `ProxyLLM`, others as the dicts that they are."""

    resources_id: str
    version: int
    resources: dict[str, Any]


class LightningStore:
    """The store of a running server.

    Args:
        store: the requests, with an admin key.
        check: called while rollouts are waited for; raises where a process of the run has died.
    """

    def __init__(self, store: HttpStore, *, check: Callable[[], None] = lambda: None) -> None:
        self.store = store
        self._check = check
        self._registering = threading.Lock()

    def __getattr__(self, name: str) -> NoReturn:
        """Raises AttributeError, which for a method of theirs says what does its work."""
        instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{instead}")

    # Rollouts

    async def enqueue_rollout(
        self,
        input: Any,  # its name there
        mode: str | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Rollout:
        """Ask for a rollout of the task `input`, with the latest resources where none are named. Raises TaskError for a
        task that is no JSON value."""
        request = _request(input, mode, resources_id, config, metadata)
        [rollout] = await asyncio.to_thread(self.store.enqueue, [request])
        return rollout

    async def enqueue_many_rollouts(self, rollouts: Sequence[Any]) -> list[Rollout]:
        """As many calls of `enqueue_rollout` in one; each has its arguments as attributes, or is a mapping of them."""
        fields = [one if isinstance(one, Mapping) else vars(one) for one in rollouts]
        names = ("input", "mode", "resources_id", "config", "metadata")
        requests = [_request(*(one.get(name) for name in names)) for one in fields]
        return await asyncio.to_thread(self.store.enqueue, requests)

    async def start_rollout(
        self,
        input: Any,  # its name there
        mode: str | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> AttemptedRollout:
        """Ask for a rollout that the caller runs: it is claimed at once. Raises as `enqueue_rollout`."""
        request = _request(input, mode, resources_id, config, metadata)
        claim = await asyncio.to_thread(self.store.start, request)
        return claim.attempted()

    async def query_rollouts(
        self,
        *,
        status_in: Sequence[str] | None = None,
        rollout_id_in: Collection[str] | None = None,
        limit: int = -1,
        offset: int = 0,
    ) -> list[Rollout]:
        """The rollouts of these statuses and ids, oldest first; `limit` -1: all behind the first `offset`.

        Raises where a process of the run has died, as `get_rollout_by_id` and `wait_for_rollouts` do.
        """
        self._check()
        wanted = None if status_in is None else {_STATUSES.get(status, status) for status in status_in}
        rollouts = [
            rollout
            for rollout in await asyncio.to_thread(lambda: list(self.store.rollouts()))
            if (wanted is None or rollout.status in wanted)
            and (rollout_id_in is None or rollout.rollout_id in rollout_id_in)
        ][offset:]
        return rollouts if limit < 0 else rollouts[:limit]

    async def get_rollout_by_id(self, rollout_id: str) -> RolloutDetail | None:
        """The rollout with its attempts; None where there is none."""
        self._check()
        try:
            return await asyncio.to_thread(self.store.rollout, rollout_id)
        except NotFound:
            return None

    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        """Those of the rollouts that have ended, when all have, or after `timeout` seconds. Raises NotFound."""
        there = {rollout.rollout_id for rollout in await asyncio.to_thread(self.store.find, list(rollout_ids))}
        if unknown := [rollout_id for rollout_id in rollout_ids if rollout_id not in there]:
            raise NotFound(f"there is no rollout {unknown[0]!r} to wait for")
        end = None if timeout is None else time.monotonic() + timeout
        waiting, ended = list(dict.fromkeys(rollout_ids)), dict[str, Rollout]()
        while waiting:
            seconds = _WAIT_SECONDS if end is None else min(_WAIT_SECONDS, max(0.0, end - time.monotonic()))
            for rollout in await asyncio.to_thread(self.store.wait, waiting, seconds):
                ended[rollout.rollout_id] = rollout
                waiting.remove(rollout.rollout_id)
            self._check()
            if end is not None and time.monotonic() >= end:
                break
        return [ended[rollout_id] for rollout_id in dict.fromkeys(rollout_ids) if rollout_id in ended]

    async def update_rollout(self, rollout_id: str, *, status: str) -> Rollout:
        """End a rollout as cancelled. Raises ValueError for another status: rollouts end by their attempts."""
        if status != "cancelled":
            raise ValueError(f"rollout {rollout_id} cannot be set to {status!r}: only to 'cancelled'")
        return await asyncio.to_thread(self.store.cancel, rollout_id)

    async def query_attempts(self, rollout_id: str) -> list[Attempt]:
        """The attempts at a rollout, oldest first. Raises NotFound."""
        return list((await asyncio.to_thread(self.store.rollout, rollout_id)).attempts)

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        """The newest attempt; None before the first. Raises NotFound."""
        return next(reversed(await self.query_attempts(rollout_id)), None)

    async def query_spans(self, rollout_id: str, attempt_id: str | None = None) -> list[Span]:
        """What is recorded of a rollout, call by call: of one attempt, of the `latest`, or of all.

        Rewards are in `rollout.reward` and `rollout.rewards`, not among the spans.
        """
        traces = await asyncio.to_thread(self.store.traces, [rollout_id])
        attempts = traces[rollout_id].attempts if rollout_id in traces else []
        if attempt_id == "latest":
            attempts = attempts[-1:]
        elif attempt_id is not None:
            attempts = [each for each in attempts if each.attempt.attempt_id == attempt_id]
        return [span for each in attempts for span in each.spans]

    # Resources

    async def add_resources(self, resources: Mapping[str, Any]) -> ResourcesUpdate:
        """Publish resources: `PromptTemplate`, `ProxyLLM`, or `LLM`, whose service the gateway then asks in the agents'
        place. They are the latest from now on.

        Each `LLM` is answered by its own service alone: of two that have one model's name at different URLs, the second
        is `name@URL` for agents. A key given later holds for all calls from then on."""
        return await self._publish(None, resources)

    async def update_resources(self, resources_id: str, resources: Mapping[str, Any]) -> ResourcesUpdate:
        """The same, under an id of one's own. Raises Conflict where other resources have it."""
        return await self._publish(resources_id, resources)

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        """What was published last; None where nothing was."""
        return await self.get_resources_by_id("latest")

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        """What was published under this id; None where nothing was."""
        try:
            return _update(await asyncio.to_thread(self.store.resources, resources_id))
        except NotFound:
            return None

    async def _publish(self, resources_id: str | None, resources: Mapping[str, Any]) -> ResourcesUpdate:
        wire = {name: await self._published(name, value) for name, value in resources.items()}
        return _update(await asyncio.to_thread(self.store.publish, wire, resources_id))

    async def _published(self, name: str, value: Any) -> dict[str, Any]:
        if isinstance(value, PromptTemplate):
            return value.published()
        if isinstance(value, LLM):
            name = await asyncio.to_thread(self._register, value)
            return _proxy(name, value.sampling_parameters, value.sampling_parameters)
        if isinstance(value, ProxyLLM):
            return _proxy(value.model, value.sampling_parameters, value.val_sampling_parameters)
        if isinstance(value, Mapping):
            return dict(value)
        raise TypeError(f"resource {name!r} is {value!r:.80}; give a PromptTemplate, an LLM, a ProxyLLM or a dict")

    def _register(self, llm: LLM) -> str:
        """The name by which the gateway asks this service, and no other one."""
        with self._registering:
            named_so = [engine["url"] for engine in self.store.engines() if engine["model"] == llm.model]
            alone = all(url == llm.base_url for url in named_so)
            name, there = (llm.model, None) if alone else (f"{llm.model}@{llm.base_url}", llm.model)
            self.store.register_engine(name, "openai", llm.base_url, api_key=llm.api_key or None, remote_model=there)
            return name


class LightningStoreClient(LightningStore):
    """The store of a server elsewhere, `lightning-rl serve`, whose admin key is LIGHTNING_RL_ADMIN_KEY's.

    Raises StoreKeyMissing where no key is given, nor set.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        key = key or os.environ.get(ADMIN_KEY)
        if not key:
            raise StoreKeyMissing(f"the store at {url} opens by its admin key: set {ADMIN_KEY}, in the environment")
        super().__init__(HttpStore(url, key))

    async def close(self) -> None:
        """Close the connections."""
        self.store.close()


def _request(
    task: Any,
    mode: str | None,
    resources_id: str | None,
    config: RolloutConfig | None,
    metadata: Mapping[str, Any] | None,
) -> RolloutRequest:
    """Raises TaskError for a task that is no JSON value, and msgspec.ValidationError for what is no request."""
    check_task(task, "the task")
    fields = {
        "task": task,
        "mode": mode or "train",
        "resources_id": resources_id,
        "config": msgspec.to_builtins(config or RolloutConfig()),
        "metadata": dict(metadata or {}),
    }
    return msgspec.convert(fields, RolloutRequest)


def _proxy(model: str, train: Mapping[str, Any], val: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "proxy_llm",
        "model": model,
        "sampling_parameters": dict(train),
        "val_sampling_parameters": dict(val),
    }


def _update(published: Resources) -> ResourcesUpdate:
    values = {name: _value(value) for name, value in published.resources.items()}
    return ResourcesUpdate(resources_id=published.resources_id, version=published.version, resources=values)


def _value(value: dict[str, Any]) -> Any:
    if value.get("type") == "prompt_template":
        return PromptTemplate(value["template"], value.get("engine", "f-string"))
    if value.get("type") == "proxy_llm":
        train, val = (value.get(name, {}) for name in ("sampling_parameters", "val_sampling_parameters"))
        return ProxyLLM(value["model"], train, val)
    return value
