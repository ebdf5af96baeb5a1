"""docs/scaling.md says what benchmarks/scaling.py computes, from what docs/performance.md measured."""

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[1]
MODELS = ["0.6B", "1.5B", "35B-A3B"]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_scaling", ROOT / "benchmarks/scaling.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


scaling = load()


def test_the_page_has_the_table_that_is_computed() -> None:
    assert scaling.table() in (ROOT / "docs/scaling.md").read_text()


@pytest.mark.parametrize("constant", sorted(scaling.SOURCES))
def test_a_measured_cost_is_the_one_on_the_page_of_measurements(constant: str) -> None:
    assert hasattr(scaling, constant)
    page = " ".join((ROOT / "docs/performance.md").read_text().split())
    assert scaling.SOURCES[constant] in page, f"{constant}: measure again, and write the new line into SOURCES"


def test_the_limits_that_the_page_speaks_of() -> None:
    page = (ROOT / "docs/scaling.md").read_text()
    [server] = [part for part in scaling.stations("0.6B", 1, scaling.Deployment(), 0) if part.name == "server"]
    assert f"{server.seconds * 1e3:.2f} ms of CPU a call" in page
    most = scaling.BUSY / server.seconds
    assert f"{round(most, -1):,.0f} calls/s at 70 %" in page
    for model, gpus in (("0.6B", 56), ("1.5B", 53), ("35B-A3B", 1129)):
        assert most == pytest.approx(gpus / scaling.MODELS[model].station(gpus).seconds, rel=0.02)
    assert f"costs the gateway {scaling.gateway_ms():.2f} ms of CPU" in page
    one_call = scaling.MODELS["1.5B"]
    assert f"takes an H200 {one_call.sampling + one_call.training:.3f} s" in page
    for gpus, step, share in ((64, 1, "24%"), (1000, 1, "83%"), (1000, 16, "24%")):
        larger = scaling.Gpus(one_call.sampling, one_call.training, one_call.weights / step)
        assert larger.shares(gpus).endswith(share)
        assert share.replace("%", " %") in page
    wanted = scaling.admitted("0.6B", 1000, 10**9) / scaling.FILL
    assert f"{round(wanted, -3):,.0f} for all" in page
    assert f"{scaling.beating(100_000):.2f} of a core" in page
    wait = scaling.run("0.6B", 1000, scaling.Deployment(), 100_000).waits["server"]
    assert f"calls wait there for {wait:.0f} s" in page


@given(st.sampled_from(MODELS), st.integers(1, 2000), st.integers(1, 40), st.integers(1, 200_000), st.integers(2, 20))
def test_nothing_flows_faster_than_a_part_lets_it_and_more_of_a_part_slows_nothing(
    model: str, gpus: int, servers: int, rollouts: int, more: int
) -> None:
    given = scaling.Deployment(servers, 4 * servers)
    parts = scaling.stations(model, gpus, given, rollouts)
    flow = scaling.run(model, gpus, given, rollouts)
    for part in parts:
        assert flow.busy[part.name] == pytest.approx(flow.calls * part.between)
        assert flow.busy[part.name] <= 1 + 1e-6
        assert flow.waits[part.name] >= -1e-9
    assert flow.calls <= rollouts / scaling.AWAY_SECONDS * (1 + 1e-9)
    # Little's law: whoever is not away is at a station, or waits there.
    there = sum(flow.waits[part.name] + part.seconds + part.pause for part in parts)
    assert flow.calls * (scaling.AWAY_SECONDS + there) == pytest.approx(rollouts, rel=1e-4)
    assert scaling.run(model, more * gpus, given, rollouts).calls >= flow.calls * (1 - 1e-3)
    ample = scaling.Deployment(more * servers, more * 4 * servers)
    assert scaling.run(model, gpus, ample, rollouts).calls >= flow.calls * (1 - 1e-3)


@given(st.integers(1, 60), st.floats(0.01, 2.0), st.floats(0.0, 10.0))
def test_one_station_is_what_the_exact_analysis_says(rollouts: int, seconds: float, away: float) -> None:
    """Schweitzer's approximation beside Reiser and Lavenberg's recursion, which it is known to come near."""
    length = 0.0
    calls = 0.0
    for number in range(1, rollouts + 1):
        at_station = seconds * (1 + length)
        calls = number / (away + at_station)
        length = calls * at_station
    flow = scaling.flow([scaling.Station("engine", seconds, 1)], rollouts, away)
    assert flow.calls == pytest.approx(calls, rel=0.08)
    assert flow.busy["engine"] <= 1 + 1e-9


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("gpus", [1, 8, 64, 512, 1000])
def test_a_plan_is_as_small_as_it_may_be(model: str, gpus: int) -> None:
    running = scaling.admitted(model, gpus)
    plan = scaling.plan(model, gpus, running)
    flow = scaling.run(model, gpus, plan, running)
    assert flow.busy["server"] <= scaling.BUSY + 1e-3
    assert plan.servers >= running / scaling.OPEN_LIMIT
    if plan.servers > 1:
        ample = scaling.run(model, gpus, scaling.Deployment(10_000, 10_000), running).busy["server"] * 10_000
        assert plan.servers == max(math.ceil(running / scaling.OPEN_LIMIT), math.ceil(ample / scaling.BUSY))
    assert flow.calls >= scaling.run(model, gpus, scaling.Deployment(), running).calls * (1 - 1e-3)
