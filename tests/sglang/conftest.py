"""One SGLang server for all tests: on a CPU, or on a GPU where SGLANG_PYTHON names an interpreter that has SGLang.

On a CPU it is that of `.venv-sglang`, and computes by torch alone (`kernels`). SGLANG_FLAGS are more flags of it.
"""

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import urllib3
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "examples" / "sql_agent" / "checkpoint"
ON_GPU = torch.cuda.is_available() and "SGLANG_PYTHON" in os.environ
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
PYTHON = os.environ.get("SGLANG_PYTHON") or str(ROOT / ".venv-sglang" / "bin" / "python")
START_SECONDS = 300.0

FLAGS = ["--incremental-streaming-output", "--enable-priority-scheduling", "--constrained-json-disable-any-whitespace"]
FLAGS += ["--dtype", "bfloat16" if ON_GPU else "float32"]
if ON_GPU:
    FLAGS += ["--enable-deterministic-inference", "--mem-fraction-static", "0.2"]
else:
    FLAGS += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    FLAGS += ["--max-total-tokens", "16384"]
KERNELS = [Path(__file__).parent / "kernels", ROOT / "tests" / "vllm" / "torchvision_ops"]
OF_CPU = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": os.pathsep.join(map(str, KERNELS))}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker("sglang")
            item.add_marker(pytest.mark.timeout(400))


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where it answers."""
    if shutil.which(PYTHON) is None:
        missing = f"there is no SGLang at {PYTHON}: make test-sglang makes its environment, SGLANG_PYTHON names another"
        (pytest.skip if torch.cuda.is_available() else pytest.fail)(missing)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("sglang") / "log"
    command = [PYTHON, "-m", "sglang.launch_server", "--model-path", str(CHECKPOINT), "--port", str(port), *FLAGS]
    command += shlex.split(os.environ.get("SGLANG_FLAGS", ""))
    with log.open("wb") as out:
        environment = os.environ | {"HF_HUB_OFFLINE": "1"} | ({} if ON_GPU else OF_CPU)
        server = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_SECONDS
        while not _ready(address):
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"SGLang did not start ({server.poll()}):\n" + log.read_text()[-6000:])
            time.sleep(0.5)
        yield address
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _ready(address: str) -> bool:
    try:
        return urllib3.request("GET", address + "/ready", timeout=2.0, retries=False).status == 200
    except urllib3.exceptions.HTTPError:
        return False


@pytest.fixture
def model() -> Any:
    """What the server samples, by transformers."""
    made: Any = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=DTYPE)
    return made.to(DEVICE).eval()


@pytest.fixture(scope="session")
def prompt() -> list[int]:
    tokenizer: Any = AutoTokenizer.from_pretrained(CHECKPOINT)
    ids: list[int] = tokenizer("How many cities are there?")["input_ids"]
    return ids
