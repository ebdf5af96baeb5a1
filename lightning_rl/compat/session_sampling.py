"""How the calls of sessions are sampled: defaults, of which requests override a few by name, and nothing else."""

from collections.abc import Mapping
from typing import Any

from lightning_rl.errors import Explained
from lightning_rl.store.client import HttpStore
from lightning_rl.store.errors import NotFound

OVERRIDABLE = ("temperature", "top_p", "top_k", "max_tokens", "stop")
_LOCKED_OFF: dict[str, float] = {
    "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip


class SessionSamplingError(Explained, ValueError):
    """Sampling defaults that sessions cannot have."""


def published(store: HttpStore, defaults: Mapping[str, Any], model: str | None) -> str:
    """Publish the policy with these defaults, beside the resources that there are; the id of the resources.

    Raises SessionSamplingError for a parameter that there is not, or where `model` must be named.
    """
    valid_names = (*OVERRIDABLE, *_LOCKED_OFF)
    if unknown := sorted(set(defaults) - set(valid_names)):
        raise SessionSamplingError(f"sampling_defaults has {unknown}; there are {sorted(valid_names)}")
    locked = {name: defaults.get(name, off) for name, off in _LOCKED_OFF.items()}
    main_llm = {
        "type": "proxy_llm",
        "model": _policy(store, model),
        "sampling_parameters": locked,
        "val_sampling_parameters": locked,
        "default_sampling_parameters": {name: defaults[name] for name in OVERRIDABLE if name in defaults},
    }
    return store.publish({**_latest(store), "main_llm": main_llm}).resources_id


def _latest(store: HttpStore) -> dict[str, dict[str, Any]]:
    try:
        return store.resources().resources
    except NotFound:
        return {}


def _policy(store: HttpStore, model: str | None) -> str:
    if model is not None:
        return model
    named = _latest(store).get("main_llm", {}).get("model")
    if named is not None:
        return str(named)
    served = sorted(store.state()["models"])
    if len(served) != 1:
        raise SessionSamplingError(f"the server serves {served}: say which is the policy, model=...")
    return str(served[0])
