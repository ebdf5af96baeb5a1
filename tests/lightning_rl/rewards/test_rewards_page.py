"""`docs/concepts/rewards.md` is true: its code runs as it stands, and does what the page says."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lightning_rl as lrl
from lightning_rl.config import compose
from lightning_rl.store.contract import Finish, RolloutRequest
from tests.lightning_rl.control_plane.conftest import served as served  # a fixture
from tests.proxy.engines.service import Service, running

PAGE = (Path(__file__).parents[3] / "docs" / "concepts" / "rewards.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
[FILE] = [block for block in BLOCKS if block.startswith("# my_rewards.py\n")]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that holds what the page puts in a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(FILE)


@pytest.fixture
def service() -> Iterator[Service]:
    with running() as service:
        yield service


def run(block: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(block, "rewards.md", "exec"), names)
    return names


def the_block_with(words: str) -> dict[str, Any]:
    [block] = [block for block in BLOCKS if words in block]
    return run(block)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[-1])
def test_every_block_runs_by_itself(block: str) -> None:
    run(block)


def test_the_agent_that_emits_runs_as_an_ordinary_function(service: Service) -> None:
    agent = the_block_with("emit_reward")["agent"]
    llm = lrl.LLM(model="m", base_url=service.url, anthropic_base_url="", api_key="k")
    assert agent({"question": "2+2?", "answer": "4"}, llm) is None
    assert len(service.requests) == 1


def test_the_late_reward_replaces_the_agents(served: Any) -> None:
    client = served.client()
    client.enqueue([RolloutRequest(task=None, rollout_id="r1")])
    [claim] = client.claim("w")
    client.finish("r1", claim.attempt.attempt_id, Finish(status="succeeded", reward=1.0))
    thumbs = the_block_with("def thumbs")["thumbs"]
    for _ in range(2):
        thumbs(client, "r1", up=False)
    assert client.rollout("r1").reward == 0.0
    assert len(client.traces(["r1"])["r1"].attempts[0].rewards) == 1


def test_every_key_of_the_page_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    named = set(re.findall(r"\b((?:reward|algorithm)(?:\.[a-z_]+)+)", PAGE))
    assert len(named) > 6
    for key in named - {"reward.custom_reward_function"}:
        found: Any = compose()
        for part in key.split("."):
            found = getattr(found, part)  # an unknown key is an AttributeError that names it
