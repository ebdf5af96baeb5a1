"""Train the agent you already have: the public names, loaded when first used (importing this loads no torch)."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_rl.agents.agent import Agent, rollout
    from lightning_rl.agents.emit import emit_exception, emit_message, emit_object, emit_reward, operation
    from lightning_rl.agents.resources import LLM, ProxyLLM
    from lightning_rl.algorithms.base import Algorithm
    from lightning_rl.algorithms.baseline import Baseline
    from lightning_rl.compat.agent_lightning import LitAgent, NamedResources
    from lightning_rl.compat.daemon import AgentModeDaemon
    from lightning_rl.ppo.ppo import PPO, VERL
    from lightning_rl.store.contract import Rollout
    from lightning_rl.trainer import Trainer
    from lightning_rl_adapters.call import Call
    from lightning_rl_adapters.forest import Forest
    from lightning_rl_adapters.rows import Row
    from lightning_rl_adapters.span import Span
    from lightning_rl_adapters.triplet import Triplet

__version__ = "0.1.0"

_HOME = {
    "AgentModeDaemon": "lightning_rl.compat.daemon",
    "Agent": "lightning_rl.agents.agent",
    "rollout": "lightning_rl.agents.agent",
    "LitAgent": "lightning_rl.compat.agent_lightning",
    "NamedResources": "lightning_rl.compat.agent_lightning",
    "Algorithm": "lightning_rl.algorithms.base",
    "Baseline": "lightning_rl.algorithms.baseline",
    "PPO": "lightning_rl.ppo.ppo",
    "VERL": "lightning_rl.ppo.ppo",
    "emit_exception": "lightning_rl.agents.emit",
    "emit_message": "lightning_rl.agents.emit",
    "emit_object": "lightning_rl.agents.emit",
    "emit_reward": "lightning_rl.agents.emit",
    "operation": "lightning_rl.agents.emit",
    "LLM": "lightning_rl.agents.resources",
    "ProxyLLM": "lightning_rl.agents.resources",
    "Rollout": "lightning_rl.store.contract",
    "Trainer": "lightning_rl.trainer",
    "Call": "lightning_rl_adapters.call",
    "Forest": "lightning_rl_adapters.forest",
    "Row": "lightning_rl_adapters.rows",
    "Span": "lightning_rl_adapters.span",
    "Triplet": "lightning_rl_adapters.triplet",
}

# Names that examples of Agent-lightning import, and what does their work here.
_INSTEAD = {
    "APO": "prompts are not optimised here",
    "AgentOpsTracer": "leave the tracer out, the gateway records the calls",
    "AttemptedRollout": "annotate it lrl.Rollout",
    "Dataset": "a list of JSON values is one",
    "InMemoryLightningStore": "leave the store out, it is store.db of the run folder",
    "LightningStoreClient": "lightning_rl.store.client.HttpStore(url, key)",
    "LitAgentRunner": "call the agent's function, or lrl.Trainer(agent).dev(tasks)",
    "LlmProxyTraceToTriplet": "leave the adapter out, rows come from the forest of calls",
    "OtelTracer": "leave the tracer out, the gateway records the calls",
    "PromptTemplate": "prompts are not optimised here",
    "TracerTraceToTriplet": "leave the adapter out; its agent_match is the key algorithm.train_agents",
    "configure_logger": "logging.basicConfig()",
    "find_final_reward": "rollout.reward",
    "lightning_cli": "lightning-rl train agent=module:function, or lrl.Trainer",
    "setup_logging": "logging.basicConfig()",
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
    "LitAgent",
    "NamedResources",
    "ProxyLLM",
    "Rollout",
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
            instead = f": {_INSTEAD[name]} (docs/coming-from-agent-lightning.md)" if name in _INSTEAD else ""
            raise AttributeError(f"module 'lightning_rl' has no attribute {name!r}{instead}")
        return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
