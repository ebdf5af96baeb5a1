"""Messages to token ids and back: renderers, chat templates, parsing, images.

The `renderers` library is loaded here without `openai`, where nobody has loaded that: its HTTP client, which nothing
here uses, imports it for the type of a parameter. That alone was a third of the time in which a server starts.
"""

import importlib
import sys
import threading
from types import ModuleType


def _load_renderers() -> None:
    if "openai" in sys.modules or threading.active_count() > 1:  # another thread could meet the stand-in
        return
    stand_in = ModuleType("openai")
    stand_in.AsyncOpenAI = object  # type: ignore[attr-defined]  # that type
    sys.modules["openai"] = stand_in
    try:
        importlib.import_module("renderers")
    finally:
        del sys.modules["openai"]


_load_renderers()
