"""Where a call comes in: which attempt it belongs to, and which path of the API it asks for."""

import re
from typing import NamedTuple

ID_PATTERN = r"[A-Za-z0-9._~-]{1,128}"

_DOOR = re.compile(
    rf"(?:(?:/rollout/(?P<rollout>{ID_PATTERN})/attempt/(?P<attempt>{ID_PATTERN})|/key/(?P<key>[^/]+))"
    # Claude Code asks for /api/hello.
    rf"(?:/agent/(?P<agent>{ID_PATTERN}))?)?(?P<path>/v1/.+|(?:/(?:v1/?|api/hello)?)?)"
)
_KEY = re.compile(r"/key/[^/]+")
_NOT_IN_A_TAG = re.compile(r"[^A-Za-z0-9._~-]")
_LONGEST_TAG = 128


class Address(NamedTuple):
    """One attempt, and the tag of the calling agent where the URL has one."""

    rollout_id: str
    attempt_id: str
    agent: str | None = None


class Door(NamedTuple):
    """A parsed URL: the address where it names one, the key and the agent's tag where it has them, and the API path
    behind, from `/v1/` on; of a base URL alone that is "/"."""

    address: Address | None
    path: str
    key: str | None = None
    agent: str | None = None


def parse(path: str) -> Door | None:
    """The door of a URL path, or None where the path is no door."""
    match = _DOOR.fullmatch(path)
    if match is None:
        return None
    rollout, attempt, key, agent, behind = match.groups()
    address = None if rollout is None else Address(rollout, attempt, agent)
    return Door(address, behind if behind.startswith("/v1/") and behind != "/v1/" else "/", key, agent)


def without_key(path: str) -> str:
    """A URL path as it may be shown: a key in it is `***`."""
    return _KEY.sub("/key/***", path)


def as_tag(name: str) -> str:
    """A name as a tag: what a URL cannot hold is a `-`, and of a long one the end is kept."""
    return _NOT_IN_A_TAG.sub("-", name)[-_LONGEST_TAG:]


def base_url(gateway: str, address: Address) -> str:
    """The base URL of an attempt for OpenAI-style SDKs, ending in `/v1`."""
    tag = f"/agent/{address.agent}" if address.agent else ""
    return f"{gateway}/rollout/{address.rollout_id}/attempt/{address.attempt_id}{tag}/v1"
