"""Environments of the agents: one for each framework or program, its versions pinned, made when it is first needed.

`python -m tests.works_with.environments NAME...` makes those of these names, without names all.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.works_with.table import ENVIRONMENTS, Environment

ROOT = Path(os.environ.get("WORKS_WITH", Path(__file__).parents[2] / ".venv-works"))


class Broken(Exception):
    """An environment could not be made."""


def made(name: str) -> Path:
    """The folder of an environment, which has what is pinned. Raises Broken where that cannot be installed."""
    folder, environment = ROOT / name, ENVIRONMENTS[name]
    marker = folder / "made.txt"
    pins = "\n".join(environment.pins)
    if marker.exists() and marker.read_text() == pins:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    for command in _commands(folder, environment):
        done = subprocess.run(command, capture_output=True, text=True, env=surroundings(folder), check=False)
        if done.returncode:
            raise Broken(f"{name}: {' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    marker.write_text(pins)
    return folder


def surroundings(folder: Path) -> Mapping[str, str]:
    """The variables in which an environment's programs are found."""
    node = Path(sys.prefix).parent / ".venv-node" / "bin"
    path = os.pathsep.join(map(str, (folder / "bin", folder / "node_modules" / ".bin", node)))
    return {**os.environ, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}


def _commands(folder: Path, environment: Environment) -> list[list[str]]:
    if environment.npm:
        folder.mkdir(parents=True)
        install = ["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(folder), *environment.pins]
        return [install, *(["node", str(folder / "node_modules" / script)] for script in environment.scripts)]
    uv, python = [str(Path(sys.prefix, "bin", "uv"))], ["--quiet", "--python"]
    return [
        [*uv, "venv", *python, environment.python or sys.executable, str(folder)],
        [*uv, "pip", "install", *python, str(folder / "bin" / "python"), *environment.pins],
    ]


if __name__ == "__main__":
    for wanted in sys.argv[1:] or ENVIRONMENTS:
        made(wanted)
        print(wanted)
