"""Train the agent you already have: the public names, loaded when first used (importing this loads no torch)."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_rl.agent import Agent, rollout
    from lightning_rl.algorithms.base import Algorithm
    from lightning_rl.algorithms.baseline import Baseline
    from lightning_rl.algorithms.daemon import AgentModeDaemon
    from lightning_rl.algorithms.ppo import PPO, VERL
    from lightning_rl.emit import emit_exception, emit_message, emit_object, emit_reward, operation
    from lightning_rl.resources import LLM, ProxyLLM
    from lightning_rl.trainer import Trainer
    from lightning_rl_adapters.call import Call
    from lightning_rl_adapters.forest import Forest
    from lightning_rl_adapters.rows import Row
    from lightning_rl_adapters.span import Span
    from lightning_rl_adapters.triplet import Triplet

__version__ = "0.1.0"

_HOME = {
    "AgentModeDaemon": "lightning_rl.algorithms.daemon",
    "Agent": "lightning_rl.agent",
    "rollout": "lightning_rl.agent",
    "Algorithm": "lightning_rl.algorithms.base",
    "Baseline": "lightning_rl.algorithms.baseline",
    "PPO": "lightning_rl.algorithms.ppo",
    "VERL": "lightning_rl.algorithms.ppo",
    "emit_exception": "lightning_rl.emit",
    "emit_message": "lightning_rl.emit",
    "emit_object": "lightning_rl.emit",
    "emit_reward": "lightning_rl.emit",
    "operation": "lightning_rl.emit",
    "LLM": "lightning_rl.resources",
    "ProxyLLM": "lightning_rl.resources",
    "Trainer": "lightning_rl.trainer",
    "Call": "lightning_rl_adapters.call",
    "Forest": "lightning_rl_adapters.forest",
    "Row": "lightning_rl_adapters.rows",
    "Span": "lightning_rl_adapters.span",
    "Triplet": "lightning_rl_adapters.triplet",
}

__all__ = [
    "LLM",
    "PPO",
    "VERL",
    "Agent",
    "AgentModeDaemon",
    "Algorithm",
    "Baseline",
    "Call",
    "Forest",
    "ProxyLLM",
    "Row",
    "Span",
    "Trainer",
    "Triplet",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "operation",
    "rollout",
]


if not TYPE_CHECKING:  # type checkers know the names above, and report the others

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'lightning_rl' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
