"""The embedded engine in a process of its own, for a server that loads no torch: `python -m
lightning_rl.inference.process`.

It reads one JSON line `{"path", "max_model_len"}` from stdin, prints one JSON line `{"url"}` on stdout when it samples,
and stops when stdin ends. Where the model cannot be loaded its one line is `{"error"}` and its status 1.
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


class _Settings(msgspec.Struct, frozen=True):
    path: str
    max_model_len: int | None


@contextmanager
def launch(path: str, log: Path, max_model_len: int | None = None) -> Iterator[str]:
    """The URL of an engine that samples the model at `path`, a folder or a hub's id, while the block runs.
    `max_model_len` as of `EmbeddedEngine`.

    Raises EngineNotStarted for a model that cannot be loaded, and ChildDied, with the end of its log, where it ended
    otherwise.
    """
    first = msgspec.json.encode(_Settings(path, max_model_len)) + b"\n"
    child = Child("lightning_rl.inference.process", name="the embedded engine", log=log, first=first)
    try:
        child.start()
        yield child.wait_for("url", EngineNotStarted)
    finally:
        child.stop()


def main() -> None:
    """Load the model, sample until stdin ends."""
    from lightning_rl.inference.embedded import EmbeddedPolicy  # torch
    from lightning_rl.inference.load import ModelSource

    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Settings)
    try:
        policy = EmbeddedPolicy(ModelSource(settings.path), max_model_len=settings.max_model_len)
    except (OSError, ValueError) as error:
        tell({"error": f"the model {settings.path} cannot be loaded: {error}"})
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
