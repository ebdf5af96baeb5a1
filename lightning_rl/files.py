"""Files that are whole or not there: a run may be cut off at any moment, and reads them when it goes on."""

import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Replace `path` by `content` in one step."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
