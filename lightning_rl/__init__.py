"""Train the agent you already have: the public names, loaded when first used (importing this loads no torch)."""

import gc
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from lightning_rl.processes.cores import limit_threads as _limit_threads

if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    # So many turns a core waits for the others of a matrix product before it sleeps; read when torch is loaded. By its
    # default an update on a busy machine takes four times as long as on one core (docs/performance.md#cores-that-wait).
    os.environ["GOMP_SPINCOUNT"] = "10000"
_limit_threads()

if TYPE_CHECKING:
    from lightning_rl.agents.agent import Agent, rollout
    from lightning_rl.agents.emit import emit_exception, emit_message, emit_object, emit_reward, operation
    from lightning_rl.agents.resources import LLM, PromptTemplate, ProxyLLM
    from lightning_rl.algorithms.base import Algorithm, Endpoint
    from lightning_rl.algorithms.baseline import Baseline
    from lightning_rl.algorithms.prompt_optimization import PromptOptimization
    from lightning_rl.command_agent.agent import CommandAgent
    from lightning_rl.compat.agent_lightning import (
        AgentOpsTracer,
        AttemptedRollout,
        Dataset,
        DummyTracer,
        Hook,
        LitAgent,
        LlmProxyTraceToTriplet,
        NamedResources,
        OtelTracer,
        TracerTraceToTriplet,
        WeaveTracer,
        configure_logger,
        emit_annotation,
        llm_rollout,
        make_link_attributes,
        make_tag_attributes,
        prompt_rollout,
        reward,
        setup_logging,
    )
    from lightning_rl.compat.algorithm_function import algo
    from lightning_rl.compat.daemon import AgentModeDaemon
    from lightning_rl.compat.lightning_store import LightningStore, LightningStoreClient, ResourcesUpdate
    from lightning_rl.compat.llm_proxy import LLMProxy
    from lightning_rl.compat.messages import TraceToMessages
    from lightning_rl.errors import InfrastructureError
    from lightning_rl.ppo_algorithm import PPO, VERL
    from lightning_rl.sft_algorithm import SFT
    from lightning_rl.store.contract import Rollout, RolloutConfig, RolloutRequest
    from lightning_rl.trainer import Trainer
    from lightning_rl.viewer.notebook import Run
    from lightning_rl_adapters.call import Call
    from lightning_rl_adapters.forest import Forest
    from lightning_rl_adapters.rows import Row
    from lightning_rl_adapters.span import Span
    from lightning_rl_adapters.triplet import Triplet

__version__ = "0.1.0"

_HOME = {
    "PromptOptimization": "lightning_rl.algorithms.prompt_optimization",
    "PromptTemplate": "lightning_rl.agents.resources",
    "algo": "lightning_rl.compat.algorithm_function",
    "LightningStore": "lightning_rl.compat.lightning_store",
    "LightningStoreClient": "lightning_rl.compat.lightning_store",
    "LLMProxy": "lightning_rl.compat.llm_proxy",
    "ResourcesUpdate": "lightning_rl.compat.lightning_store",
    "TraceToMessages": "lightning_rl.compat.messages",
    "prompt_rollout": "lightning_rl.compat.agent_lightning",
    "AgentModeDaemon": "lightning_rl.compat.daemon",
    "Agent": "lightning_rl.agents.agent",
    "rollout": "lightning_rl.agents.agent",
    "AgentOpsTracer": "lightning_rl.compat.agent_lightning",
    "AttemptedRollout": "lightning_rl.compat.agent_lightning",
    "Dataset": "lightning_rl.compat.agent_lightning",
    "DummyTracer": "lightning_rl.compat.agent_lightning",
    "Hook": "lightning_rl.compat.agent_lightning",
    "LitAgent": "lightning_rl.compat.agent_lightning",
    "LlmProxyTraceToTriplet": "lightning_rl.compat.agent_lightning",
    "NamedResources": "lightning_rl.compat.agent_lightning",
    "OtelTracer": "lightning_rl.compat.agent_lightning",
    "TracerTraceToTriplet": "lightning_rl.compat.agent_lightning",
    "WeaveTracer": "lightning_rl.compat.agent_lightning",
    "configure_logger": "lightning_rl.compat.agent_lightning",
    "emit_annotation": "lightning_rl.compat.agent_lightning",
    "llm_rollout": "lightning_rl.compat.agent_lightning",
    "make_link_attributes": "lightning_rl.compat.agent_lightning",
    "make_tag_attributes": "lightning_rl.compat.agent_lightning",
    "reward": "lightning_rl.compat.agent_lightning",
    "setup_logging": "lightning_rl.compat.agent_lightning",
    "Algorithm": "lightning_rl.algorithms.base",
    "Endpoint": "lightning_rl.algorithms.base",
    "Baseline": "lightning_rl.algorithms.baseline",
    "CommandAgent": "lightning_rl.command_agent.agent",
    "InfrastructureError": "lightning_rl.errors",
    "PPO": "lightning_rl.ppo_algorithm",
    "SFT": "lightning_rl.sft_algorithm",
    "VERL": "lightning_rl.ppo_algorithm",
    "emit_exception": "lightning_rl.agents.emit",
    "emit_message": "lightning_rl.agents.emit",
    "emit_object": "lightning_rl.agents.emit",
    "emit_reward": "lightning_rl.agents.emit",
    "operation": "lightning_rl.agents.emit",
    "LLM": "lightning_rl.agents.resources",
    "ProxyLLM": "lightning_rl.agents.resources",
    "Rollout": "lightning_rl.store.contract",
    "RolloutConfig": "lightning_rl.store.contract",
    "RolloutRequest": "lightning_rl.store.contract",
    "Trainer": "lightning_rl.trainer",
    "Run": "lightning_rl.viewer.notebook",
    "Call": "lightning_rl_adapters.call",
    "Forest": "lightning_rl_adapters.forest",
    "Row": "lightning_rl_adapters.rows",
    "Span": "lightning_rl_adapters.span",
    "Triplet": "lightning_rl_adapters.triplet",
}

__all__ = [
    "LLM",
    "PPO",
    "SFT",
    "VERL",
    "Agent",
    "AgentModeDaemon",
    "AgentOpsTracer",
    "Algorithm",
    "AttemptedRollout",
    "Baseline",
    "Call",
    "CommandAgent",
    "Dataset",
    "DummyTracer",
    "Endpoint",
    "Forest",
    "Hook",
    "InfrastructureError",
    "LLMProxy",
    "LightningStore",
    "LightningStoreClient",
    "LitAgent",
    "LlmProxyTraceToTriplet",
    "NamedResources",
    "OtelTracer",
    "PromptOptimization",
    "PromptTemplate",
    "ProxyLLM",
    "ResourcesUpdate",
    "Rollout",
    "RolloutConfig",
    "RolloutRequest",
    "Row",
    "Run",
    "Span",
    "TraceToMessages",
    "TracerTraceToTriplet",
    "Trainer",
    "Triplet",
    "WeaveTracer",
    "algo",
    "configure_logger",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "llm_rollout",
    "make_link_attributes",
    "make_tag_attributes",
    "operation",
    "prompt_rollout",
    "reward",
    "rollout",
    "setup_logging",
]


if not TYPE_CHECKING:  # type checkers know the names above, and report the others

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            from lightning_rl.compat.agent_lightning_names import INSTEAD

            instead = f": {INSTEAD[name]} (docs/coming-from-agent-lightning.md)" if name in INSTEAD else ""
            raise AttributeError(f"module 'lightning_rl' has no attribute {name!r}{instead}")
        # Nothing of torch and transformers is garbage, and looking for some takes a fifth of their import. Other
        # threads may be here, too: only who turns collection on again turns it off.
        pauses = _HOME[name] not in sys.modules and gc.isenabled()
        if pauses:
            gc.disable()
        try:
            return getattr(importlib.import_module(_HOME[name]), name)
        finally:
            if pauses:
                gc.enable()


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
