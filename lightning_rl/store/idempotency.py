"""The bodies of requests as JSON, and when two of them say the same; pure."""

from typing import Any

import msgspec

from lightning_rl.store.errors import Invalid


def body_of(record: Any) -> bytes:
    """The JSON of a record.

    Raises:
        Invalid: when it holds something that JSON cannot.
    """
    try:
        return msgspec.json.encode(record)
    except TypeError as error:
        raise Invalid(f"{type(record).__name__} is not JSON-able: {error}") from error


def same_body(one: bytes, other: bytes) -> bool:
    """Whether two JSON texts say the same, whatever the order of their keys."""
    return one == other or bool(msgspec.json.decode(one) == msgspec.json.decode(other))
