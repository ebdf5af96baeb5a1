"""Docs are true today: the README's code runs as it stands, its commands exist, its links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLE = ROOT / "examples" / "sql_agent" / "README.md"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.e2e
def test_the_readmes_code_trains_as_it_stands(tmp_path: Path) -> None:
    """A script without a `__main__` guard, in a folder of its own; it leaves a store, metrics and a checkpoint."""
    [code] = blocks(ROOT / "README.md", "python")
    (tmp_path / "script.py").write_text(code)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    [run] = (tmp_path / "runs").iterdir()
    assert (run / "metrics.jsonl").read_text().count("\n") == 2
    assert (run / "checkpoints" / "step-2" / "model.safetensors").exists()


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
        assert (
            subprocess.run([sys.executable, "-m", "lightning_rl", words[1], "--help"], capture_output=True).returncode
            == 0
        )
    else:
        script = next(word for word in words if word.endswith(".py") or "." in word)
        path = ROOT / (script if script.endswith(".py") else script.replace(".", "/") + ".py")
        assert words[0] == "python"
        assert path.exists(), command


@pytest.mark.parametrize("page", [*PAGES, EXAMPLE], ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
