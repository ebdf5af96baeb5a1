"""The code of `docs/langgraph.md` runs as it stands: the training learns, and the same graph asks another service."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lightning_rl.agents.resources import LLM
from tests.lightning_rl.langgraph import graphs
from tests.pages import ROOT
from tests.proxy.conftest import Served
from tests.proxy.engines.service import running


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files."""
    folder = tmp_path_factory.mktemp("page")
    page = (ROOT / "docs" / "langgraph.md").read_text()
    for name, code in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL):
        (folder / name).write_text(code)
    return folder


def run_in(place: Path, script: str) -> str:
    done = subprocess.run([sys.executable, script], cwd=place, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def module(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_every_block_is_a_file_that_a_test_runs(place: Path) -> None:
    page = (ROOT / "docs" / "langgraph.md").read_text()
    files = {file.name for file in place.iterdir()}
    tested = {"my_graph.py", "train.py", "by_config.py", "my_rewards.py", "production.py", "other_models.py"}
    assert files >= tested | {"by_context.py", "with_user.py"}
    assert page.count("```python\n") == 8


@pytest.mark.e2e
@pytest.mark.long
def test_the_graph_learns(place: Path) -> None:
    printed = run_in(place, "train.py")
    rewards = [float(reward) for reward in re.findall(r"^step \d+/8  reward (\S+)", printed, re.MULTILINE)]
    assert len(rewards) == 8
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1


@pytest.mark.e2e
@pytest.mark.long
def test_the_configuration_names_the_graph(place: Path) -> None:
    printed = run_in(place, "by_config.py")
    assert re.search(r"^step 1/1  reward \d", printed, re.MULTILINE)


def test_the_same_graph_asks_another_service(place: Path) -> None:
    with running() as service:
        service.tokens = False
        service.script.append("Three.")
        code = (place / "production.py").read_text()
        assert code.count("http://127.0.0.1:8000/v1") == 1
        (place / "asks.py").write_text(code.replace("http://127.0.0.1:8000/v1", service.url))
        assert run_in(place, "asks.py") == "Three.\n"
        [request] = service.requests
    assert (request["model"], service.keys) == ("my-model", ["Bearer sk-..."])
    assert set(request) == {"model", "messages", "max_tokens"}


def test_other_models_are_named_by_their_doors(place: Path, served: Served, llm: LLM) -> None:
    for model in module(place / "other_models.py").models(llm):
        assert model.invoke("hi").text == "ok"
    served.seal()
    assert [call.agent for call in served.ledger.calls()] == ["planner", "writer"]


def test_the_context_names_the_agent(place: Path, served: Served, llm: LLM) -> None:
    page = module(place / "by_context.py")
    model = page.model(llm)
    with page.acting("planner"):
        assert model.invoke("hi").text == "ok"
    model.invoke("ho")
    served.seal()
    assert [call.agent for call in served.ledger.calls()] == ["planner", None]


def test_the_user_of_the_page_answers(place: Path) -> None:
    agent = module(place / "with_user.py").agent(graphs.asks_the_user)
    assert agent.user("how old?", {"age": "30"}) == "30"
