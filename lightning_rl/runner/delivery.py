"""What agents emitted, on its way to the server: by OTLP, as any other program's spans.

Invariant: delivery raises nothing, and a server that does not answer is waited for once, for a few seconds. Spans are
told of a rollout, never its condition.
"""

import gzip
import logging
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence

import urllib3

from lightning_rl.runner.outcome import MOST_SPANS, SpansOf

_SECONDS = 2.0  # for a request and its repeats: a stopped process leaves 5 to results on their way
_PAUSE_SECONDS = 0.2
_TRY_AGAIN = (429, 502, 503, 504)
_log = logging.getLogger(__name__)


class SpanDelivery:
    """Sends spans to the server at `url`, with a runner key of it; safe to share between threads."""

    def __init__(self, url: str, key: str, connections: int = 1) -> None:
        self._url = f"{url.rstrip('/')}/v1/traces"
        self._headers = {
            "authorization": f"Bearer {key}",
            "content-type": "application/x-protobuf",
            "content-encoding": "gzip",
        }
        self._pool = urllib3.PoolManager(maxsize=connections, retries=False)

    def __call__(self, emitted: Sequence[SpansOf]) -> None:
        """Send the spans of attempts, several in a request. What is refused is given up, and all that is left when the
        server does not answer in time; both are told in the log."""
        lost: Counter[str] = Counter()
        waiting = deque(_requests(emitted))
        while waiting:
            together = waiting.popleft()
            accepted = self._send(together)
            if accepted:
                continue
            if accepted is None:
                together += [one for others in waiting for one in others]
                waiting.clear()
            elif len(together) > 1:  # what is wrong with one of them is no other's loss
                waiting.extendleft([one] for one in reversed(together))
                continue
            for name, batch in together:
                lost[name] += batch.number
        for rollout_id, number in lost.items():
            message = "%d of the %d spans that rollout %s emitted did not reach the server"
            _log.warning(message, number, sum(each.number for name, each in emitted if name == rollout_id), rollout_id)

    def _send(self, together: Sequence[SpansOf]) -> bool | None:
        """Whether the server takes these; None where it does not say so in time."""
        # Messages of protobuf whose fields are lists are joined by writing one behind the other.
        body = gzip.compress(b"".join(batch.otlp for _, batch in together), compresslevel=1)
        end = time.monotonic() + _SECONDS
        while (seconds := end - time.monotonic()) > 0:
            try:
                limit = urllib3.Timeout(total=seconds)
                status = self._pool.request("POST", self._url, body=body, headers=self._headers, timeout=limit).status
            except urllib3.exceptions.HTTPError:
                return None
            if status not in _TRY_AGAIN:
                return status == 200
            time.sleep(_PAUSE_SECONDS)
        return None


def _requests(emitted: Sequence[SpansOf]) -> Iterator[list[SpansOf]]:
    """Batches that go together: as many as are no more spans than the largest batch."""
    together: list[SpansOf] = []
    number = 0
    for one in emitted:
        if together and number + one[1].number > MOST_SPANS:
            yield together
            together, number = [], 0
        together.append(one)
        number += one[1].number
    if together:
        yield together
