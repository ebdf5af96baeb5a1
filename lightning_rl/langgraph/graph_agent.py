"""A LangGraph graph as an agent: a task becomes its input, its calls go to the policy, its last state is judged.

The graph is not changed and knows of no training: its model is a `ChatModel()`, or what the caller gives it, as an
argument of the function that builds it or as `config["configurable"]["model"]`.
"""

import asyncio
import inspect
import uuid
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import StateGraph
from langgraph.pregel import Pregel
from langgraph.types import Command

from lightning_rl.agents.agent import Agent
from lightning_rl.agents.resources import LLM
from lightning_rl.agents.values import finite
from lightning_rl.errors import Explained
from lightning_rl.langgraph.chat_model import ChatModel
from lightning_rl.langgraph.endpoint import answering
from lightning_rl.loading import NotLoadable, load

_CONFIG = frozenset(RunnableConfig.__annotations__)
_THREADS = 128  # of an event loop, for nodes that are not async: they wait for answers


class GraphError(Explained, ValueError):
    """A graph cannot be run as an agent."""


class GraphAgent(Agent):
    """Runs a graph once per rollout; see `agent_of`, which makes it."""

    def __init__(
        self,
        graph: Any,
        *,
        config: Mapping[str, Any] | None = None,
        inputs: Callable[[Any], Any] | None = None,
        reward: Callable[[Any, Any], Any] | None = None,
        user: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self.graph = graph
        self.config = dict(config or {})
        self.inputs = inputs or input_of
        self.reward = reward or _reward_in
        self.user = user
        if unknown := sorted(set(self.config) - _CONFIG):
            raise GraphError(f"graph_config has {unknown}; LangGraph's config takes {sorted(_CONFIG)}")

    async def rollout(self, task: Any, resources: Mapping[str, Any], rollout: Any) -> Any:
        """Run the graph on the task; the reward of its last state, or None where others judge it."""
        llm: LLM = resources["main_llm"].resolve(rollout)
        _make_room()
        with answering(llm):
            state = await self.run(task, ChatModel())
            reward = self.reward(task, state)
            return await reward if inspect.isawaitable(reward) else reward

    async def run(self, task: Any, model: Any) -> Any:
        """The graph's last state on the task with `model`; what a checkpointer kept of it is let go."""
        graph = _built(self.graph, model, checkpointed=self.user is not None)
        thread = uuid.uuid4().hex
        # Examples give a thread_id with every checkpointer; by it rollouts would read each other's messages.
        own = {"model": model} | (self.config.get("configurable") or {}) | {"thread_id": thread}
        config: Any = self.config | {"configurable": own}
        context = {"model": model} if "model" in _fields(graph) else None
        try:
            state = await graph.ainvoke(self.inputs(task), config, context=context)
            while waiting := _waiting(state):
                answers = {interrupt.id: await self._answer(interrupt.value, task) for interrupt in waiting}
                state = await graph.ainvoke(Command(resume=answers), config, context=context)
        finally:
            if saver := _saver(graph):
                await saver.adelete_thread(thread)
        return state

    async def _answer(self, question: Any, task: Any) -> Any:
        if self.user is None:
            raise GraphError(
                f"the graph waits for a person, who is asked {question!r}; say who answers: agent_of(..., user=answer)"
            )
        answer = self.user(question, task)
        return await answer if inspect.isawaitable(answer) else answer


def agent_of(
    graph: Any,
    *,
    recursion_limit: int | None = None,
    config: Mapping[str, Any] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    reward: Callable[[Any, Any], Any] | None = None,
    user: Callable[[Any, Any], Any] | None = None,
) -> GraphAgent:
    """A graph as an agent: `lrl.Trainer(agent_of("my_graph.py:graph")).fit(...)`.

    Args:
        graph: a compiled graph, a `StateGraph`, a function that builds one, anew for every rollout, from a model or
            from nothing, or where it is to be found: `module:name`, `path/to/file.py:name`, or `path/to/file.py` alone
            for its `graph`, or its only one.
        recursion_limit: nodes run at most in one rollout; LangGraph's own limit by default.
        config: more of what `graph.invoke` takes as config: `configurable`, `max_concurrency`, `tags`, ...
        inputs: the graph's input for a task; by default see `input_of`.
        reward: the reward for a task and the graph's last state, as an agent returns it; by default the state's
            `reward` where it has one, else None: emitted on the way, or given by a function of the configuration.
        user: the answer to an `interrupt`, given what it asks and the task. A graph that is not compiled yet gets a
            checkpointer for it.

    Raises NotLoadable or GraphError saying what is wrong with `graph` or `config`.
    """
    limit = {} if recursion_limit is None else {"recursion_limit": recursion_limit}
    place = _checked(graph)
    return GraphAgent(place, config=dict(config or {}) | limit, inputs=inputs, reward=reward, user=user)


def input_of(task: Any) -> Any:
    """The input that a task is.

    A text is a user's message; `messages`, or `prompt` as in verl's files, are the conversation so far (a text again a
    user's message), and a mapping's other keys go along; any other mapping is the input as it stands.
    """
    if isinstance(task, str):
        return {"messages": [{"role": "user", "content": task}]}
    if not isinstance(task, Mapping):
        raise GraphError(
            f"a task of type {type(task).__name__} is no graph's input; say what is: agent_of(..., inputs=function)"
        )
    if "messages" not in task and isinstance(prompt := task.get("prompt"), list | str):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return {"messages": messages, **{name: value for name, value in task.items() if name != "prompt"}}
    return dict(task)


def _reward_in(task: Any, state: Any) -> float | None:
    reward = state.get("reward") if isinstance(state, Mapping) else None
    return None if reward is None else finite(reward, "the state's reward")


def _checked(graph: Any) -> Any:
    """`graph`, its file with the whole path, since runners look for it too. Raises what running it would raise."""
    if not isinstance(graph, str):
        _kind(graph)
        return graph
    if graph.endswith(".py"):
        graph = f"{graph}:{_only_graph(graph)}"
    place, _, name = graph.rpartition(":")
    if place.endswith(".py"):
        graph = f"{Path(place).expanduser().resolve()}:{name}"
    _kind(load(graph, "graph"))
    return graph


def _only_graph(file: str) -> str:
    """The name of the graph that a file is for: `graph`, or the only compiled graph or StateGraph in it."""
    if not (path := Path(file).expanduser()).is_file():
        raise NotLoadable(f"graph {file!r}: there is no file {path.resolve()}")
    there: dict[str, Any] = load(f"{file}:__dict__", "graph")
    names = [name for name, value in there.items() if isinstance(value, StateGraph | Pregel)]
    if "graph" in there:
        return "graph"
    if len(names) != 1:
        contents = f"several graphs, {', '.join(names)}" if names else "no graph"
        raise GraphError(f"{file} has no `graph`, and {contents}: name the one that is meant, {file}:NAME")
    return names[0]


def _built(graph: Any, model: Any, *, checkpointed: bool) -> Any:
    """The graph, ready to run."""
    built = load(graph, "graph") if isinstance(graph, str) else graph
    if _kind(built) == "function":
        built = built(model) if inspect.signature(built).parameters else built()
    if _kind(built) == "draft":
        built = built.compile(checkpointer=InMemorySaver() if checkpointed else None)
    if _kind(built) == "function":
        raise GraphError(f"{graph!r} builds a function, not a graph")
    return built


def _kind(graph: Any) -> str:
    if isinstance(graph, StateGraph):
        return "draft"
    if isinstance(graph, Pregel):
        return "compiled"
    if callable(graph):
        return "function"
    raise GraphError(f"{graph!r} is no graph: a compiled one, a StateGraph, or a function that builds one from a model")


def _fields(graph: Any) -> Mapping[str, Any]:
    """The fields of the graph's context."""
    return getattr(graph.context_schema, "__annotations__", {})


def _saver(graph: Any) -> Any:
    """The graph's checkpointer; True and False are words of sub-graphs."""
    return None if isinstance(graph.checkpointer, bool) else graph.checkpointer


def _waiting(state: Any) -> list[Any]:
    return list(state.get("__interrupt__") or ()) if isinstance(state, Mapping) else []


_roomy: "weakref.WeakSet[asyncio.AbstractEventLoop]" = weakref.WeakSet()


def _make_room() -> None:
    """Threads enough for nodes that are not async: an event loop has a few per core, and all rollouts share it."""
    loop = asyncio.get_running_loop()
    if loop not in _roomy:
        _roomy.add(loop)
        loop.set_default_executor(ThreadPoolExecutor(_THREADS, thread_name_prefix="nodes"))
