from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lightning_rl.control_plane.launch import launch
from lightning_rl.store.client import HttpStore


@dataclass
class Policy:
    model: str = "policy"
    tokenizer: str = str(Path(__file__).parents[3] / "examples/sql_agent/checkpoint")
    renderer: str = "qwen3"
    history: str = "keep"
    chat_template_kwargs: dict = field(default_factory=dict)
    special_tokens_in_text: str = "text"
    unknown_model: str = "policy"
    engines: list = field(default_factory=list)


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
    with launch(run_dir, Policy(engines=[gone]), admin_key="admin", runner_key="runner") as serving:
        yield Server(serving.url, HttpStore(serving.url, "admin"), "runner")
