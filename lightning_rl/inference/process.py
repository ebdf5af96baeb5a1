"""The embedded engine in a process of its own, for a server that loads no torch: `python -m
lightning_rl.inference.process`.

It reads one JSON line `{"path"}` from stdin, prints one JSON line `{"url"}` on stdout when it samples, and stops when
stdin ends. Where the model cannot be loaded its one line is `{"error"}` and its status 1.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from lightning_rl.errors import Explained
from lightning_rl.processes.child import Child, tell


class EngineNotStarted(Explained, RuntimeError):
    """The embedded engine cannot sample this model; the message says why."""


@contextmanager
def launch(path: str, log: Path) -> Iterator[str]:
    """The URL of an engine that samples the model at `path`, a folder or a hub's id, while the block runs.

    Raises EngineNotStarted for a model that cannot be loaded, and ChildDied, with the end of its log, where it ended
    otherwise.
    """
    first = msgspec.json.encode({"path": path}) + b"\n"
    child = Child("lightning_rl.inference.process", name="the embedded engine", log=log, first=first)
    try:
        child.start()
        yield child.wait_until_told("url", EngineNotStarted)
    finally:
        child.stop()


def main() -> None:
    """Load the model, sample until stdin ends."""
    from lightning_rl.inference.embedded import EmbeddedPolicy  # torch
    from lightning_rl.inference.load import ModelSource

    path = msgspec.json.decode(sys.stdin.buffer.readline(), type=dict[str, str])["path"]
    try:
        policy = EmbeddedPolicy(ModelSource(path))
    except (OSError, ValueError) as error:
        tell({"error": f"the model {path} cannot be loaded: {error}"})
        sys.exit(1)
    try:
        policy.start()
        tell({"url": policy.url})
        while os.read(0, 4096):
            pass
    finally:
        policy.close()


if __name__ == "__main__":
    main()
