"""Run the project's notebooks and keep what they show: `make notebooks`.

Invariant: each runs in an empty folder, as a reader's would, and what it shows names no place of this machine.
"""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
HOME = "/home/you"  # what stands for the folder that a notebook ran in, and for that of the project


def executed(notebook: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook as it is after a run in the folder. Raises CellExecutionError where a cell fails."""
    book: nbformat.NotebookNode = nbformat.read(notebook, as_version=4)  # type: ignore[no-untyped-call]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # `!lightning-rl` is the one that is tested
        "HF_HUB_OFFLINE": "1",
        "IPYTHONDIR": str(folder / ".ipython"),
        "NO_COLOR": "1",
        "COLUMNS": "120",
    }
    client = NotebookClient(book, timeout=280, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment)
    for cell in book.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if "TqdmWarning" not in output.get("text", "")]
    return book


def keep(notebook: Path) -> None:
    """Write what the notebook shows into its file."""
    with tempfile.TemporaryDirectory() as folder:
        book = executed(notebook, Path(folder))
        text: str = nbformat.writes(book)  # type: ignore[no-untyped-call]
    text = text.replace(str(Path(folder).resolve()), HOME).replace(str(ROOT), f"{HOME}/lightning_rl")
    notebook.write_text(text + "\n")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        keep(Path(name))
