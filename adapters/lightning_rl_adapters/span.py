"""A span: the durable record of one thing that happened in an attempt.

Token ids and logprobs travel packed (little-endian int32 and float32 bytes), so that a stored token costs what it
weighs; `to_json` unpacks them for people and for other languages.
"""

import sys
from array import array
from collections.abc import Iterable
from typing import Any

import msgspec

from lightning_rl_adapters import semconv

_PACKED_AS = {
    semconv.PROMPT_IDS: "i",
    semconv.RESPONSE_IDS: "i",
    semconv.LOGPROBS: "f",
}


class Span(msgspec.Struct, kw_only=True):
    """One record of an attempt. Times are nanoseconds since the epoch; `number` is the order of arrival."""

    span_id: str
    rollout_id: str
    attempt_id: str
    name: str
    number: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as little-endian int32 bytes, 4 per token."""
    return _little_endian(array("i", ids))


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    """Logprobs (nats) as little-endian float32 bytes, 4 per token."""
    return _little_endian(array("f", logprobs))


def unpack_ids(packed: bytes) -> list[int]:
    """The inverse of `pack_ids`."""
    return _unpack("i", packed)


def unpack_logprobs(packed: bytes) -> list[float]:
    """The inverse of `pack_logprobs`; exact for values that were float32."""
    return _unpack("f", packed)


def to_json(span: Span) -> dict[str, Any]:
    """The span as JSON-able values, with its packed arrays as lists of numbers."""
    record: dict[str, Any] = msgspec.to_builtins(span, builtin_types=(bytes,))
    record["attributes"] = {
        name: _unpack(_PACKED_AS[name], value) if name in _PACKED_AS and value is not None else value
        for name, value in record["attributes"].items()
    }
    return record


def _little_endian(values: "array[Any]") -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _unpack(typecode: str, packed: bytes) -> list[Any]:
    values: array[Any] = array(typecode)
    values.frombytes(packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
