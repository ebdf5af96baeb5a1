"""Messages to token ids and back: renderers, chat templates, parsing, images.

The `renderers` library is loaded here without `openai`, which its HTTP client imports for the type of a parameter: that
alone is a third of the time in which a server starts.
"""

import importlib
import sys
from types import ModuleType
from typing import Any


class _StandIn(ModuleType):
    """Has the name of that type, and is the real package for whoever asks it for anything else."""

    AsyncOpenAI = object

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what the import system asks about a package
            raise AttributeError(name)
        if sys.modules.get("openai") is self:
            del sys.modules["openai"]
        return getattr(importlib.import_module("openai"), name)


def _load_renderers() -> None:
    if "openai" in sys.modules:
        return
    stand_in = sys.modules["openai"] = _StandIn("openai")
    try:
        importlib.import_module("renderers")
    finally:
        if sys.modules.get("openai") is stand_in:
            del sys.modules["openai"]


_load_renderers()
