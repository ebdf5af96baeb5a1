"""Where a call comes in: which attempt it belongs to, and which path of the API it asks for."""

import re
from typing import NamedTuple

ID_PATTERN = r"[A-Za-z0-9._~-]{1,128}"

_DOOR = re.compile(
    rf"/rollout/(?P<rollout>{ID_PATTERN})/attempt/(?P<attempt>{ID_PATTERN})"
    rf"(?:/agent/(?P<agent>{ID_PATTERN}))?(?P<path>/v1/.+)"
)
_NOT_IN_A_TAG = re.compile(r"[^A-Za-z0-9._~-]")
_LONGEST_TAG = 128
_KEY_DOOR = re.compile(r"(?P<path>/v1/.+)")


class Address(NamedTuple):
    """One attempt, and the tag of the calling agent where the URL has one."""

    rollout_id: str
    attempt_id: str
    agent: str | None = None


class Door(NamedTuple):
    """A parsed URL: the address (None at the door by key alone) and the API path behind it, from `/v1/` on."""

    address: Address | None
    path: str


def parse(path: str) -> Door | None:
    """The door of a URL path, or None where the path is no door."""
    if match := _DOOR.fullmatch(path):
        return Door(Address(match["rollout"], match["attempt"], match["agent"]), match["path"])
    if match := _KEY_DOOR.fullmatch(path):
        return Door(None, match["path"])
    return None


def as_tag(name: str) -> str:
    """A name as a tag: what a URL cannot hold is a `-`, and of a long one the end is kept."""
    return _NOT_IN_A_TAG.sub("-", name)[-_LONGEST_TAG:]


def base_url(gateway: str, address: Address) -> str:
    """The base URL of an attempt for OpenAI-style SDKs, ending in `/v1`."""
    tag = f"/agent/{address.agent}" if address.agent else ""
    return f"{gateway}/rollout/{address.rollout_id}/attempt/{address.attempt_id}{tag}/v1"
