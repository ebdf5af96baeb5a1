"""What a tracking service is told of a run, and the id under which it knows the run again."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from lightning_rl.files import write_whole

PROJECT = "lightning_rl"  # of runs that name none


class About(msgspec.Struct, frozen=True, kw_only=True):
    """The project that a run belongs to, its name there, and its configuration."""

    project: str = PROJECT
    name: str
    config: Mapping[str, Any] = {}


def kept_id(path: Path, make: Callable[[], str]) -> str:
    """The id in the file `path`; the first time a new one, which is kept there."""
    if not path.exists():
        write_whole(path, make().encode())
    return path.read_text(encoding="utf-8")
