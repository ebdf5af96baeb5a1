"""What agents emitted, on its way to the server: by OTLP, as any other program's spans.

Invariant: delivery takes a few seconds at most and raises nothing. Spans are told of a rollout, never its condition.
"""

import gzip
import logging
import time
from collections.abc import Sequence

import urllib3

from lightning_rl.runner.outcome import SpanBatch

_SECONDS = 2.0  # for one request, and for the last to begin: a stopped process leaves 5 to results on their way
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
        self._pool = urllib3.PoolManager(maxsize=connections, retries=False, timeout=_SECONDS)

    def __call__(self, rollout_id: str, batches: Sequence[SpanBatch]) -> None:
        """Send the spans of one attempt. What cannot be sent in time is given up, and told in the log."""
        end = time.monotonic() + _SECONDS
        for number, batch in enumerate(batches):
            if not self._sent(batch, end):
                told = "%d of the %d spans that rollout %s emitted did not reach the server"
                left = sum(each.number for each in batches[number:])
                _log.warning(told, left, sum(each.number for each in batches), rollout_id)
                return

    def _sent(self, batch: SpanBatch, end: float) -> bool:
        body = gzip.compress(batch.otlp, compresslevel=1)
        while time.monotonic() < end:
            try:
                status = self._pool.request("POST", self._url, body=body, headers=self._headers).status
            except urllib3.exceptions.HTTPError:
                return False
            if status not in _TRY_AGAIN:
                return status == 200
            time.sleep(_PAUSE_SECONDS)
        return False
