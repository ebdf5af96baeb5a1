"""What an operator asks of a running server: whether it can work, and how much of what there is."""

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.lightning_rl.control_plane.test_api import enqueue


def read(page: str) -> dict[str, float]:
    """Every sample of a page, by its name and labels as they are written."""
    return {
        sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def scrape(served, key="admin"):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return served.pool.request("GET", served.url + "/metrics", headers=headers)


def test_metrics_are_what_prometheus_reads_and_true(served) -> None:
    enqueue(served, "r1")
    enqueue(served, "r2")
    served.client().claim("w")
    served.gateway.told = {
        "m 0": {"away": None, "in_flight": 4, "policy_version": 3},
        "m 1": {"away": "it is gone", "in_flight": 0, "policy_version": 2},
    }
    answer = scrape(served)
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = read(answer.data.decode())
    assert found["lightning_rl_rollouts queued"] == 1
    assert found["lightning_rl_rollouts running"] == 1
    assert found["lightning_rl_tokens_received_total m"] == 7
    assert found["lightning_rl_policy_version m"] == 3
    assert found["lightning_rl_gateway_events_total calls"] == 5
    assert found["lightning_rl_records_waiting"] == 1
    assert [found[f"lightning_rl_engine_well m {i}"] for i in (0, 1)] == [1, 0]
    assert [found[f"lightning_rl_engine_calls_in_flight m {i}"] for i in (0, 1)] == [4, 0]
    assert [found[f"lightning_rl_engine_policy_version m {i}"] for i in (0, 1)] == [3, 2]
    assert found["process_resident_memory_bytes"] > 1e6


def test_a_refused_key_is_counted_and_told_of_with_the_address(served, caplog) -> None:
    before = read(scrape(served).data.decode())["lightning_rl_keys_refused_total"]
    for key in ("nonsense", "runner"):
        served.call("GET", "/api/v1/state", key=key)
    assert read(scrape(served).data.decode())["lightning_rl_keys_refused_total"] == before + 2
    assert "GET /api/v1/state from 127.0.0.1 was refused: it has not the key that it needs" in caplog.text
    assert caplog.text.count("was refused") == 1  # who tries many fills no log


def test_the_page_of_metrics_names_what_a_server_counts(served) -> None:
    page = Path("docs/metrics.md").read_text().partition("## What a server counts")[2]
    named = set(re.findall(r"`(lightning_rl_[a-z_]+)", page))
    families = {each.name for each in text_string_to_metric_families(scrape(served).data.decode())}
    counted = {name for name in families if name.startswith("lightning_rl_") and not name.endswith("_created")}
    of_others = {
        "lightning_rl_call_seconds",
        "lightning_rl_otlp_sent",
        "lightning_rl_otlp_dropped",
        "lightning_rl_otlp_waiting",
    }
    assert {name.removesuffix("_total") for name in named} == counted | of_others


@pytest.mark.parametrize("key", [None, "runner", "nonsense"])
def test_metrics_are_the_admins(served, key) -> None:
    assert scrape(served, key).status == 401


def test_a_server_that_can_work_is_ready(served) -> None:
    status, said = served.call("GET", "/readyz", key=None)
    assert (status, said["status"]) == (200, "ready")
    assert said["checks"] == {"server": "ok", "store": "ok", "journal": "ok", "engine m 0": "ok"}


@pytest.mark.parametrize(
    ("recording", "engines", "part"),
    [
        ("the disk is full", {"m 0": None}, "journal"),
        (None, {"m 0": "http://e/health answered 500", "helper": None}, "engine m 0"),
        (None, {}, "engines"),
    ],
)
def test_readiness_names_what_is_wrong(served, recording, engines, part) -> None:
    served.gateway.recording, served.gateway.engines = recording, engines
    status, said = served.call("GET", "/readyz", key=None)
    assert (status, said["status"]) == (503, "not ready")
    assert [name for name, what in said["checks"].items() if what != "ok"] == [part]


def test_a_server_is_ready_while_each_model_has_an_engine(served) -> None:
    served.gateway.engines = {"m 0": "http://e/health answered 500", "m 1": None, "other 0": None}
    status, said = served.call("GET", "/readyz", key=None)
    assert (status, said["status"]) == (200, "ready")
    assert said["checks"]["engine m 0"] == "http://e/health answered 500"


def test_a_gateway_tells_of_its_calls_and_of_a_dead_engine(tmp_path: Path) -> None:
    """The real gateway, with an engine that is not there."""
    import asyncio

    from lightning_rl_proxy.engines.vllm import TokenEngine
    from lightning_rl_proxy.routing.router import Router

    async def work() -> dict[str, str | None]:
        router = Router("m")
        router.register(
            TokenEngine(model="m", kind="vllm", url="http://127.0.0.1:1", stop_token_ids=[], policy_version=0)
        )
        try:
            return await router.check()
        finally:
            await router.close()

    [(name, trouble)] = asyncio.run(work()).items()
    assert name == "m 0"
    assert "http://127.0.0.1:1/health" in str(trouble)
