"""A span: the durable record of one thing that happened in an attempt.

Token ids and logprobs travel packed (little-endian int32 and float32 bytes), so that a stored token costs what it
weighs; `to_json` unpacks them for people and for other languages. In a store a span is an array, and the attributes
that we know are numbers there, since their names would weigh more than some of their values. Tools are compressed
there: every attempt has the same ones.
"""

import base64
import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from lightning_rl_adapters import semconv
from lightning_rl_adapters.text import encodable

_PACKED_AS = {
    semconv.PROMPT_IDS: "i",
    semconv.RESPONSE_IDS: "i",
    semconv.LOGPROBS: "f",
}
_ARRAY = 0x90  # the first byte of a short MessagePack array, but for its length

# An attribute's number in stored spans is its place here: new ones go to the end, none is ever moved or taken away.
_NUMBERED = (
    semconv.OPERATION, semconv.REQUEST_MODEL, semconv.RESPONSE_MODEL, semconv.FINISH_REASONS, semconv.INPUT_TOKENS,
    semconv.OUTPUT_TOKENS, semconv.INPUT_MESSAGES, semconv.OUTPUT_MESSAGES, semconv.AGENT, semconv.DIALECT,
    semconv.PARENT, semconv.FORK_CAUSE, semconv.FORK_AT, semconv.ECHO_EDITED, semconv.PROMPT_IDS, semconv.RESPONSE_IDS,
    semconv.LOGPROBS, semconv.LOGPROB_KIND, semconv.POLICY_VERSIONS, semconv.SAMPLING_REQUESTED,
    semconv.SAMPLING_EFFECTIVE, semconv.IGNORED_FIELDS, semconv.DELIVERED, semconv.EXACT, semconv.TRAINABLE,
    semconv.OVERSHOOT, semconv.REWARD_NAME, semconv.REWARD_VALUE, semconv.REWARD_CALL, semconv.MESSAGE, semconv.OBJECT,
    semconv.OPERATION_NAME, semconv.OPERATION_INPUTS, semconv.OPERATION_OUTPUT, semconv.PARENT_SPAN, semconv.EVENTS,
    semconv.RESOURCE, semconv.STATUS_CODE, semconv.STATUS_DESCRIPTION, semconv.SCOPE, semconv.KIND,
    semconv.TOOLS, semconv.INSTRUCTIONS, semconv.REQUEST,
    semconv.MEDIA, semconv.MEDIA_SHA256, semconv.MEDIA_TYPE, semconv.MEDIA_DATA, semconv.TOOL_SCHEMAS,
)  # fmt: skip
_NUMBERS: dict[str, int] = {name: number for number, name in enumerate(_NUMBERED)}
_TOOLS, _IMAGE, _SHA256 = (_NUMBERS[name] for name in (semconv.TOOL_SCHEMAS, semconv.MEDIA_DATA, semconv.MEDIA_SHA256))
_IMAGE_NAME = semconv.MEDIA_SPAN.encode()
_APART = -1  # in the place of an image's bytes: no attribute's number, so that nobody can write a span that has it
_NIL = msgspec.Raw(b"\xc0")
_COMPRESSED_TOOLS = 64  # texts that are kept; a run's agents have few
_LARGEST = 256 * 1024  # characters of one of these


class Span(msgspec.Struct, kw_only=True):
    """One record of an attempt. Times are nanoseconds since the epoch; `number` orders an attempt's spans.

    A call's number is its order of arrival, from 0; that of any other span is its start time, so that it comes later.
    """

    span_id: str
    rollout_id: str
    attempt_id: str
    name: str
    number: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]


class Packed(msgspec.Struct, frozen=True, gc=False):
    """A span as a store keeps it: its `record`, and what it is found by."""

    span_id: str
    rollout_id: str
    attempt_id: str
    number: int
    record: bytes


class ImageApart(NamedTuple):
    """An image's span as a store keeps it: its `record` without the image's bytes, what it says is the SHA-256 of
    these, and the bytes."""

    record: bytes
    sha256: str
    data: bytes


class _Stored(msgspec.Struct, array_like=True):
    """A span as a store keeps it; the values of its attributes are left as they are packed."""

    span_id: str
    rollout_id: str
    attempt_id: str
    name: str
    number: int
    start_ns: int
    end_ns: int
    attributes: dict[int | str, Any]


class _Unread(_Stored, array_like=True):
    attributes: dict[int | str, msgspec.Raw]


_STORED = msgspec.msgpack.Decoder(_Unread)
_SPAN = msgspec.msgpack.Decoder(Span)


def pack(span: Span) -> Packed:
    """A span as a store keeps it. Raises OverflowError for a whole number of more than 64 bits in it, and
    UnicodeEncodeError for half a surrogate pair; `storable` attributes have neither."""
    attributes: dict[int | str, Any] = {_NUMBERS.get(name, name): value for name, value in span.attributes.items()}
    if _TOOLS in attributes:
        tools = attributes.pop(_TOOLS)
        is_text = isinstance(tools, str)  # others' spans may have anything of that name
        attributes[_TOOLS if is_text else semconv.TOOL_SCHEMAS] = _compressed(tools) if is_text else tools
    record = msgspec.msgpack.encode(
        _Stored(
            span.span_id, span.rollout_id, span.attempt_id, span.name, span.number, span.start_ns, span.end_ns,
            attributes,
        )
    )  # fmt: skip
    return Packed(span.span_id, span.rollout_id, span.attempt_id, span.number, record)


def packed(record: bytes) -> Packed:
    """What `pack` made a record of; also of those of earlier releases."""
    if record[0] & 0xF0 != _ARRAY:
        return pack(unpack(record))
    stored = _STORED.decode(record)
    return Packed(stored.span_id, stored.rollout_id, stored.attempt_id, stored.number, record)


def name_of(record: bytes) -> str:
    """The name of a record's span, of which nothing else is unpacked."""
    return _STORED.decode(record).name if record[0] & 0xF0 == _ARRAY else unpack(record).name


def image_apart(record: bytes) -> ImageApart | None:
    """An image's span without the image's bytes; None for any other record."""
    stored = _image_span(record)
    if stored is None:
        return None
    data, sha256 = (msgspec.msgpack.decode(stored.attributes.get(name, _NIL)) for name in (_IMAGE, _SHA256))
    if not isinstance(data, bytes) or not isinstance(sha256, str):
        return None  # somebody else's, of the same name
    stored.attributes[_APART] = stored.attributes[_SHA256]
    del stored.attributes[_IMAGE]
    return ImageApart(msgspec.msgpack.encode(stored), sha256, data)


def image_of(record: bytes) -> str | None:
    """The SHA-256 of the image whose bytes `image_apart` took out of a record; None for any other record."""
    stored = _image_span(record)
    if stored is None or _APART not in stored.attributes:
        return None
    return msgspec.msgpack.decode(stored.attributes[_APART], type=str)


def with_image(record: bytes, data: bytes) -> bytes:
    """The record that `image_apart` took `data` out of."""
    stored = _STORED.decode(record)
    del stored.attributes[_APART]
    stored.attributes[_IMAGE] = msgspec.Raw(msgspec.msgpack.encode(data))
    return msgspec.msgpack.encode(stored)


def _image_span(record: bytes) -> _Unread | None:
    if record[0] & 0xF0 != _ARRAY or _IMAGE_NAME not in record:  # most are calls, which are not unpacked for this
        return None
    stored = _STORED.decode(record)
    return stored if stored.name == semconv.MEDIA_SPAN else None


def unpack(record: bytes) -> Span:
    """The span of a record, which is one of `pack`'s or of an earlier release."""
    return _SPAN.decode(unpacked(record))


def unpacked(record: bytes) -> bytes:
    """The MessagePack of the `Span` that a store keeps as `record`; earlier releases kept just that."""
    if record[0] & 0xF0 != _ARRAY:
        return record
    stored = _STORED.decode(record)
    fields: dict[str, Any] = {name: getattr(stored, name) for name in Span.__struct_fields__}
    attributes: dict[str, Any] = {
        _NUMBERED[name] if isinstance(name, int) else name: value
        for name, value in stored.attributes.items()
        if name != _APART
    }
    if _TOOLS in stored.attributes:
        attributes[semconv.TOOL_SCHEMAS] = _decompressed(msgspec.msgpack.decode(stored.attributes[_TOOLS]))
    fields["attributes"] = attributes
    return msgspec.msgpack.encode(fields)


def storable(value: Any) -> Any:
    """A value with its whole numbers of more than 64 bits as text, and half surrogates as escapes: no record can hold
    them otherwise."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {storable(name): storable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [storable(inner) for inner in value]
    return str(value) if isinstance(value, int) and not -(2**63) <= value < 2**64 else value


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32 bytes, 4 per token."""
    return struct.pack(f"<{len(ids)}i", *ids)  # in half the time of an array


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    """Logprobs (nats) as little-endian float32 bytes, 4 per token."""
    values = array("f", logprobs)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """The inverse of `pack_ids`."""
    return _unpack("i", packed)


def unpack_logprobs(packed: bytes) -> list[float]:
    """The inverse of `pack_logprobs`; exact for values that were float32."""
    return _unpack("f", packed)


def to_json(span: Span) -> dict[str, Any]:
    """The span as JSON-able values, with its packed arrays as lists of numbers, and an image's bytes in base64."""
    record: dict[str, Any] = msgspec.to_builtins(span, builtin_types=(bytes,))
    record["attributes"] = {
        name: _unpack(_PACKED_AS[name], value) if name in _PACKED_AS and value is not None else value
        for name, value in record["attributes"].items()
    }
    if (data := record["attributes"].get(semconv.MEDIA_DATA)) is not None:
        record["attributes"][semconv.MEDIA_DATA] = base64.b64encode(data).decode()
    return record


def _compressed(text: str) -> bytes:
    return _compressed_once(text) if len(text) <= _LARGEST else zlib.compress(text.encode())


@lru_cache(_COMPRESSED_TOOLS)
def _compressed_once(text: str) -> bytes:
    return zlib.compress(text.encode())


def _decompressed(stored: Any) -> Any:
    """The text; earlier releases kept it as it is."""
    return zlib.decompress(stored).decode() if isinstance(stored, bytes) else stored


def _unpack(typecode: str, packed: bytes) -> list[Any]:
    values: array[Any] = array(typecode)
    values.frombytes(packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
