"""Docs are true today: the README's code runs as it stands, its commands exist, its index is whole."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightning_rl.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
EXAMPLE = ROOT / "examples" / "sql_agent" / "README.md"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the README's script, and the same agent and tasks in files of their own."""
    folder = tmp_path_factory.mktemp("readme")
    first, *more = blocks(ROOT / "README.md", "python")
    (folder / "script.py").write_text("\n".join([first, *more]))
    agent, tasks = first.split("\n\n\ntasks = ")
    (folder / "my_agent.py").write_text(agent + "\n")
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in eval(tasks.splitlines()[0])))
    return folder


def run_in(place: Path, *command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=place, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.e2e
def test_the_readmes_code_runs_as_it_stands_and_its_agent_learns(place: Path) -> None:
    """A script without a `__main__` guard, in a folder of its own: it trains, looks, and measures."""
    first = blocks(ROOT / "README.md", "python")[0]
    assert len([line for line in first.splitlines() if line.strip()]) <= 12
    printed = run_in(place, "script.py")
    rewards = [float(reward) for reward in re.findall(r"^step \d+/\d+  reward (\S+)", printed, re.MULTILINE)]
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1
    assert re.search(r"row 1: \d+ tokens, \d+ to be trained, exact: true", printed)
    assert re.search(r"accuracy 0\.\d+, 95 % confidence 0\.\d+ to 0\.\d+ \(16 tasks, 64 rollouts\)", printed)
    [trained] = [run for run in (place / "runs").iterdir() if (run / "metrics.jsonl").exists()]
    last = len(rewards)
    assert (trained / "metrics.jsonl").read_text().count("\n") == last
    assert (trained / "checkpoints" / f"step-{last}" / "model.safetensors").exists()


@pytest.mark.smoke
@pytest.mark.e2e
def test_the_readmes_command_trains_without_a_script(place: Path) -> None:
    ours = [line for page, line in commands() if page == "README.md"]
    [command] = [line for line in ours if line.startswith("lightning-rl train agent=")]
    printed = run_in(place, "-m", "lightning_rl", *command.split()[1:])
    assert "step 1/1  reward" in printed


def commands() -> list[tuple[str, str]]:
    return [
        (page.name, line)
        for page in [*PAGES, EXAMPLE]
        for block in blocks(page, "sh")
        for line in block.strip().splitlines()
    ]


@pytest.mark.parametrize(("page", "command"), commands())
def test_every_command_of_the_docs_exists(page: str, command: str) -> None:
    """`make` targets, our command line, and our scripts; what they do is tested where they live."""
    words = command.split()
    if words[0] == "make":
        assert subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True).returncode == 0
    elif words[0] == "lightning-rl":
        assert CliRunner().invoke(app, [words[1], "--help"]).exit_code == 0
    else:
        script = next(word for word in words if word.endswith(".py") or "." in word)
        path = ROOT / (script if script.endswith(".py") else script.replace(".", "/") + ".py")
        assert words[0] == "python"
        assert path.exists(), command


def test_the_index_leads_to_every_page() -> None:
    docs = ROOT / "docs"
    linked = {(docs / target).resolve() for target in re.findall(r"\]\(([^)#]+)\)", (docs / "index.md").read_text())}
    assert not {page for page in docs.glob("**/*.md") if page.name != "index.md"} - linked


def test_each_line_of_the_troubleshooting_page_has_its_test() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    named = re.findall(r"\| `(tests/\S+?)::(\w+)` \|$", page, re.MULTILINE)
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(named) == len(lines)
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(), f"{file} has no {test}"


def test_each_library_is_used_where_the_architecture_says() -> None:
    table = (ROOT / "docs/architecture.md").read_text().split("## Libraries, and where they work")[1].split("##")[0]
    rows = [line.split("|")[1:4] for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) >= 12
    for libraries, _, places in rows:
        for file in re.findall(r"`([^`]+)`", places):
            code = (ROOT / file).read_text()
            for library in re.findall(r"`([^`]+)`", libraries):
                used = re.search(rf"^\s*(import|from) {library}\b", code, re.MULTILINE)
                assert used, f"{file} does not use {library}"
