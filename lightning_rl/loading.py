"""What a user's configuration names: `module:name`, or `path/to/file.py:name`; modules of the current folder too."""

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_rl.errors import Explained


class NotLoadable(Explained, ValueError):
    """What was named is not there, or cannot be imported."""


def load(spec: str, role: str, *, error: type[NotLoadable] = NotLoadable) -> Any:
    """The object at `spec`; `role` is what errors call it.

    Raises `error` saying what is wrong with `spec`: its form, the file, the module, what the module raises when it is
    imported, or the name.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise error(f"{role} {spec!r} is neither module:function nor path/to/file.py:function")
    folder = Path.cwd()
    if place.endswith(".py"):
        file = Path(place).expanduser().resolve()
        if not file.is_file():
            raise error(f"{role} {spec!r}: there is no file {file}")
        folder, place = file.parent, file.stem
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # runners import by the same path
    if importlib.util.find_spec(place.partition(".")[0]) is None:
        raise error(f"{role} {spec!r}: there is no module {place!r} in {folder}, nor installed")
    module = _imported(place, f"{role} {spec!r}", error)
    candidate: Any = module
    for part in name.split("."):
        candidate = getattr(candidate, part, None)
    if candidate is None:
        near = difflib.get_close_matches(name, vars(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise error(f"{role} {spec!r}: {module.__file__} has no {name!r}{hint}")
    return candidate


def made_of(file: Path) -> ModuleType | None:
    """The module that was made of this file already: a script that trains must not be run again by what it names."""
    for module in list(sys.modules.values()):
        path = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if isinstance(path, str) and os.path.basename(path) == file.name and Path(path).resolve() == file:
            return module
    return None


def find_neighbours(file: Path) -> None:
    """Let a file import what lies beside it."""
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # last, so that its neighbours hide no installed module


def run_apart(file: Path, prefix: str) -> ModuleType | None:
    """The file, run as a module of a name that no other has; `prefix` begins it. None for one that is no Python module.

    Raises what the file raises.
    """
    digest = hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()
    spec = importlib.util.spec_from_file_location(f"{prefix}_{file.stem}_{digest}", file)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


def _imported(name: str, label: str, kind: type[NotLoadable]) -> Any:
    with explained(label, kind):
        return importlib.import_module(name)


@contextmanager
def explained(label: str, kind: type[Exception]) -> Iterator[None]:
    """Import a user's module inside; what it raises becomes a `kind` that shows their part of the traceback."""
    try:
        yield
    except (Exception, SystemExit) as error:
        exception = traceback.TracebackException.from_exception(error)
        own_files = {__file__, contextlib.__file__}
        user_frames = [
            frame for frame in exception.stack if frame.filename not in own_files and "importlib" not in frame.filename
        ]
        exception.stack = traceback.StackSummary.from_list(user_frames)
        raise kind(f"{label} cannot be imported\n{''.join(exception.format(chain=False)).rstrip()}") from error
