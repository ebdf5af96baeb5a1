"""Agents of other people's frameworks, unmodified: every call is recorded, no sampled token is lost or doubled, and the
training rows are as many as the page says."""

import pytest

from tests.proxy.conftest import Served
from tests.works_with.harness import run
from tests.works_with.table import AGENTS, Agent, Mode

pytestmark = [pytest.mark.works_with, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    ("agent", "mode"),
    [
        pytest.param(agent, mode, id=f"{agent.name}-{mode.api}-{mode.streamed}")
        for agent in AGENTS
        for mode in agent.modes
    ],
)
def test_an_agent_is_recorded_whole(served: Served, agent: Agent, mode: Mode) -> None:
    found = run(served, agent, mode)
    assert (found.calls, found.housekeeping, found.rows) == (mode.calls, mode.housekeeping, mode.rows), found.forks
