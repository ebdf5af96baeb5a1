"""Attempt keys: a key names its attempt and its last second, and the signature proves that we issued it.

A key opens the model doors of its own attempt and nothing else. Checks take constant time. Whether the attempt is
still open is not in the key: the ledger says so.
"""

import base64
import hashlib
import hmac
import time
from collections.abc import Mapping
from functools import lru_cache

from lightning_rl_proxy.address import Address

_PREFIX = "lrl-attempt"
# Ids may hold every other URL-safe character, so the fields are parted by one that they cannot hold.
_SEPARATOR = ":"
_EPOCH = time.time() - time.monotonic()  # as the store, which dates keys, counts: a clock that is set ends no key
_REMEMBERED = 8192  # signatures: of about as many attempts as are open at once


class KeyRefused(Exception):
    """The key is not one of ours, is damaged, or is past its last second."""


def sign_attempt_key(secret: bytes, rollout_id: str, attempt_id: str, expires_at: int) -> str:
    """The key of an attempt, valid until `expires_at` (seconds since the epoch)."""
    payload = _SEPARATOR.join((_PREFIX, rollout_id, attempt_id, str(expires_at)))
    return payload + _SEPARATOR + _signature(secret, payload)


def sent_key(headers: Mapping[bytes, bytes]) -> str:
    """The key that a request carries, "" where there is none: as a bearer, in `x-api-key`, or as a password.

    The last is what HTTP clients make of a key in the URL, `http://attempt:KEY@host`.
    """
    scheme, _, sent = headers.get(b"authorization", b"").decode("latin-1").strip().partition(" ")
    if scheme.lower() != "basic":
        bearer = sent if scheme.lower() == "bearer" else scheme
        return bearer.strip() or headers.get(b"x-api-key", b"").decode("latin-1")
    try:
        return base64.b64decode(sent, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def verify_attempt_key(secret: bytes, key: str, *, now: float | None = None) -> Address:
    """The attempt that a key opens. Raises KeyRefused."""
    payload, _, signature = key.rpartition(_SEPARATOR)
    expected = _signature(secret, payload)
    if not hmac.compare_digest(signature.encode(), expected.encode()):
        raise KeyRefused("this API key is not one of this gateway's attempt keys")
    _, rollout_id, attempt_id, expires_at = payload.split(_SEPARATOR)
    if (_EPOCH + time.monotonic() if now is None else now) > int(expires_at):
        raise KeyRefused(f"the key of attempt {attempt_id} has expired")
    return Address(rollout_id, attempt_id)


@lru_cache(_REMEMBERED)
def _signature(secret: bytes, payload: str) -> str:
    signed = _keyed(secret).copy()
    signed.update(payload.encode())
    return base64.urlsafe_b64encode(signed.digest()[:24]).decode()


@lru_cache(maxsize=1)
def _keyed(secret: bytes) -> hmac.HMAC:
    """Made once: `hmac.digest` looks its algorithm up for each call, and lets go of Python's lock meanwhile."""
    return hmac.new(secret, digestmod=hashlib.sha256)
