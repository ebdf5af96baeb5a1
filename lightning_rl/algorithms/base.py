"""The base of every algorithm: it is opened with a run folder, given a store, and run on datasets."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lightning_rl.store.client import HttpStore


class Endpoint(msgspec.Struct, kw_only=True):
    """The policy as the server needs to know it: its name, how its chat format is rendered, and its engines."""

    model: str
    tokenizer: str
    renderer: str
    engines: list[dict[str, Any]]


class Algorithm:
    """Subclass it: `open` starts the engines and says what the gateway serves, `run` does the work.

    The Trainer sets `store` between the two, and `check`, which raises when one of the run's processes has died: call
    it while waiting.
    """

    store: HttpStore
    check: Callable[[], None]

    def open(self, run_dir: Path) -> Endpoint:
        """Start what must run before the server; the policy's endpoint."""
        raise NotImplementedError(f"{type(self).__name__} defines no open(run_dir)")

    def run(self, train_dataset: Sequence[Any] | None, val_dataset: Sequence[Any] | None) -> None:
        """Do the work; returns when it is done."""
        raise NotImplementedError(f"{type(self).__name__} defines no run(train_dataset, val_dataset)")

    def close(self) -> None:
        """Stop what `open` started. Called also after an error."""
