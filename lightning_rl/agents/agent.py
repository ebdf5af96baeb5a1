"""Agents: an ordinary function or a class, and how one of them is run on a claimed rollout.

The function is not changed: `@rollout` only reads its signature, and the decorated object is still called as before.
"""

import asyncio
import functools
import importlib
import inspect
import re
import reprlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from lightning_rl.agents.emit import generates
from lightning_rl.agents.resources import LLM, PromptTemplate, ProxyLLM
from lightning_rl.agents.values import finite
from lightning_rl.errors import Explained
from lightning_rl.loading import NotLoadable, load
from lightning_rl_adapters.text import encodable

if TYPE_CHECKING:
    from lightning_rl.agents.emitted import Emitted
    from lightning_rl.store.contract import Claim


GRAPH_KEY = "actor_rollout_ref.rollout.multi_turn.langgraph.path"
COMMAND_KEY = "command"
LOOP_KEY = "actor_rollout_ref.rollout.agent.default_agent_loop"
_PROMPT = "prompt_template"
_NUMBERS = {2: "two", 3: "three", 4: "four"}


class AgentSignature(Explained, TypeError):
    """An agent's function cannot be called with what there is."""


class AgentNotFound(NotLoadable):
    """The agent that a command or a configuration names is not there, or there are two."""


class Agent:
    """The class form: subclass it and define `rollout`; the two others default to it.

    Each may be async. `resources["main_llm"]` is a `ProxyLLM`, to be resolved by hand: `.resolve(rollout)`.
    """

    starts_processes = False  # whether each rollout starts programs: fewer run at once where no number is given

    def rollout(self, task: Any, resources: Mapping[str, Any], rollout: Any) -> Any:
        """Run the agent once on `task`; returns a reward, a dict of rewards, or None when it emitted one."""
        raise NotImplementedError(f"{type(self).__name__} defines no rollout(task, resources, rollout)")

    def training_rollout(self, task: Any, resources: Mapping[str, Any], rollout: Any) -> Any:
        """What a rollout of mode `train` runs."""
        return self.rollout(task, resources, rollout)

    def validation_rollout(self, task: Any, resources: Mapping[str, Any], rollout: Any) -> Any:
        """What a rollout of mode `val` or `test` runs."""
        return self.rollout(task, resources, rollout)


class FunctionAgent(Agent):
    """A function as an agent: arguments are injected by name, and calling it calls the function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        # Of what is no function, such as an object that is called, the attributes are no wrapper's.
        functools.update_wrapper(self, function, updated=("__dict__",) if inspect.isroutine(function) else ())
        self.function = function
        self._injected = _injected_parameters(function)
        self._optional = {
            name
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.default is not parameter.empty
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @property
    def takes_prompt(self) -> bool:
        """Whether a parameter takes a `PromptTemplate`."""
        parameters = inspect.signature(self.function).parameters
        return any(name == _PROMPT or _asks_for(parameters[name].annotation, PromptTemplate) for name in self._injected)

    @property
    def named_models(self) -> list[str]:
        """The parameters beside `llm` that must be given an `LLM`: their names are those of models."""
        parameters = inspect.signature(self.function).parameters
        names = (name for name in self._injected if name != "llm" and _asks_for(parameters[name].annotation, LLM))
        return [name for name in names if name not in self._optional]

    def check_resources(self, available: Collection[str]) -> None:
        """Raises AgentSignature for a parameter that takes a resource which the run does not publish."""
        for name, resource in self._injected.items():
            if name not in ("resources", "rollout", *self._optional) and resource not in available:
                raise AgentSignature(
                    f"{called(self.function)}: nothing fills parameter {name!r}; this run publishes "
                    f"{sorted(available)}: name one in gateway.backends.{name} (frozen) or policies.{name} (trained), "
                    "or give the parameter a default (prompts are published by their names by lrl.PromptOptimization, "
                    "or an algorithm of your own: lrl.algo)"
                )

    def rollout(self, task: Any, resources: Mapping[str, Any], rollout: Any) -> Any:
        """Call the function with the task and the resources that its signature names."""
        arguments: dict[str, Any] = {}
        for name, resource in self._injected.items():
            if name == "resources":
                arguments[name] = resources
            elif name == "rollout":
                arguments[name] = rollout
            elif resource in resources or name not in self._optional:
                arguments[name] = _resolved(resources, resource, rollout)
        return self.function(task, **arguments)

    def __reduce__(self) -> Any:
        # By reference where the child can import it, so that module state (an open client, say) is not copied.
        module, name = (getattr(self.function, of, None) for of in ("__module__", "__qualname__"))
        if module not in (None, "__main__") and name is not None and _lookup(module, name) is self:
            return _lookup, (module, name)
        return FunctionAgent, (self.function,)


def rollout(function: Callable[..., Any]) -> FunctionAgent:
    """Make a function trainable: `def agent(task, llm) -> float`, sync or async.

    The first parameter is the task; `llm` is `main_llm`; any other parameter annotated `LLM` takes the resource of its
    own name, such as a model of `gateway.backends`, else its default; so does `prompt_template`, or one annotated
    `PromptTemplate`, with a prompt; `resources` and `rollout` give all. Raises AgentSignature naming a parameter that
    nothing can fill.
    """
    return FunctionAgent(function)


def as_agent(candidate: Any) -> Agent:
    """`candidate` as an Agent: an instance, an Agent class, or a plain function.

    Raises AgentSignature for a class whose constructor needs arguments, and what making an object of it raises.
    """
    if isinstance(candidate, Agent):
        for method in (candidate.training_rollout, candidate.validation_rollout, candidate.rollout):
            _refuse_generator(method)
        return candidate
    if isinstance(candidate, type) and issubclass(candidate, Agent):
        try:
            inspect.signature(candidate, follow_wrapped=False).bind()
        except ValueError:  # nobody can tell what it needs
            pass
        except TypeError as error:
            raise AgentSignature(
                f"{called(candidate)} is a class that cannot be made without arguments ({error}): give an object of it"
            ) from None
        return as_agent(candidate())
    if callable(candidate):
        return FunctionAgent(candidate)
    raise TypeError(f"an agent is a function, an Agent or an Agent class, got {reprlib.repr(candidate)}")


class ConfiguredAgent(NamedTuple):
    """An agent that a configuration names: `named_by` is the key with its value, `make` what makes the agent."""

    named_by: str
    make: Callable[[], Agent]


def agent_of_run(agent: Agent | None, configured: Sequence[ConfiguredAgent] = ()) -> Agent:
    """The agent of a run: the one that is given, or the one that its configuration names.

    Raises AgentNotFound where there is none or more than one, and what making a configured one raises.
    """
    named = [] if agent is None else [f"the agent {getattr(agent, '__name__', type(agent).__name__)}"]
    named += [one.named_by for one in configured]
    if not named:
        raise AgentNotFound(
            "name the agent: lightning-rl train agent=module:function, lrl.Trainer(agent), a program: "
            f"{COMMAND_KEY}='claude -p {{prompt}}', a graph: {GRAPH_KEY}=my_graph.py:graph, or a loop: "
            f"{LOOP_KEY}=tool_agent"
        )
    if len(named) > 1:
        raise AgentNotFound(f"{' and '.join(named)} name {_NUMBERS[len(named)]} agents: leave one out")
    return agent if agent is not None else configured[0].make()


def load_agent(spec: str) -> Agent:
    """The agent at `module:name` or `path/to/file.py:name`; modules are looked for in the current folder too.

    Raises AgentNotFound saying what is wrong with `spec`: its form, the file, the module, what the module raises when
    it is imported, the name, or what it names.
    """
    named = load(spec, "agent", error=AgentNotFound)
    try:
        return as_agent(named)
    except TypeError as error:
        raise AgentNotFound(f"agent {spec!r}: {error}") from error


def run_agent(
    agent: Agent,
    claim: "Claim",
    await_result: Callable[[Awaitable[Any]], Any] = lambda awaitable: asyncio.run(_wait(awaitable)),
    *,
    emitted: "Emitted | None" = None,
) -> dict[str, float] | None:
    """Run the agent on a claimed rollout; the rewards by name, or None where there was none.

    A returned reward is the final one. `emitted` takes what the agent emits; rewards of calls and spans are there
    alone. Raises what the agent raises, and ValueError naming the rollout for a reward that is no finite number or for
    two different final ones.
    """
    from lightning_rl.agents.emitted import (
        Emitted,  # brings OpenTelemetry, which what only names an agent has no use for
    )

    rollout = claim.rollout
    emitted = emitted or Emitted(rollout.rollout_id, claim.attempt.attempt_id)
    with emitted.collecting():
        returned = call_agent(agent, claim)
        if inspect.isawaitable(returned):
            returned = await_result(returned)
    return rewards_of(returned, emitted, rollout.rollout_id)


def call_agent(agent: Agent, claim: "Claim") -> Any:
    """What the agent returns on a claimed rollout; of an async one an awaitable. Raises what it raises."""
    rollout = claim.attempted()
    run = agent.training_rollout if rollout.mode == "train" else agent.validation_rollout
    resources = {name: _resource(value) for name, value in claim.resources.items()}
    return run(rollout.task, resources, rollout)


def rewards_of(returned: Any, emitted: "Emitted", rollout_id: str) -> dict[str, float] | None:
    """The rewards by name of an agent that emitted and returned this, or None; raises ValueError as `run_agent`."""
    rewards = dict(emitted.rewards)
    for name, value in _returned_rewards(returned, rollout_id).items():
        if name == "reward" and rewards.get(name, value) != value:
            raise ValueError(
                f"rollout {rollout_id} has two final rewards: emitted {rewards[name]}, "
                f"returned {value}; return None or emit under another name"
            )
        rewards[name] = value
    return rewards or None


def _returned_rewards(returned: Any, rollout_id: str) -> dict[str, float]:
    if returned is None:
        return {}
    where = f"rollout {rollout_id}"
    if isinstance(returned, Mapping):
        if "reward" not in returned:
            raise ValueError(f"{where} returned rewards {sorted(returned)} without one named 'reward'")
        return {encodable(str(k)): finite(v, f"{where}, reward {k!r}") for k, v in returned.items()}
    return {"reward": finite(returned, where)}


async def _wait(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _resource(value: Mapping[str, Any]) -> Any:
    if value.get("type") == "prompt_template":
        return PromptTemplate(value["template"], value.get("engine", "f-string"))
    if value.get("type") != "llm":
        return value
    llm = LLM(
        model=value["model"],
        base_url=value["base_url"],
        anthropic_base_url=value["anthropic_base_url"],
        api_key=value["api_key"],
        sampling_parameters=value.get("sampling_parameters", {}),
    )
    return ProxyLLM(model=llm.model, sampling_parameters=llm.sampling_parameters, claimed=llm)


def _resolved(resources: Mapping[str, Any], name: str, rollout: Any) -> Any:
    if name not in resources:
        raise KeyError(f"the agent asks for resource {name!r}; there are {sorted(resources)}")
    resource = resources[name]
    return resource.resolve(rollout) if isinstance(resource, ProxyLLM) else resource


def _injected_parameters(function: Callable[..., Any]) -> dict[str, str]:
    """Parameter name -> resource name, for every parameter after the task."""
    if isinstance(function, type):
        raise AgentSignature(
            f"{called(function)} is a class: give an object of it, which is called with a task, or let it subclass "
            "lrl.Agent"
        )
    _refuse_generator(function)
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters or parameters[0].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
        raise AgentSignature(f"{called(function)} takes no task: its first parameter is the task, given by position")
    injected: dict[str, str] = {}
    for parameter in parameters[1:]:
        if parameter.name == "llm":
            injected["llm"] = "main_llm"
        elif parameter.name in ("resources", "rollout", _PROMPT) or _is_resource(parameter.annotation):
            injected[parameter.name] = parameter.name
        elif parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        ):
            raise AgentSignature(
                f"{called(function)}: nothing fills parameter {parameter.name!r}; name it 'llm', 'resources', "
                f"'rollout' or '{_PROMPT}', annotate it LLM or PromptTemplate, or give it a default"
            )
    return injected


def _refuse_generator(function: Callable[..., Any]) -> None:
    if generates(function) or generates(_call(function)):
        raise AgentSignature(
            f"{called(function)} yields: an agent returns its reward, and gives others on its way (lrl.emit_reward)"
        )


def _call(function: Callable[..., Any]) -> Any:
    """What calling an object runs."""
    return getattr(type(function), "__call__", None)  # noqa: B004 - it is looked at, and not asked for


def called(function: Callable[..., Any]) -> str:
    """As an error names it; a `functools.partial` and an object that is called have no name of their own."""
    return getattr(function, "__qualname__", None) or f"{function!r:.80}"


def _is_resource(annotation: Any) -> bool:
    return any(_asks_for(annotation, kind) for kind in (LLM, PromptTemplate))


def _asks_for(annotation: Any, kind: type) -> bool:
    if isinstance(annotation, str):  # `from __future__ import annotations`
        plain = re.sub(r"^(?:\w+\.)*(?:Optional|Annotated|Union)\[(.*)\]$", r"\1", annotation.strip())
        return any(one.strip().rsplit(".", 1)[-1] == kind.__name__ for one in re.split("[|,]", plain))
    return annotation is kind or kind in get_args(annotation)


def _lookup(module: str, qualname: str) -> Any:
    value: Any = importlib.import_module(module)
    for part in qualname.split("."):
        value = getattr(value, part, None)
    return value
