"""What a user's configuration names: `module:name`, or `path/to/file.py:name`; modules of the current folder too."""

import contextlib
import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_rl.errors import Explained


class NotLoadable(Explained, ValueError):
    """What was named is not there, or cannot be imported."""


def load(spec: str, what: str, *, error: type[NotLoadable] = NotLoadable) -> Any:
    """The object at `spec`; `what` it is to be, for the error.

    Raises `error` saying what is wrong with `spec`: its form, the file, the module, what the module raises when it is
    imported, or the name.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise error(f"{what} {spec!r} is neither module:function nor path/to/file.py:function")
    folder = Path.cwd()
    if place.endswith(".py"):
        file = Path(place).expanduser().resolve()
        if not file.is_file():
            raise error(f"{what} {spec!r}: there is no file {file}")
        folder, place = file.parent, file.stem
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # runners import by the same path
    if importlib.util.find_spec(place.partition(".")[0]) is None:
        raise error(f"{what} {spec!r}: there is no module {place!r} in {folder}, nor installed")
    module = _imported(place, f"{what} {spec!r}", error)
    candidate: Any = module
    for part in name.split("."):
        candidate = getattr(candidate, part, None)
    if candidate is None:
        near = difflib.get_close_matches(name, vars(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise error(f"{what} {spec!r}: {module.__file__} has no {name!r}{hint}")
    return candidate


def _imported(name: str, what: str, kind: type[NotLoadable]) -> Any:
    with explained(what, kind):
        return importlib.import_module(name)


@contextmanager
def explained(what: str, kind: type[Exception]) -> Iterator[None]:
    """Import a user's module inside; what it raises becomes a `kind` that shows their part of the traceback."""
    try:
        yield
    except (Exception, SystemExit) as error:
        told = traceback.TracebackException.from_exception(error)
        ours = {__file__, contextlib.__file__}
        theirs = [frame for frame in told.stack if frame.filename not in ours and "importlib" not in frame.filename]
        told.stack = traceback.StackSummary.from_list(theirs)
        raise kind(f"{what} cannot be imported\n{''.join(told.format(chain=False)).rstrip()}") from error
