"""Other projects' forms of use: Agent-lightning's class form and daemon mode, verl's agent-loop sessions.

The public names of verl's agent framework are attributes of this package, or say what to write in their place.
"""

import importlib
from typing import TYPE_CHECKING, Any

if not TYPE_CHECKING:  # type checkers report the names that are not there

    def __getattr__(name: str) -> Any:
        from lightning_rl.compat.agent_framework_names import HERE, INSTEAD

        if name not in HERE:
            instead = f": {INSTEAD[name]} (docs/coming-from-verl.md)" if name in INSTEAD else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")
        module, known_as = HERE[name]
        return getattr(importlib.import_module(module), known_as)
