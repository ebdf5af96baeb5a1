"""One of the servers of a run, as the run sees it: whether it is there, gone, or there again.

Invariant: it is not taken for gone before it has given the run up by itself.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future

from lightning_rl.control_plane.attach import Attachment
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Reward, Rollout
from lightning_rl.store.errors import StoreUnwritable, Unreachable

JOIN_SECONDS = 5.0  # between two tries to join one, and for each
_LATE_SECONDS = 2.0  # after which a server has seen that a lease is over
_ANSWERS_SECONDS = 2.0  # since a server last spoke of the run: it answers, and cannot do what it is asked
_TRIES = 3  # at a server that answers otherwise
_log = logging.getLogger(__name__)


class RunServer:
    """One of a run's servers. `gone`: its rollouts are asked for elsewhere, and it is asked nothing.

    `poll` is the request for ended rollouts that is under way, of those in `polled`; `registering` that for engines.
    """

    def __init__(self, store: HttpStore, lease_seconds: float) -> None:
        self.store = store
        self.lease_seconds = lease_seconds
        self.gone = False
        self.late_rewards: dict[tuple[str, str], Sequence[Reward]] = {}  # given while it was gone
        self.polled: set[str] = set()
        self.poll: Future[list[Rollout]] | None = None
        self.join_level = logging.WARNING  # at which it is told that it could not be joined
        self.registering: Future[None] | None = None
        self._registered_at = -JOIN_SECONDS  # or tried
        self._joined_at = -JOIN_SECONDS  # or tried
        self._failures = 0
        self._attachment: Attachment | None = None

    @property
    def attachment(self) -> Attachment:
        """The run at this server. Raises RuntimeError before it is attached."""
        if self._attachment is None:
            raise RuntimeError(f"the run is not attached to {self.store.url} yet: enter `attached` first")
        return self._attachment

    @attachment.setter
    def attachment(self, attachment: Attachment) -> None:
        self._attachment = attachment

    @property
    def is_silent(self) -> bool:
        """Whether it has given the run up by now, if it is there at all."""
        return self.attachment.silent_seconds > self.lease_seconds + _LATE_SECONDS

    @property
    def to_be_joined(self) -> bool:
        """Whether it has given the run up, or is there after it was gone; said every few seconds."""
        back = self.attachment.given_up or (self.gone and not self.is_silent)
        if not back or time.monotonic() - self._joined_at < JOIN_SECONDS:
            return False
        self._joined_at = time.monotonic()
        return True

    @property
    def lacks_engines(self) -> bool:
        """Whether it does not know all engines, and nobody tells it; said every few seconds."""
        if self.gone or not self.attachment.unregistered or (self.registering and not self.registering.done()):
            return False
        if time.monotonic() - self._registered_at < JOIN_SECONDS:
            return False
        self._registered_at = time.monotonic()
        return True

    def answered(self) -> None:
        """It has done what it was asked."""
        self._failures = 0

    def failed(self, error: Unreachable) -> None:
        """It did not answer, which may pass. Raises `error` where it will not: the server is there otherwise."""
        _log.info("%s: %s", self.store.url, error)
        self._failures = self._failures + 1 if self.attachment.silent_seconds < _ANSWERS_SECONDS else 0
        if self._failures >= _TRIES or isinstance(error, StoreUnwritable):
            raise error

    def detach(self) -> None:
        """The run ends: take it from the server. One that does not answer gives it up by itself."""
        if self._attachment is not None:
            silent = self._attachment.silent_seconds > JOIN_SECONDS
            self._attachment.close() if self.gone or silent else self._attachment.detach()
