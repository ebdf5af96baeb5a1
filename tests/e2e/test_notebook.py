"""A real Jupyter kernel: agents that cells define train, again and again, and an interrupt leaves the kernel usable."""

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import psutil
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.e2e

IMPORTS = """
import openai
import lightning_rl as lrl
"""
HELPERS = """
MAX_TOKENS = 16

def chat(task):
    return [{"role": "user", "content": task["question"]}]
"""
AGENT = """
@lrl.rollout
async def agent(task: dict, llm: lrl.LLM) -> float:
    client = openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key)
    answer = await client.chat.completions.create(model=llm.model, messages=chat(task), max_tokens=MAX_TOKENS)
    return float(task["answer"] in answer.choices[0].message.content)
"""
TASKS = """
tasks = [{"question": f"cars id size\\nhow many cars? {i}", "answer": "COUNT"} for i in range(8)]
"""
CONFIG = f"""
def config(steps):
    return {{
        "data": {{"train_batch_size": 2}},
        "actor_rollout_ref": {{
            "model": {{"path": {str(ROOT / "examples" / "sql_agent" / "checkpoint")!r}}},
            "rollout": {{"renderer": "qwen3", "n": 4}},
        }},
        "trainer": {{"total_training_steps": steps, "all_failed": "go_on"}},
    }}
"""
FIT = """
trained = lrl.Trainer(agent, n_runners=4, run_dir={run_dir!r}).fit(lrl.PPO(config({steps})), tasks)
"""
# Its reward tells which definition ran.
REDEFINED = """
@lrl.rollout
async def agent(task: dict, llm: lrl.LLM) -> float:
    client = openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key)
    await client.chat.completions.create(model=llm.model, messages=chat(task), max_tokens=MAX_TOKENS)
    return 0.625
"""


class Notebook:
    """A notebook that is open in a kernel: cells are added at its end, and run."""

    def __init__(self, client: NotebookClient) -> None:
        self._client = client

    def shown(self) -> str:
        """The HTML that the last cell shows."""
        return "".join(output.get("data", {}).get("text/html", "") for output in self._client.nb.cells[-1].outputs)

    def run(self, source: str) -> str:
        """What the new cell prints, or shows as its value. An error that it ends with is raised."""
        cell = nbformat.v4.new_code_cell(source)
        self._client.nb.cells.append(cell)
        self._client.execute_cell(cell, len(self._client.nb.cells) - 1)
        shown = [output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in cell.outputs]
        return re.sub(r"\x1b\[[\d;]*m", "", "".join(shown))  # without the colours

    def children(self) -> list[psutil.Process]:
        """The processes that live below the kernel.

        An interrupt inside `Popen` itself leaves the name of a process that has ended (a zombie): nobody knows its id.
        """
        below = psutil.Process(self._client.km.provisioner.pid).children(recursive=True)
        return [child for child in below if child.status() != psutil.STATUS_ZOMBIE]

    def interrupt(self) -> None:
        """What the button with the square does."""
        self._client.km.interrupt_kernel()


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """Has run the cells that define an agent, tasks and a config."""
    folder = tmp_path_factory.mktemp("notebook")
    spec = folder / "kernels" / "tested" / "kernel.json"
    spec.parent.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec.write_text(json.dumps({"argv": argv, "display_name": "tested", "language": "python"}))
    manager = KernelManager(
        kernel_name="tested",
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(folder / "kernels")]),
        connection_file=str(folder / "connection.json"),
    )
    client = NotebookClient(
        nbformat.v4.new_notebook(), km=manager, timeout=240, resources={"metadata": {"path": str(folder)}}
    )
    environment = {**os.environ, "IPYTHONDIR": str(folder / "ipython"), "HF_HUB_OFFLINE": "1"}
    with client.setup_kernel(env=environment):
        opened = Notebook(client)
        for source in (IMPORTS, HELPERS, AGENT, TASKS, CONFIG):
            opened.run(source)
        yield opened


def fit(run_dir: str, steps: int = 1) -> str:
    return FIT.format(run_dir=run_dir, steps=steps)


def test_cells_train_an_agent_that_cells_define(notebook: Notebook) -> None:
    printed = notebook.run(fit("first"))
    assert "step 1/1  reward" in printed
    assert "rror" not in printed
    assert "<svg" in notebook.shown()  # the curve, without widgets
    assert notebook.run("trained.history[-1]['critic/rewards/mean'] >= 0, len(trained.history)") == "(True, 1)"
    assert notebook.children() == []


@pytest.mark.long
def test_a_second_run_in_the_same_kernel_runs_what_was_defined_last(notebook: Notebook) -> None:
    notebook.run(REDEFINED)
    assert "step 1/1  reward 0.625" in notebook.run(fit("second"))
    # A helper that another cell redefines is the new one too.
    notebook.run("def chat(task):\n    raise LookupError('the new helper')")
    notebook.run(fit("third"))
    assert notebook.run("trained.history[-1]['critic/rewards/mean']") == "0.0"
    notebook.run(HELPERS)


@pytest.mark.long
@pytest.mark.parametrize("moment", ["server.log", "runner-0.log", "metrics.jsonl"])
def test_an_interrupt_ends_the_run_and_nothing_else(moment: str, notebook: Notebook, tmp_path: Path) -> None:
    """While the server starts, while the runners start, and while it trains."""
    children: list[int] = []

    def interrupt() -> None:
        wait_until((tmp_path / "run" / moment).exists)
        children.append(len(notebook.children()))
        notebook.interrupt()

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
        notebook.run(fit(str(tmp_path / "run"), steps=10_000))
    watcher.join()
    assert children[0] >= 1
    assert notebook.children() == []
    assert notebook.run("1 + 1") == "2"
    assert "step 1/1  reward" in notebook.run(fit(str(tmp_path / "next")))
    assert notebook.children() == []


def wait_until(is_so: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)
