"""Requested and effective sampling parameters.

A parameter that the algorithm gives replaces the agent's; where it gives none the agent's holds. The seed of a call is
derived from the attempt's seed key, the agent's own seed and the call's number: a group is never n times the same, and
a validation can be repeated.
"""

import hashlib
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import msgspec

REPLACED = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip
_replaced = attrgetter(*REPLACED)
# What only some engines can do.
SPECIFIC = (
    "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "json_schema", "regex",
    "choice", "grammar", "min_tokens", "ignore_eos", "bad_words", "allowed_token_ids",
)  # fmt: skip
_COLDEST = 0.01  # above 0: vLLM takes no less, whatever it is asked for, and the record says what was sampled by
_NEUTRAL = {"min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters; None means: not given. `max_tokens` counts sampled tokens, `top_k` -1 means all.

    `stop` are texts that end the answer, `stop_token_ids` tokens beside the model's own. An answer may have to fit one
    of these: `json_schema` ({}: any JSON object), `regex`, `choice` (a list of texts), `grammar` (a context-free one).
    `logit_bias` is by token id. Of two requests that wait at an engine the one with the lower `priority` is first.
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
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    priority: int | None = None

    @property
    def constrained(self) -> bool:
        """Whether the answer must fit something."""
        return any(one is not None for one in (self.json_schema, self.regex, self.choice, self.grammar))


def effective(
    requested: Sampling,
    algorithm: Mapping[str, float | int],
    *,
    defaults: Mapping[str, Any] | None = None,
    room: int | None = None,
    seed_key: str,
    number: int,
) -> Sampling:
    """What the engine is asked for, for the call that arrived as `number`. `defaults` hold where it asks for nothing;
    an answer has `room` tokens at most."""
    if defaults:
        absent = {name: value for name, value in defaults.items() if getattr(requested, name) is None}
        requested = msgspec.structs.replace(requested, **absent)
    values = dict(zip(REPLACED, _replaced(requested), strict=True)) | dict(algorithm)
    penalty_values = {name: float(value) for name in _NEUTRAL if (value := values[name]) is not None}
    penalties = {name: value for name, value in penalty_values.items() if value != _NEUTRAL[name]}
    temperature, top_p, top_k = values["temperature"], values["top_p"], values["top_k"]
    limits = [n for n in (requested.max_tokens, algorithm.get("max_tokens"), room) if n is not None]
    limit = int(min(limits)) if limits else None
    least = requested.min_tokens
    return Sampling(
        temperature=1.0 if temperature is None else max(float(temperature), _COLDEST) if temperature > 0 else 0.0,
        top_p=1.0 if top_p is None else float(top_p),
        top_k=-1 if top_k is None else int(top_k),
        max_tokens=limit,
        seed=mixed_seed(seed_key, requested.seed, number),
        stop=requested.stop or None,
        logit_bias=requested.logit_bias or None,
        json_schema=requested.json_schema,
        regex=requested.regex,
        choice=requested.choice,
        grammar=requested.grammar,
        min_tokens=least if least is None or limit is None else min(least, limit),
        ignore_eos=bool(algorithm.get("ignore_eos")) or requested.ignore_eos,
        stop_token_ids=requested.stop_token_ids,
        bad_words=requested.bad_words,
        allowed_token_ids=requested.allowed_token_ids,
        priority=requested.priority,
        **penalties,
    )


def mixed_seed(seed_key: str, requested: int | None, number: int) -> int:
    """A seed in [0, 2^63) that differs between attempts' keys, agents' seeds and call numbers."""
    digest = hashlib.blake2b(f"{seed_key}\n{requested}\n{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
