"""`mlflow ui` of the documented extra starts on a run's database, and shows its traces with their tree."""

import json
import os
import socket
import subprocess
import time
import tomllib
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_rl.telemetry.traces.trace_builder import Story
from tests.lightning_rl.telemetry.traces.recorded import COUNTED, looked_up
from tests.lightning_rl.telemetry.traces.test_backends import CHECKPOINT, TREE

ROOT = Path(__file__).parents[2]
EXTRA = "mlflow"

pytestmark = [pytest.mark.e2e, pytest.mark.package, pytest.mark.long]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """`mlflow` of an environment that holds the extra alone; MLFLOW_OF_THE_EXTRA names one that is there already."""
    if (there := os.environ.get("MLFLOW_OF_THE_EXTRA")) is not None:
        return [there]
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][EXTRA]
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    subprocess.run([folder / "bin" / "pip", "install", "-q", *needs], check=True, timeout=900)
    return [str(folder / "bin" / "mlflow")]


@pytest.fixture(scope="module")
def url(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page's server, as docs/rollout-trace.md starts it."""
    from lightning_rl.telemetry.traces.mlflow import MlflowTraces

    run_dir = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("MLFLOW_TRACKING_URI", raising=False)
        backend = MlflowTraces(run_dir, "p")
        for spans in Story(CHECKPOINT).of(looked_up()):
            backend.take(spans)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ui = [*command, "ui", "--backend-store-uri", f"sqlite:///{run_dir / 'mlflow.db'}", "--port", str(port)]
    environment = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"}
    with (run_dir / "ui.log").open("wb") as log:
        server = subprocess.Popen(ui, stdout=log, stderr=log, cwd=run_dir, env=environment, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_for(f"{address}/health", server, run_dir / "ui.log")
        yield address
    finally:
        os.killpg(server.pid, 15)
        server.wait(30)


def _wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text())


def _ask(address: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data=data, headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def test_the_page_is_there(url: str) -> None:
    with urllib.request.urlopen(url, timeout=30) as page:
        assert "<title>MLflow</title>" in page.read().decode()


def test_its_server_gives_the_page_the_nested_trace(url: str) -> None:
    found = _ask(f"{url}/api/2.0/mlflow/experiments/get-by-name?experiment_name=p")
    place = {"type": "MLFLOW_EXPERIMENT", "mlflow_experiment": {"experiment_id": found["experiment"]["experiment_id"]}}
    traces = _ask(f"{url}/api/3.0/mlflow/traces/search", {"locations": [place], "max_results": 10})["traces"]
    [trace] = [each for each in traces if each["client_request_id"] == COUNTED]
    whole = _ask(f"{url}/ajax-api/3.0/mlflow/get-trace-artifact?request_id={trace['trace_id']}")
    names = {span["span_id"]: span["name"] for span in whole["spans"]}
    assert {span["name"]: names.get(span["parent_span_id"]) for span in whole["spans"]} == TREE
