from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from lightning_rl.algorithms.base import Endpoint
from lightning_rl.control_plane.launch import launch
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import RolloutRequest
from lightning_rl.store.sql import SqlStore

CHECKPOINT = Path(__file__).parents[3] / "examples/sql_agent/checkpoint"
OURS = "http://127.0.0.1:7000/rollout/r/attempt/a"  # of a claim
policy_of = partial(Endpoint, model="policy", tokenizer=str(CHECKPOINT), renderer="qwen3", engines=[])


@dataclass
class Server:
    url: str
    store: HttpStore
    runner_key: str


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A real server process whose engine is gone; its runner key is "runner"."""
    run_dir = tmp_path_factory.mktemp("server")
    gone = {"model": "policy", "kind": "embedded", "url": "http://127.0.0.1:9"}
    with launch(run_dir, policy_of(engines=[gone]), admin_key="admin", runner_key="runner") as serving:
        yield Server(serving.url, HttpStore(serving.url, "admin"), "runner")


@pytest.fixture
def claim():
    store = SqlStore("sqlite://")
    store.enqueue([RolloutRequest(task=1)])
    (claim,) = store.claim("w")
    claim.resources["main_llm"] = {"base_url": OURS + "/v1", "anthropic_base_url": OURS}
    yield claim
    store.close()
