"""Agent-lightning's names, for agents and scripts of which nothing but the import is changed: its class form, hooks,
decorators, adapters and tracers. Each does here what it does there, or says what to write instead.

What else has two names: `lrl.VERL`, `Trainer(algorithm=...)`, `LLM.endpoint`, `ProxyLLM.get_base_url`, `rollout.input`.
"""

import asyncio
import functools
import inspect
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, cast

from lightning_rl.agents import agent as agents
from lightning_rl.agents.agent import Agent, AgentSignature
from lightning_rl.agents.emit import emit_object, emit_reward, flattened
from lightning_rl.agents.resources import LLM
from lightning_rl.store.contract import Rollout
from lightning_rl_adapters import semconv

if TYPE_CHECKING:
    from lightning_rl.algorithms.base import Algorithm

_log = logging.getLogger(__name__)
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Dataset = Sequence
"""Tasks, which are JSON values."""
AttemptedRollout = Rollout
"""What an agent gets as its `rollout`."""
NamedResources: TypeAlias = Mapping[str, Any]
"""Resources by their names: a `ProxyLLM`, a `PromptTemplate`, or another value."""
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_FLAGS = re.compile(r"\(\?[aiLmsux]+\)")  # of a regular expression: (?i)
_METHODS = ("rollout", "training_rollout", "validation_rollout")

# Arguments of its Trainer, and what does their work here.
ARGUMENTS = {
    "adapter": "rows come from the forest of calls; give {'agent_match': regex}, or lrl.TracerTraceToTriplet(regex)",
    "dev": "Trainer(agent).dev(tasks)",
    "llm_proxy": "the gateway is always there; other models are in gateway.backends",
    "max_rollouts": "a shorter dataset, or trainer.total_training_steps",
    "max_tasks": "a shorter dataset, or trainer.total_training_steps",
    "n_workers": "n_runners",
    "daemon": "runners always end with the trainer",
    "runner": "n_runners says how many there are",
    "strategy": "there is one: a server process and runner processes beside the trainer",
    "triplet_exporter": "rows come from the forest of calls",
}
_OF_ADAPTERS = {
    "exclude_llm_call_in_reward": "calls to the policy are trained, calls to other models (a judge) are not",
    "llm_call_match": "calls to the policy are trained, calls to other models are not",
    "repair_hierarchy": "a call's parent is the one whose tokens it continues",
    "reward_match": "a reward names its call (emit_reward(..., call_id=answer.id)) or belongs to the rollout",
}
_REWARD = "agentlightning.reward"


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
    """A tracer under Agent-lightning's names: there is nothing to attach, for the gateway records the calls."""

    def __init__(self, **settings: Any) -> None:
        """Settings of theirs are taken; none has anything to change."""

    def get_langchain_handler(self) -> None:
        """No callback: a graph's calls are recorded without."""

    def get_last_trace(self) -> list[Any]:
        """The spans that the agent of this attempt emitted; its calls are recorded at the gateway."""
        from lightning_rl.agents.emitted import running

        emitted = running()
        return [] if emitted is None else list(emitted.spans)


class TripletAdapter:
    """An adapter under Agent-lightning's names. Rows come from the forest of calls; `agent_match`, a regular expression
    that is looked for in agents' names, says whose are trained.

    Raises TypeError for another setting of theirs.
    """

    def __init__(self, agent_match: str | None = None, **others: Any) -> None:
        for name, value in others.items():
            if value not in (None, True) or name not in _OF_ADAPTERS:
                raise TypeError(
                    f"an adapter takes no {name}={value!r}: {_OF_ADAPTERS.get(name, 'it has agent_match alone')}"
                )
        self.agent_match = agent_match


def agent_match_of(adapter: Any) -> str | None:
    """`algorithm.train_agents` for a Trainer's `adapter`: None, a TripletAdapter or a dict.

    Agent-lightning looks for its expression anywhere in a name; ours is for whole names. Raises TypeError for any
    other adapter.
    """
    if isinstance(adapter, Mapping):
        adapter = TripletAdapter(**adapter)
    if adapter is None or isinstance(adapter, TripletAdapter):
        match = None if adapter is None else adapter.agent_match
        if match is None:
            return None
        flags = _FLAGS.match(match)  # which stand at the very beginning of an expression alone
        beginning = "" if flags is None else flags[0]
        return f"{beginning}.*(?:{match[len(beginning) :]}).*"
    raise TypeError(f"Trainer takes no adapter {adapter!r:.80}: {ARGUMENTS['adapter']}")


def check_parts(algorithm: "Algorithm", adapter: Any, initial_resources: Mapping[str, Any] | None) -> None:
    """Raises TypeError for what a Trainer was given, and its algorithm cannot take."""
    if algorithm.takes_parts:
        return
    if initial_resources is not None:
        raise TypeError(
            f"{type(algorithm).__name__} takes no initial_resources, it publishes main_llm itself: leave them out; "
            "other models are in gateway.backends (docs/helpers.md), prompts are for lrl.PromptOptimization, or an "
            "algorithm of yours (lrl.algo)"
        )
    agent_match_of(adapter)


def give_parts(algorithm: "Algorithm", adapter: Any, initial_resources: Mapping[str, Any] | None) -> None:
    """Give an algorithm what a Trainer was given for it. Raises TypeError for what it cannot take."""
    check_parts(algorithm, adapter, initial_resources)
    if algorithm.takes_parts:
        algorithm.adapter, algorithm.initial_resources = adapter, initial_resources
    elif (match := agent_match_of(adapter)) is not None:
        algorithm.train_only(match)


def service_of(resources: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The model, base URL and key of `main_llm`, for `Trainer.dev`; what its `arguments` say wins.

    Raises TypeError for other resources.
    """
    llm = resources.get("main_llm")
    if len(resources) != 1 or not isinstance(llm, LLM):
        raise TypeError(
            f"dev takes initial_resources of one LLM, {{'main_llm': lrl.LLM(...)}}; there are {list(resources)}"
        )
    named = {"model": llm.model, "base_url": llm.base_url, "api_key": llm.api_key or None}
    return {name: arguments[name] if arguments[name] is not None else value for name, value in named.items()}


class Hook:
    """What runs around each attempt, in its runner: override some of the methods.

    `spans` are those that the agent emitted; its calls are recorded at the gateway. `runner` is None. What a hook
    raises is logged, and the rollout goes on.
    """

    async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: Any) -> None:
        """Before the attempt."""

    async def on_trace_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        """Before the attempt, after `on_rollout_start`."""

    async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        """After the attempt."""

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Sequence[Any]) -> None:
        """After the attempt and `on_trace_end`."""


class HookedAgent(Agent):
    """An agent with hooks around each of its attempts."""

    def __init__(self, agent: Agent, hooks: Sequence[Hook]) -> None:
        self._agent = agent
        self._hooks = hooks
        self.starts_processes = agent.starts_processes

    def training_rollout(self, task: Any, resources: Mapping[str, Any], rollout: Any) -> Any:
        """See `Agent`."""
        return self._between_hooks(self._agent.training_rollout, task, resources, rollout)

    def validation_rollout(self, task: Any, resources: Mapping[str, Any], rollout: Any) -> Any:
        """See `Agent`."""
        return self._between_hooks(self._agent.validation_rollout, task, resources, rollout)

    def _between_hooks(self, run: Any, task: Any, resources: Any, rollout: Any) -> Any:
        asyncio.run(self._start(rollout))  # attempts begin in threads of their own, in which no loop runs
        try:
            returned = run(task, resources, rollout)
        except BaseException:
            asyncio.run(self._end(rollout))
            raise
        if inspect.isawaitable(returned):
            return self._awaited(returned, rollout)
        asyncio.run(self._end(rollout))
        return returned

    async def _awaited(self, returned: Awaitable[Any], rollout: Any) -> Any:
        try:
            return await returned
        finally:
            await self._end(rollout)

    async def _start(self, rollout: Any) -> None:
        for hook in self._hooks:
            await _logged(hook.on_rollout_start, agent=self._agent, runner=None, rollout=rollout)
            await _logged(hook.on_trace_start, agent=self._agent, runner=None, tracer=NoTracer(), rollout=rollout)

    async def _end(self, rollout: Any) -> None:
        tracer = NoTracer()
        spans = tracer.get_last_trace()
        for hook in self._hooks:
            await _logged(hook.on_trace_end, agent=self._agent, runner=None, tracer=tracer, rollout=rollout)
            await _logged(hook.on_rollout_end, agent=self._agent, runner=None, rollout=rollout, spans=spans)


async def _logged(hook: Callable[..., Any], **arguments: Any) -> None:
    try:
        returned = hook(**arguments)
        if inspect.isawaitable(returned):
            await returned
    except Exception:  # noqa: BLE001  # of a hook, which the rollout does not depend on
        _log.exception("a hook failed; the rollout goes on")


def hooked(agent: Agent, hooks: Hook | Sequence[Hook] | None) -> Agent:
    """The agent with the hooks of a Trainer around it. Raises TypeError for what is no Hook."""
    all_hooks = [hooks] if isinstance(hooks, Hook) else list(hooks or ())
    for hook in all_hooks:
        if not isinstance(hook, Hook):
            raise TypeError(f"hooks are of the class lrl.Hook, got {hook!r:.80}")
    return HookedAgent(agent, all_hooks) if all_hooks else agent


def llm_rollout(function: Callable[..., Any] | None = None, *, strip_proxy: bool = True) -> Any:
    """`rollout` for a function of a task and an LLM, with or without parentheses."""
    if not strip_proxy:
        raise AgentSignature(
            "llm_rollout(strip_proxy=False): a function is given a plain LLM; a class agent has the ProxyLLM"
        )
    return agents.rollout if function is None else agents.rollout(function)


def prompt_rollout(function: Callable[..., Any]) -> Any:
    """`rollout` for a function of a task and a prompt: its `prompt_template`, or a parameter annotated
    `PromptTemplate`. Raises AgentSignature where it has neither."""
    agent = agents.rollout(function)
    if not agent.takes_prompt:
        raise AgentSignature(
            f"{agents.called(function)} takes no prompt: name a parameter prompt_template, or annotate one "
            "PromptTemplate"
        )
    return agent


def reward(function: F) -> F:
    """A function whose result is emitted as the reward."""

    @functools.wraps(function)
    def emitting(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        emit_reward(value)
        return value

    @functools.wraps(function)
    async def awaiting(*args: Any, **kwargs: Any) -> Any:
        value = await function(*args, **kwargs)
        emit_reward(value)
        return value

    return cast(F, awaiting if inspect.iscoroutinefunction(function) else emitting)


def emit_annotation(annotation: Mapping[str, Any]) -> None:
    """Record key-value pairs, as `emit_object` does. Raises ValueError for a reward among them: use `emit_reward`."""
    if any(str(name).startswith(_REWARD) for name in annotation):
        raise ValueError(f"emit_annotation: {_REWARD} is a reward; use emit_reward")
    emit_object(flattened(annotation))


def make_link_attributes(links: Mapping[str, str]) -> dict[str, Any]:
    """Attributes that link a reward to what has these values: `{"gen_ai.response.id": answer.id}` is a call."""
    matches = [{"key_match": key, "value_match": value} for key, value in links.items()]
    return dict(flattened({semconv.LINK: matches}))


def make_tag_attributes(tags: Sequence[str]) -> dict[str, Any]:
    """Attributes that tag a reward."""
    return dict(flattened({semconv.TAG: list(tags)}))


def setup_logging(
    level: int | str = "INFO", *, apply_to: Sequence[str] | None = None, files: str | Path | None = None
) -> None:
    """Log to stderr, and to a file, at this level: what this library says, and the loggers that `apply_to` names.

    Raises TypeError for `files` of several loggers: there is one.
    """
    if not isinstance(files, str | Path | None):
        raise TypeError(f"setup_logging takes one file for all that is logged, not files={files!r:.80}")
    logging.basicConfig(format=_LOG_FORMAT)
    names = [
        "lightning_rl",
        "lightning_rl_proxy",
        *(name.replace("agentlightning", "lightning_rl") for name in apply_to or ()),
    ]
    for name in names:
        logging.getLogger(name).setLevel(level)
    if files is None:
        return
    root, path = logging.getLogger(), os.path.abspath(files)
    if any(isinstance(each, logging.FileHandler) and each.baseFilename == path for each in root.handlers):
        return
    written = logging.FileHandler(path)  # beside what the root logger has been told, by us or by others before
    written.setFormatter(logging.Formatter(_LOG_FORMAT))
    root.addHandler(written)


def configure_logger(level: int | str = "INFO", name: str = "lightning_rl") -> logging.Logger:
    """`setup_logging`, and the logger of that name."""
    setup_logging(level, apply_to=[name])
    return logging.getLogger(name.replace("agentlightning", "lightning_rl"))


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises TypeError for arguments of Agent-lightning's Trainer, saying what to write instead; None is not given."""
    for name, value in arguments.items():
        if name not in ARGUMENTS:
            raise TypeError(f"Trainer takes no argument {name!r}")
        if value is not None:
            raise TypeError(f"Trainer takes no {name!r}: {ARGUMENTS[name]} (docs/coming-from-agent-lightning.md)")


OtelTracer = NoTracer
"""Has nothing to do: the gateway records the calls."""
AgentOpsTracer = NoTracer
"""As `OtelTracer`."""
WeaveTracer = NoTracer
"""As `OtelTracer`."""
DummyTracer = NoTracer
"""As `OtelTracer`."""
TracerTraceToTriplet = TripletAdapter
"""For a Trainer's `adapter`; `agent_match`, a regular expression over agents' names, says whose calls are trained."""
LlmProxyTraceToTriplet = TripletAdapter
"""As `TracerTraceToTriplet`."""
