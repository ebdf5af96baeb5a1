"""docs/opentelemetry.md is true: its agent runs as it stands, and its words are those of the code."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from lightning_rl.agents.resources import LLM
from lightning_rl.cli.serve import run as serve
from lightning_rl.telemetry.traces import otlp_export
from lightning_rl.telemetry.traces.otlp_export import SpansOut
from lightning_rl_adapters import semconv
from lightning_rl_adapters.conventions import ASK_FOR_IDS
from tests.lightning_rl.cli.test_serve import serving
from tests.proxy.engines.service import running

PAGE = (Path(__file__).parents[3] / "docs" / "opentelemetry.md").read_text()


@pytest.mark.long
def test_the_pages_agent_is_answered_and_its_spans_are_kept(tmp_path: Path) -> None:
    [block] = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, "page", "exec"), names)
    with (
        running() as service,
        serving(tmp_path, "--engine", f"openai:policy={service.url}", OPENAI_API_KEY="k") as server,
    ):
        service.reply = lambda body: "yes, it is"
        claim = json.loads(server.post("/api/v1/rollouts/start", {"task": 1}, server.key).data)
        said, place = claim["resources"]["main_llm"], claim["attempt"]
        llm = LLM(model=said["model"], base_url=said["base_url"], api_key=said["api_key"])
        assert names["agent"]("is it?", llm) == 1.0
        path = f"{server.url}/api/v1/rollouts/{place['rollout_id']}/attempts/{place['attempt_id']}"
        server.post(path.removeprefix(server.url) + "/finish", {"status": "succeeded", "reward": 1.0}, server.key)
        headers = {"authorization": f"Bearer {server.key}"}
        spans = json.loads(server.pool.request("GET", f"{path}/spans", headers=headers).data)["spans"]
        assert [span["name"] for span in spans] == ["lightning_rl.call", "look it up"]
        assert spans[1]["attributes"]["question"] == "is it?"
        told = json.loads(server.pool.request("GET", f"{path}/triplets?source=otel", headers=headers).data)
        assert told == {"triplets": [], "diagnoses": []}


def test_its_names_and_numbers_are_the_codes() -> None:
    registry = CollectorRegistry()
    out = SpansOut("http://127.0.0.1:9/v1/traces")
    for collector in out.collectors:
        registry.register(collector)
    out.close()
    for family in registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        assert f"| `{name}" in PAGE
    assert f"{otlp_export._WAITING_BYTES // 2**20} MiB" in PAGE
    assert f"waits for it {otlp_export._LAST_SECONDS:g} s at most" in PAGE
    for name in (
        semconv.ROLLOUT_ID, semconv.ATTEMPT_ID, semconv.AGENT_LIGHTNING_ROLLOUT_ID, semconv.AGENT_LIGHTNING_ATTEMPT_ID,
        semconv.ROLLOUT_SPAN, semconv.CALL_SPAN, semconv.CALL_ID, semconv.PARENT,
    ):  # fmt: skip
        assert f"`{name}`" in PAGE
    assert ASK_FOR_IDS.partition(": ")[2].partition(" (")[0] in PAGE


@pytest.mark.parametrize("option", re.findall(r"^lightning-rl serve (.*)$", PAGE, re.MULTILINE))
def test_its_options_of_serve_are_there(option: str) -> None:
    import inspect

    there = {f"--{name.replace('_', '-')}" for name in inspect.signature(serve).parameters}
    assert set(re.findall(r"--[a-z-]+", option)) <= there
