"""What a running server counts, as Prometheus reads it.

Everything is read when it is asked for: a scrape costs, a call does not.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Of the gateway's state, per model: its key, the metric's name, what it is, and whether it only grows.
_OF_A_MODEL = (
    ("tokens_received", "tokens_received", "Tokens that engines handed over.", True),
    ("in_flight", "calls_in_flight", "Calls that engines or services work on.", False),
    ("engines", "engines", "Engines or services that answer for the model.", False),
    ("waiting", "calls_waiting", "Requests that wait in the engines' queues, as they say.", False),
    ("capacity", "capacity", "Calls that the engines bear at once; absent where they do not say.", False),
    ("paused", "model_paused", "1 while calls wait for weights.", False),
    ("policy_version", "policy_version", "Updates behind the weights that sample now.", False),
)

# Of each engine, by the gateway's name of it.
_OF_AN_ENGINE = (
    ("away", "engine_well", "1 while the engine or service takes calls, 0 while it is away."),
    ("in_flight", "engine_calls_in_flight", "Calls that it works on."),
    ("policy_version", "engine_policy_version", "Updates behind its weights, as far as is known."),
)


def page(state: Mapping[str, Any], rollouts: Mapping[str, int], timings: Sequence[Collector]) -> bytes:
    """The page of `GET /metrics`: the gateway's `state`, the `rollouts` by status, and what measures itself."""
    registry = CollectorRegistry()
    registry.register(_Families(list(_families(state, rollouts))))
    for timing in timings:
        registry.register(timing)
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Families(Collector):
    """Metrics that were read already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _families(state: Mapping[str, Any], rollouts: Mapping[str, int]) -> Iterable[Metric]:
    for key, name, about, grows in _OF_A_MODEL:
        kind = CounterMetricFamily if grows else GaugeMetricFamily
        family = kind(f"lightning_rl_{name}", about, labels=["model"])
        for model, counts in state["models"].items():
            if counts[key] is not None:
                family.add_metric([model], float(counts[key]))
        yield family
    for key, name, about in _OF_AN_ENGINE:
        gauge = GaugeMetricFamily(f"lightning_rl_{name}", about, labels=["engine"])
        for engine, values in state["engines"].items():
            gauge.add_metric([engine], float(values[key] is None if key == "away" else values[key]))
        yield gauge
    events = CounterMetricFamily(
        "lightning_rl_gateway_events", "Calls, retries that joined, forks by cause, errors by status.", labels=["event"]
    )
    for event, count in state["counters"].items():
        events.add_metric([event], count)
    yield events
    by_status = GaugeMetricFamily("lightning_rl_rollouts", "Rollouts by status.", labels=["status"])
    for status, count in rollouts.items():
        by_status.add_metric([status], count)
    yield by_status
    for key, about in (
        ("open_attempts", "Attempts that called and are not sealed."),
        ("claims_held_back", "Slots of runners that wait until the engines bear one more rollout."),
        ("tokens_pending", "Sampled tokens of open attempts."),
        ("records_waiting", "Records on their way from the journal to the store."),
        ("journal_bytes", "Size of the journal."),
    ):
        yield GaugeMetricFamily(f"lightning_rl_{key}", about, value=float(state[key]))
