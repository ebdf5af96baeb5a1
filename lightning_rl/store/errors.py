"""What a store answers when it cannot do as asked; the same errors on both sides of the wire."""

from lightning_rl.errors import Explained


class StoreError(Explained):
    """Base of the errors below; the message names the thing, the place and what to do."""


class NotFound(StoreError):
    """There is no such rollout, attempt or resource."""


class Conflict(StoreError):
    """The thing is no longer (or not) in the state that the request needs."""


class Invalid(StoreError):
    """The request itself is wrong: a field, a reward, an id."""


class NotAllowed(StoreError):
    """The key is missing, wrong, or may not do this."""


class Unreachable(StoreError):
    """The server cannot be reached, or failed while answering: infrastructure, not the caller."""


class ForeignAnswer(Unreachable):
    """What answers is no server of this version: another program, or a relay in front of the server."""


class StoreUnwritable(Unreachable):
    """The server answers but cannot write its store: a full disk, most often. What was recorded is kept."""
