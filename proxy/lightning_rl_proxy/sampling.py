"""Requested and effective sampling parameters.

Where the algorithm gives sampling parameters they replace the agent's; where it gives none the agent's hold. The seed
of a call is derived from the attempt's seed key, the agent's own seed and the call's number: a group is never n times
the same, and a validation can be repeated.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

_REPLACED = ("temperature", "top_p", "top_k")


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters; None means: not given. `max_tokens` counts sampled tokens, `top_k` -1 means all.

    `stop` are texts that end the answer. `json_schema` is the schema that the answer must fit ({}: any JSON object).
    `logit_bias` is by token id.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: list[str] | None = None
    logit_bias: dict[str, float] | None = None
    json_schema: dict[str, Any] | None = None


def effective(requested: Sampling, algorithm: Mapping[str, float | int], *, seed_key: str, number: int) -> Sampling:
    """What the engine is asked for, for the call that arrived as `number`."""
    source = algorithm if algorithm else msgspec.structs.asdict(requested)
    values = {name: source[name] for name in _REPLACED if source.get(name) is not None}
    limits = [n for n in (requested.max_tokens, algorithm.get("max_tokens")) if n is not None]
    return Sampling(
        temperature=float(values.get("temperature", 1.0)),
        top_p=float(values.get("top_p", 1.0)),
        top_k=int(values.get("top_k", -1)),
        max_tokens=int(min(limits)) if limits else None,
        seed=mixed_seed(seed_key, requested.seed, number),
    )


def published(body: Mapping[str, Any], algorithm: Mapping[str, float | int]) -> dict[str, Any]:
    """A chat request's body under the parameters that the algorithm gives; what it does not give stays the agent's."""
    changed = dict(body)
    for name in _REPLACED:
        if (value := algorithm.get(name)) is not None:
            changed[name] = value
    if changed.get("top_k") == -1:
        del changed["top_k"]  # all tokens: what services do by themselves, and many know no such field
    limit = algorithm.get("max_tokens")
    if limit is not None:
        asked = [name for name in ("max_tokens", "max_completion_tokens") if isinstance(changed.get(name), int)]
        changed |= {name: min(changed[name], int(limit)) for name in asked or ()}
        if not asked:
            changed["max_tokens"] = int(limit)
    return changed


def mixed_seed(seed_key: str, requested: int | None, number: int) -> int:
    """A seed in [0, 2^63) that differs between attempts' keys, agents' seeds and call numbers."""
    digest = hashlib.blake2b(f"{seed_key}\n{requested}\n{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
