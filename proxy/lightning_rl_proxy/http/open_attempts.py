"""The attempts that are open at this gateway, and what is remembered of those that were sealed."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from lightning_rl_adapters import semconv
from lightning_rl_proxy.address import Address
from lightning_rl_proxy.errors import GatewayError, closed
from lightning_rl_proxy.http.attempt import LiveAttempt
from lightning_rl_proxy.http.delivery import Delivery
from lightning_rl_proxy.http.failures import CallFailures
from lightning_rl_proxy.recording.ledger import AttemptInfo, AttemptTokens, Ledger
from lightning_rl_proxy.recording.recorder import Recorder
from lightning_rl_proxy.rendering.base import Renderer

_INFO_SECONDS = 1.0  # how long the ledger's word on an attempt is believed
_SEALED_REMEMBERED = 65536
_STARTING_SECONDS = 10.0  # an attempt that has not called by then is busy with something else


class OpenAttempts:
    """Opens an attempt when its first call comes, as the ledger says; seals and releases it.

    `capacity_freed` is called when an attempt from which a call was expected has called, or is over.
    """

    def __init__(
        self,
        ledger: Ledger,
        recorder: Recorder,
        delivery: Delivery,
        failures: CallFailures,
        renderer: Renderer | None,
        capacity_freed: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._recorder = recorder
        self._delivery = delivery
        self._failures = failures
        self._renderer = renderer
        self._capacity_freed = capacity_freed
        self._attempts: dict[tuple[str, str], LiveAttempt] = {}
        self._asking: dict[tuple[str, str], asyncio.Task[AttemptInfo | None]] = {}  # of which the ledger is asked now
        self._starting: dict[tuple[str, str], float] = {}  # since when, the oldest first
        self._policies: set[str] = set()  # of attempts that were opened here
        # The ledger says that an attempt is closed a moment after it was sealed; in between, this does.
        self._sealed: dict[tuple[str, str], Counter[str] | None] = {}  # with its tokens by model, if it was open here
        self._endings: dict[tuple[str, str], str] = {}  # of those of them whose late calls were refused

    def __len__(self) -> int:
        return len(self._attempts)

    def __iter__(self) -> Iterator[LiveAttempt]:
        return iter(list(self._attempts.values()))

    def open(self, info: AttemptInfo) -> None:
        """Tell of an attempt that was opened just now, so that its first call need not ask the ledger."""
        address, now = Address(info.rollout_id, info.attempt_id), time.monotonic()
        name = (info.rollout_id, info.attempt_id)
        if name not in self._attempts:
            self._attempts[name] = LiveAttempt(address, info, now)
            if info.policy is not None:
                self._policies.add(info.policy)
            self._starting[name] = now

    def names(self) -> list[tuple[str, str]]:
        """The open attempts, by rollout and attempt id."""
        return list(self._attempts)

    def __contains__(self, name: object) -> bool:
        return name in self._attempts

    def idle_seconds(self, rollout_id: str, attempt_id: str) -> float | None:
        """How long ago the attempt's last call ended; 0 while one is in flight, None where none came in here."""
        attempt = self._attempts.get((rollout_id, attempt_id))
        if attempt is None or attempt.called_at is None:
            return None
        return 0.0 if attempt.in_flight else time.monotonic() - attempt.called_at

    def starting(self, policy: str) -> dict[str, int]:
        """How many attempts were opened moments ago and have not called yet, by their policy: `policy` where they name
        none. Every policy of an attempt that was opened here is there."""
        late = time.monotonic() - _STARTING_SECONDS
        while self._starting and self._starting[first := next(iter(self._starting))] < late:
            del self._starting[first]
        counted = Counter(self._starting_policy(name) or policy for name in self._starting)
        return {name: counted[name] for name in {policy, *self._policies}}

    def _starting_policy(self, name: tuple[str, str]) -> str | None:
        attempt = self._attempts.get(name)
        return None if attempt is None else attempt.info.policy

    async def find(self, address: Address) -> LiveAttempt:
        """The open attempt at that address. Raises GatewayError (404, 409 or 503) where no such attempt is open."""
        name = (address.rollout_id, address.attempt_id)
        if name in self._sealed:
            raise await self._closed(name)
        if self._recorder.is_lost(*name):
            raise _unrecordable(address.attempt_id)
        attempt = self._attempts.get(name)
        now = time.monotonic()
        if attempt is None or (not self._ledger.tells_closings and now - attempt.checked_at > _INFO_SECONDS):
            info = await self._info(name)
            attempt = self._attempts.get(name)  # another request may have opened it meanwhile
            if info is None:
                raise GatewayError(
                    404,
                    f"there is no attempt {address.attempt_id} of rollout {address.rollout_id}",
                    kind="not_found_error",
                )
            if not info.open:
                if attempt is not None:
                    self._delivery.close(self._attempts.pop(name))
                raise closed(address.attempt_id, info.ended)
            if name in self._sealed:
                raise await self._closed(name)
            if attempt is None:
                attempt = self._attempts[name] = LiveAttempt(address, info, now, self._renderer)
                if any(span.name == semconv.CALL_SPAN for span in info.spans):
                    self._failures.note(name, b"", "the gateway that had the attempt went away while it ran")
            attempt.checked_at = now
        return attempt

    async def seal(self, rollout_id: str, attempt_id: str) -> None:
        """End an attempt: later calls get 409, calls in flight are aborted, and on return its records are durable."""
        name = (rollout_id, attempt_id)
        self._sealed.setdefault(name, None)
        if len(self._sealed) > _SEALED_REMEMBERED:
            del self._sealed[next(iter(self._sealed))]
        attempt = self._attempts.pop(name, None)
        if attempt is not None:
            cancelled = self._delivery.close(attempt)
            self._sealed[name] = _tokens(attempt)
            await asyncio.gather(*cancelled, return_exceptions=True)  # each records what it was handed
            self._sealed[name] = _tokens(attempt)
        self.has_begun(name)
        await self._recorder.stored()

    async def release(self, rollout_id: str, attempt_id: str) -> None:
        """The attempt is another gateway's now: abort what is in flight, and ask the ledger at its next call."""
        attempt = self._attempts.pop((rollout_id, attempt_id), None)
        if attempt is not None:
            await asyncio.gather(*self._delivery.close(attempt), return_exceptions=True)
        self.has_begun((rollout_id, attempt_id))

    def has_begun(self, name: tuple[str, str]) -> None:
        """An attempt has called, or is over: no call is expected of it any more."""
        if self._starting.pop(name, None) is not None:
            self._capacity_freed()

    def tokens_of(self, rollout_ids: Sequence[str]) -> dict[str, AttemptTokens]:
        """What engines handed over for the attempts at these rollouts, by attempt id: those that are or were open here,
        as far as this process remembers."""
        wanted, lost = set(rollout_ids), self._recorder.tokens_lost
        counted = {name: tokens for name, tokens in self._sealed.items() if name[0] in wanted and tokens is not None}
        counted |= {name: _tokens(attempt) for name, attempt in self._attempts.items() if name[0] in wanted}
        return {
            name[1]: AttemptTokens(rollout_id=name[0], received=dict(tokens), lost=dict(lost.get(name, {})))
            for name, tokens in counted.items()
        }

    def tokens_pending(self) -> int:
        """What engines handed over for open attempts, and for records that were given up."""
        lost = self._recorder.tokens_lost
        # The rest is pending.
        lost_tokens = sum(tokens.total() for name, tokens in lost.items() if name not in self._attempts)
        return lost_tokens + sum(attempt.tokens_received.total() for attempt in self._attempts.values())

    async def _closed(self, name: tuple[str, str]) -> GatewayError:
        """The refusal of a call that came after its attempt was sealed: with how it ended, once the ledger knows."""
        if name not in self._endings:
            info = await self._info(name)
            if info is None or info.ended is None:
                return closed(name[1])
            self._endings[name] = info.ended
            if len(self._endings) > _SEALED_REMEMBERED:
                del self._endings[next(iter(self._endings))]
        return closed(name[1], self._endings[name])

    async def _info(self, name: tuple[str, str]) -> AttemptInfo | None:
        """What the ledger says of an attempt; who asks while it is being asked hears the same answer."""
        asking = self._asking.get(name)
        if asking is None:
            asking = self._asking[name] = asyncio.create_task(self._ask_ledger(name))
        return await asyncio.shield(asking)  # whose client leaves takes it from nobody

    async def _ask_ledger(self, name: tuple[str, str]) -> AttemptInfo | None:
        try:
            return await self._ledger.attempt(*name)
        finally:
            del self._asking[name]


def _tokens(attempt: LiveAttempt) -> Counter[str]:
    """What engines handed over for an attempt, by model."""
    return attempt.tokens_recovered + attempt.tokens_received


def _unrecordable(attempt_id: str) -> GatewayError:
    """The store is behind with so much that the calls of this attempt were given up."""
    return GatewayError(
        409,
        f"attempt {attempt_id} has failed: the store did not take its records in time; its rollout is retried",
        kind="conflict",
    )
