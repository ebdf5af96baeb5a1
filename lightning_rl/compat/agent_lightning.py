"""Agent-lightning's class form under its own names, for agents of which nothing but the import is changed.

It is `Agent` with a second name for an async method. What else has two names: `lrl.VERL`, `Trainer(algorithm=...)`,
`LLM.endpoint`, `ProxyLLM.get_base_url` and `rollout.input`.
"""

from collections.abc import Mapping
from typing import Any, Generic, TypeAlias, TypeVar

from lightning_rl.agents.agent import Agent, AgentSignature

T = TypeVar("T")
NamedResources: TypeAlias = Mapping[str, Any]  # a `ProxyLLM` or other value by its name
_METHODS = ("rollout", "training_rollout", "validation_rollout")

# Arguments of its Trainer, and what does their work here.
ARGUMENTS = {
    "adapter": "rows come from the forest of calls; its agent_match is the configuration's algorithm.train_agents",
    "dev": "Trainer(agent).dev(tasks)",
    "hooks": "a function around the agent, or a reward function",
    "initial_resources": "the algorithm publishes what its rollouts get; other models are in gateway.backends",
    "llm_proxy": "the gateway is always there; other models are in gateway.backends",
    "max_rollouts": "a shorter dataset, or trainer.total_training_steps",
    "max_tasks": "a shorter dataset, or trainer.total_training_steps",
    "n_workers": "n_runners",
    "runner": "n_runners says how many there are",
    "store": "the store is store.db of run_dir",
    "strategy": "there is one: a server process and runner processes beside the trainer",
    "tracer": "nothing is traced: the gateway records the calls",
    "triplet_exporter": "rows come from the forest of calls",
}


class LitAgent(Agent, Generic[T]):
    """The class form over tasks of type `T`: define `rollout`, or `training_rollout` and `validation_rollout`, or the
    same with `_async` behind their names. `resources["main_llm"]` has `get_base_url(rollout_id, attempt_id)`.

    Raises AgentSignature for a class that has methods of both kinds.
    """

    def __init__(self, *, trained_agents: str | None = None) -> None:
        if trained_agents is not None:
            raise AgentSignature(
                f"{type(self).__name__} is given trained_agents={trained_agents!r}; who is trained is said by the "
                f"configuration: algorithm.train_agents={trained_agents!r}"
            )

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        plain, async_ = (
            [name for name in names if getattr(cls, name) is not getattr(LitAgent, name)]
            for names in (_METHODS, [f"{name}_async" for name in _METHODS])
        )
        if plain and async_:
            raise AgentSignature(
                f"{cls.__name__} defines {plain[0]} and {async_[0]}: give all its rollout methods `_async`, or none"
            )
        cls._is_async = bool(async_)

    _is_async = False

    @property
    def tracer(self) -> "NoTracer":
        """Calls are recorded where they pass, so there is nothing to attach."""
        return NoTracer()

    async def rollout_async(self, task: T, resources: NamedResources, rollout: Any) -> Any:
        """Run the agent once on `task`, as `rollout` does."""
        raise NotImplementedError(f"{type(self).__name__} defines no rollout_async(task, resources, rollout)")

    async def training_rollout_async(self, task: T, resources: NamedResources, rollout: Any) -> Any:
        """What a rollout of mode `train` runs."""
        return await self.rollout_async(task, resources, rollout)

    async def validation_rollout_async(self, task: T, resources: NamedResources, rollout: Any) -> Any:
        """What a rollout of mode `val` or `test` runs."""
        return await self.rollout_async(task, resources, rollout)

    def training_rollout(self, task: T, resources: NamedResources, rollout: Any) -> Any:
        """See `Agent`."""
        run = self.training_rollout_async if self._is_async else self.rollout
        return run(task, resources, rollout)

    def validation_rollout(self, task: T, resources: NamedResources, rollout: Any) -> Any:
        """See `Agent`."""
        run = self.validation_rollout_async if self._is_async else self.rollout
        return run(task, resources, rollout)


class NoTracer:
    """What agents ask their tracer for: there is none of it."""

    def get_langchain_handler(self) -> None:
        """No callback: a graph's calls are recorded without."""


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raises TypeError for arguments of Agent-lightning's Trainer, saying what to write instead; None is not given."""
    for name, value in given.items():
        if name not in ARGUMENTS:
            raise TypeError(f"Trainer takes no argument {name!r}")
        if value is not None:
            raise TypeError(f"Trainer takes no {name!r}: {ARGUMENTS[name]} (docs/coming-from-agent-lightning.md)")
