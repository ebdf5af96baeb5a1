"""Agent loops and sessions, as clients of the gateway.

Invariant: a loop asks the policy through the URL of its rollout, as any agent does, so its calls are recorded like
those of any agent; nothing that was sampled is dropped because a limit was hit. The names load what they need.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_rl.compat.sessions import AgentFramework, Session, SessionBatch, SessionStats
    from lightning_rl.loops.agent_loop import AgentLoop, Setting
    from lightning_rl.loops.conversation import Answer, Conversation
    from lightning_rl.loops.limits import Limits
    from lightning_rl.loops.single_turn import SingleTurnAgent
    from lightning_rl.loops.tool_agent import ToolAgent

_HOME = {
    "AgentFramework": "lightning_rl.compat.sessions",
    "AgentLoop": "agent_loop",
    "Answer": "conversation",
    "Conversation": "conversation",
    "Limits": "limits",
    "Session": "lightning_rl.compat.sessions",
    "SessionBatch": "lightning_rl.compat.sessions",
    "SessionStats": "lightning_rl.compat.sessions",
    "Setting": "agent_loop",
    "SingleTurnAgent": "single_turn",
    "ToolAgent": "tool_agent",
}

__all__ = [
    "AgentFramework",
    "AgentLoop",
    "Answer",
    "Conversation",
    "Limits",
    "Session",
    "SessionBatch",
    "SessionStats",
    "Setting",
    "SingleTurnAgent",
    "ToolAgent",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'lightning_rl.loops' has no attribute {name!r}")
        home = _HOME[name]
        return getattr(importlib.import_module(home if "." in home else f"lightning_rl.loops.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
