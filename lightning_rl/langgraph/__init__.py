"""LangGraph: a chat model over the gateway, and agents made of graphs that stay as they are in production.

Invariant: no message carries state of ours. What a call continues is found by the gateway, so a graph may branch, go
back and be resumed as it likes. Needs `pip install "lightning-rl[langgraph]"`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_rl.langgraph.chat_model import ChatModel
    from lightning_rl.langgraph.graph_agent import GraphAgent, agent_of
    from lightning_rl.langgraph.react import ReactAgentLoop, react_agent

_HOME = {
    "ChatModel": "chat_model",
    "GraphAgent": "graph_agent",
    "agent_of": "graph_agent",
    "ReactAgentLoop": "react",
    "react_agent": "react",
}

__all__ = ["ChatModel", "GraphAgent", "ReactAgentLoop", "agent_of", "react_agent"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'lightning_rl.langgraph' has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(f"lightning_rl.langgraph.{_HOME[name]}"), name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in ("langgraph", "langchain_core", "langchain_openai"):
                raise ModuleNotFoundError(
                    f"lightning_rl.langgraph needs {error.name}: pip install 'lightning-rl[langgraph]'", name=error.name
                ) from error
            raise


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
