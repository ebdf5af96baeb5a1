"""One open attempt at this gateway: its live forest, the requests in flight, and the numbers of its calls."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from lightning_rl_adapters.call import calls_of
from lightning_rl_adapters.span import Span
from lightning_rl_proxy.address import Address
from lightning_rl_proxy.forest.incremental_decode import IncrementalDecode
from lightning_rl_proxy.forest.live_forest import LiveForest
from lightning_rl_proxy.forest.nodes import RecordedAnswer
from lightning_rl_proxy.forest.recovery import recovered
from lightning_rl_proxy.http.inflight_request import InflightRequest
from lightning_rl_proxy.recording.ledger import AttemptInfo
from lightning_rl_proxy.rendering.base import Renderer


class LiveAttempt:
    """What a gateway holds of an attempt while it is open. `checked_at`: when the ledger was last asked for `info`.

    `tokens_received` are those that engines handed over here, `tokens_recovered` those of calls that were recorded
    before the attempt came here; both by model.
    """

    def __init__(
        self, address: Address, info: AttemptInfo, checked_at: float, renderer: Renderer | None = None
    ) -> None:
        """With `renderer` the attempt goes on from the spans that `info` has of it."""
        self.address = address
        self.name = (address.rollout_id, address.attempt_id)
        self.info = info
        self.checked_at = checked_at
        self.sealed = not info.open
        self.inflight: dict[bytes, list[InflightRequest]] = {}
        self.tokens_received = Counter[str]()  # by model
        self.tokens_recovered = _recorded_tokens(info.spans)
        self.called_at: float | None = None  # when a call last began or ended, by the monotonic clock
        self.in_flight = 0  # answers that are being worked on
        # How often a body was answered with 5xx: so many of its retries are sampled anew, equal calls or not.
        self.failed = Counter[bytes]()
        self.placing = asyncio.Lock()  # held while another thread looks for a place
        self.unplaced = 0  # requests that look for one there, or wait until they may look
        self.ways: set[str] = set()  # how its prompts were to be rendered, other than all are
        self.history = IncrementalDecode()
        earlier = recovered(info.spans, renderer)
        self.forest: LiveForest = earlier.forest
        # By their requests, what was answered before the attempt came here.
        self.recorded: dict[bytes, list[RecordedAnswer]] = earlier.recorded
        # The conversations that a client may continue by a response's id.
        self.responses: dict[str, list[dict[str, Any]]] = earlier.responses
        self._next_number = earlier.next_number

    def take_numbers(self, n: int) -> int:
        """Reserve `n` numbers in order of arrival; the first of them."""
        first = self._next_number
        self._next_number += n
        return first

    def begin(self, inflight: InflightRequest, task: asyncio.Task[bytes]) -> None:
        """An answer is worked on from now on, by `task`."""
        inflight.task = task
        self.in_flight += 1
        self.called_at = time.monotonic()
        task.add_done_callback(partial(self._worked, inflight))
        self.inflight.setdefault(inflight.body_key, []).append(inflight)

    def forget(self, inflight: InflightRequest) -> None:
        """No retry joins the request any more."""
        remaining = [other for other in self.inflight.get(inflight.body_key, []) if other is not inflight]
        if remaining:
            self.inflight[inflight.body_key] = remaining
        else:
            self.inflight.pop(inflight.body_key, None)

    def commit(self, inflight: InflightRequest) -> None:
        """Make the answers of a delivered request continuable; of equal conversations the last answered wins."""
        if inflight.commits:
            self.forest.commit(inflight.commits)
            inflight.commits = []
        self.responses |= inflight.responses

    def joined(self, body_key: bytes, *, marked_as_retry: bool) -> InflightRequest | None:
        """The earlier request that an equal one joins; None where it is to be sampled, as after an answer of 5xx."""
        anew = marked_as_retry and self.failed[body_key] > 0
        if anew:
            self.failed[body_key] -= 1
        inflight = self._joinable(body_key, marked_as_retry=marked_as_retry and not anew)
        return None if inflight is None or inflight.task is None or _has_failed(inflight.task) else inflight

    def _joinable(self, body_key: bytes, *, marked_as_retry: bool) -> InflightRequest | None:
        """The earlier request that an equal one joins instead of sampling anew.

        Equal bodies alone are separate samples; it takes a retry mark, or an earlier client that left before its whole
        answer was written. The oldest whose client is gone comes first, then the oldest undelivered.
        """
        earlier = self.inflight.get(body_key, [])
        for inflight in earlier:
            if inflight.client_gone:
                return inflight
        if not marked_as_retry or not earlier:
            return None
        return next((inflight for inflight in earlier if not inflight.recorded), earlier[-1])

    def _worked(self, inflight: InflightRequest, _work: asyncio.Task[bytes]) -> None:
        """An answer is no longer worked on."""
        self.in_flight -= 1
        self.called_at = time.monotonic()
        inflight.wake()


def _has_failed(task: asyncio.Task[bytes]) -> bool:
    return task.cancelling() > 0 or (task.done() and (task.cancelled() or task.exception() is not None))


def _recorded_tokens(spans: Sequence[Span]) -> Counter[str]:
    """The sampled tokens of recorded calls, by model; a chat backend's are nobody's to count."""
    tokens = Counter[str]()
    for call in calls_of(spans):
        if call.trainable:
            tokens[call.model] += call.sampled_tokens
    return tokens
