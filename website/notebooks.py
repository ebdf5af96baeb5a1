"""A notebook as a page: its Markdown, its code, and what the code printed or showed when it was last run.

Invariant: nothing is run here, and nothing that a cell shows is left out. Pictures become files beside the page; HTML,
such as a run in a frame of its own, stays as it is.
"""

import base64
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


def markdown_of(notebook: Path, folder: Path, written: Callable[[str], str]) -> str:
    """The notebook as Markdown. `folder`, named as the page is, takes its pictures; what a person wrote passes
    through `written`."""
    cells = json.loads(notebook.read_text())["cells"]
    parts = []
    for number, cell in enumerate(cells):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(written(source))
        elif cell["cell_type"] == "code":
            parts.append(f"```python\n{source}\n```")
            shown = [_shown(output, folder, f"cell-{number}-{k}") for k, output in enumerate(cell["outputs"])]
            for is_text, group in itertools.groupby(shown, key=lambda each: each[0]):
                contents = [content for _, content in group]
                parts += [_block("".join(contents))] if is_text else contents
    return "\n\n".join(part for part in parts if part) + "\n"


def _shown(output: dict[str, Any], folder: Path, name: str) -> tuple[bool, str]:
    """Whether it is plain text, and what it is as Markdown."""
    if output["output_type"] == "stream":
        return True, "".join(output["text"])
    if output["output_type"] == "error":
        return True, "\n".join(output["traceback"])
    data = {kind: "".join(value) for kind, value in output["data"].items()}
    if "image/png" in data:
        return False, f"![]({_file(folder, f'{name}.png', base64.b64decode(data['image/png']))})"
    html = data.get("text/html", "")
    if "<iframe" in html:  # a document in an attribute, where an empty line would end the page's HTML
        return False, html.strip().replace("\n", "&#10;")
    if "<svg" in html:
        return False, "\n".join(line for line in html.splitlines() if line.strip())  # an empty line would end it
    return True, data.get("text/plain", "").rstrip("\n") + "\n"


def _block(text: str) -> str:
    plain = re.sub(r"\x1b\[[\d;]*m", "", text).strip("\n").rstrip()  # without the colours of a terminal
    return f"```text\n{plain}\n```" if plain else ""


def _file(folder: Path, name: str, content: bytes) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return f"{folder.name}/{name}"
