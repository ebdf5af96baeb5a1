"""Importing the package costs next to nothing: what is heavy is loaded by the name that needs it."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LOADED = (
    "import json, sys; before = set(sys.modules); {statement}; print(json.dumps(sorted(set(sys.modules) - before)))"
)
HEAVY = {
    "torch", "ray", "vllm", "litellm", "hydra", "omegaconf", "transformers", "openai", "numpy", "sqlalchemy",
    "renderers", "tokenizers", "matplotlib", "plotext", "rich", "typer", "starlette", "uvicorn", "aiohttp", "httpx",
    "datasets", "fastapi", "pyarrow", "pandas", "opentelemetry", "google", "requests",
}  # fmt: skip


def loaded(statement: str) -> list[str]:
    """The modules that a statement loads in a new interpreter, less what is the interpreter's own."""
    command = [sys.executable, "-c", LOADED.format(statement=statement)]
    modules: list[str] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return [name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names]


def test_the_package_loads_itself_and_what_counts_cores() -> None:
    cores = ["lightning_rl.processes", "lightning_rl.processes.cores"]
    assert loaded("import lightning_rl") == ["lightning_rl", *cores]


def test_names_leave_the_garbage_collector_as_it_was() -> None:
    off = "gc.disable(); gc.enable = gc.disable = None; lightning_rl.Trainer; assert not gc.isenabled()"
    on = "lightning_rl.LLM; assert gc.isenabled(); gc.disable = None; lightning_rl.LLM"  # it is loaded then
    for ways in (off, on):
        subprocess.run([sys.executable, "-c", f"import gc, lightning_rl; {ways}"], check=True)


def test_the_quickstart_says_what_it_does_before_it_loads_torch() -> None:
    begins = "import lightning_rl.cli.quickstart as q; q._tutorial = lambda folder: sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", f"import sys; {begins}; q.run(0, None, None)"], capture_output=True)
    assert (done.returncode, b"An ordinary SQL agent learns" in done.stdout) == (0, True)


@pytest.mark.parametrize(
    ("given", "spins"),
    [
        pytest.param({}, "10000", id="by default"),
        pytest.param({"GOMP_SPINCOUNT": "7"}, "7", id="its own", marks=pytest.mark.long),
        pytest.param({"OMP_WAIT_POLICY": "passive"}, "0", id="a policy", marks=pytest.mark.long),
    ],
)
def test_cores_that_wait_for_others_soon_sleep(given: dict[str, str], spins: str) -> None:
    """What OpenMP itself says as torch is loaded, which its wheels for other systems do not."""
    names = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    environment = {name: value for name, value in os.environ.items() if name not in names} | given
    command = [sys.executable, "-c", "import lightning_rl, torch"]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment | {"OMP_DISPLAY_ENV": "verbose"}
    )
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("this torch has another OpenMP than GNU's")
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr


@pytest.mark.parametrize(
    "names",
    [
        "LLM, ProxyLLM, rollout, Agent",
        "emit_reward, emit_message, emit_object, emit_exception, operation",
        "Trainer",
        "Span, Call, Forest, Row",
    ],
)
def test_what_an_agent_or_a_script_names_loads_nothing_heavy(names: str) -> None:
    modules = loaded(f"from lightning_rl import {names}")
    assert not {name.partition(".")[0] for name in modules} & HEAVY
    assert len(modules) <= 120


def test_an_agents_names_load_no_third_party_code() -> None:
    modules = loaded("from lightning_rl import LLM, ProxyLLM, rollout, Agent, emit_reward, emit_message, operation")
    assert {name.partition(".")[0] for name in modules} == {"lightning_rl", "lightning_rl_adapters"}


def test_type_checkers_know_every_name_that_is_there_at_run_time() -> None:
    import lightning_rl

    assert lightning_rl.__file__ is not None
    [checked] = [
        part
        for part in ast.parse(Path(lightning_rl.__file__).read_text()).body
        if isinstance(part, ast.If) and isinstance(part.test, ast.Name)
    ]
    known = {name.name for part in checked.body if isinstance(part, ast.ImportFrom) for name in part.names}
    assert known == lightning_rl._HOME.keys() == set(lightning_rl.__all__) - {"__version__"}
