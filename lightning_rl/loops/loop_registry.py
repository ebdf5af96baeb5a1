"""The loops of a config: which there are by name, and the agent that runs, for each task, the one that it names.

Invariant: a loop that cannot be made, and a name that there is not, is an error before anything is sampled.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import yaml

from lightning_rl import tutorial
from lightning_rl.agents.agent import Agent
from lightning_rl.agents.task_fields import check_names, name_of, unknown
from lightning_rl.config import ConfigError
from lightning_rl.config.schema import Config, MultiTurn
from lightning_rl.loading import NotLoadable, load
from lightning_rl.loops.agent_loop import AgentLoop, Setting
from lightning_rl.loops.limits import Limits
from lightning_rl.loops.single_turn import SingleTurnAgent
from lightning_rl.loops.tool_agent import ToolAgent
from lightning_rl.loops.user import user_of

_AGENT = "actor_rollout_ref.rollout.agent"
_USER = "actor_rollout_ref.rollout.multi_turn.user"
_BUILT_IN: dict[str, Callable[[], Agent]] = {SingleTurnAgent.name: SingleTurnAgent, ToolAgent.name: ToolAgent}


class NotALoop(NotLoadable):
    """A config names something that is not an agent loop, or does not exist."""


class NamedLoops(msgspec.Struct, frozen=True, kw_only=True):
    """What the config says of agent loops: the name of the default one, the YAML file of one's own, what they get."""

    default: str
    path: str | None
    limits: Limits
    multi_turn: MultiTurn
    tokenizer: str  # the policy's folder or id, for limits in tokens

    def check(self, tasks: Sequence[Any]) -> None:
        """Raises LoopTaskError for a task that asks for a loop that there is not."""
        check_names(tasks, sorted(makers(self.path)), self.default)

    def unused_tools(self, tasks: Iterable[Any]) -> str | None:
        """What to say of tools that are configured where every task's loop is the one of a single answer."""
        turns = self.multi_turn
        idle = [key for key in ("tool_config_path", "function_tool_path") if getattr(turns, key) is not None]
        if not idle or any(name_of(task, self.default) != SingleTurnAgent.name for task in tasks):
            return None
        keys = " and ".join(f"actor_rollout_ref.rollout.multi_turn.{key}" for key in idle)
        return (
            f"{keys}: no task has these tools, every one is run by {SingleTurnAgent.name}, which asks once and offers "
            f"none; set {_AGENT}.default_agent_loop={ToolAgent.name}"
        )

    def rewards_any(self, tasks: Sequence[Any]) -> bool:
        """Whether any of the tasks runs a loop that may give a reward: one of one's own, or that of tools, where there
        are tools, or a user, which may give some."""
        turns, makers_by_name = self.multi_turn, makers(self.path)
        others = [turns.tool_config_path, turns.function_tool_path, turns.user.path]
        silent = {SingleTurnAgent} if any(other is not None for other in others) else {SingleTurnAgent, ToolAgent}
        return any(makers_by_name[name] not in silent for name in {name_of(task, self.default) for task in tasks})


def loops_of(config: Config) -> NamedLoops | None:
    """The loops that a config names; None where it names none. Raises ConfigError for what cannot be."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    agent, turns = rollout.agent, rollout.multi_turn
    if turns.user.model is not None:
        backends = sorted(config.gateway.backends or ())
        if turns.user.path is not None:
            raise ConfigError(f"{_USER}.path and {_USER}.model name two users: leave one out")
        if turns.user.model not in backends:
            raise ConfigError(f"{_USER}.model is {turns.user.model!r}, and gateway.backends has {backends}")
    if agent.default_agent_loop is None and agent.agent_loop_config_path is None:
        return None
    path = agent.agent_loop_config_path
    loops = NamedLoops(
        default=agent.default_agent_loop or SingleTurnAgent.name,
        path=None if path is None else str(Path(path).expanduser().resolve()),
        limits=Limits(
            assistant_turns=turns.max_assistant_turns,
            user_turns=turns.max_user_turns,
            response_length=rollout.response_length,
            row_length=data.max_tokens,
            answer_length=data.max_response_length,
        ),
        multi_turn=turns,
        tokenizer=config.actor_rollout_ref.model.path or str(tutorial.checkpoint()),
    )
    names = sorted(makers(loops.path))
    if loops.default not in names:
        raise ConfigError(f"{_AGENT}.default_agent_loop is {loops.default!r}, and there are {names}")
    return loops


def makers(path: str | None) -> dict[str, Callable[[], Agent]]:
    """What makes the loop of each name: the built-in ones, and over them those of the YAML file at `path`.

    Raises ConfigError for a file that is no list of `name` and `_target_`, NotALoop for a class that is not there.
    """
    if path is None:
        return dict(_BUILT_IN)
    try:
        entries = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{_AGENT}.agent_loop_config_path: {path} cannot be read: {error}") from error
    if not isinstance(entries, list):
        raise ConfigError(f"{_AGENT}.agent_loop_config_path: {path} is no list of loops, each with name and _target_")
    own: dict[str, Callable[[], Agent]] = {}
    for entry in entries:
        name, maker = _maker(entry, path)
        if name in own:
            raise ConfigError(f"{path} has two loops of the name {name!r}")
        own[name] = maker
    return _BUILT_IN | own


def _maker(entry: Any, path: str) -> tuple[str, Callable[[], Agent]]:
    if not isinstance(entry, Mapping) or not all(isinstance(entry.get(key), str) for key in ("name", "_target_")):
        raise ConfigError(f"{path}: {entry!r:.80} is no loop: give it a name and a _target_, its class")
    name, target = entry["name"], entry["_target_"]
    spec = target if ":" in target else ":".join(target.rsplit(".", 1))
    loop_class = load(spec, f"agent loop {name!r} of {path}", error=NotALoop)
    if not isinstance(loop_class, type) or not issubclass(loop_class, Agent):
        raise NotALoop(f"agent loop {name!r} of {path}: {target} is no class of lightning_rl.loops.AgentLoop")
    arguments = {key: value for key, value in entry.items() if key not in ("name", "_target_")}
    maker = partial(loop_class, **arguments)
    try:
        maker()
    except TypeError as error:
        raise NotALoop(f"agent loop {name!r} of {path}: {target} cannot be made of {arguments}: {error}") from error
    return name, maker


def agent_of(loops: NamedLoops) -> "LoopsAgent":
    """The agent of a config's loops. Raises here what every rollout would raise: of loops, tools and the user."""
    makers(loops.path)
    _setting(loops)
    return LoopsAgent(loops)


class LoopsAgent(Agent):
    """Runs each task by the loop that it names. A process makes tools and user once, and a loop for every rollout."""

    def __init__(self, loops: NamedLoops) -> None:
        self.loops = loops
        self._made: tuple[dict[str, Callable[[], Agent]], Setting] | None = None
        self._making = threading.Lock()

    def rollout(self, task: Any, resources: Mapping[str, Any], rollout: Any) -> Any:
        """See `Agent`."""
        return self._loop(task, rollout).rollout(task, resources, rollout)

    def training_rollout(self, task: Any, resources: Mapping[str, Any], rollout: Any) -> Any:
        """See `Agent`."""
        return self._loop(task, rollout).training_rollout(task, resources, rollout)

    def validation_rollout(self, task: Any, resources: Mapping[str, Any], rollout: Any) -> Any:
        """See `Agent`."""
        return self._loop(task, rollout).validation_rollout(task, resources, rollout)

    def __reduce__(self) -> Any:
        return LoopsAgent, (self.loops,)  # tools and loops are made where they run

    def _loop(self, task: Any, rollout: Any) -> Agent:
        makers_by_name, setting = self._parts()
        name = name_of(task, self.loops.default)
        if name not in makers_by_name:
            raise unknown(f"the task of rollout {rollout.rollout_id}", name, sorted(makers_by_name))
        loop = makers_by_name[name]()
        if isinstance(loop, AgentLoop):
            loop.setting = setting
            loop.name = name
        return loop

    def _parts(self) -> tuple[dict[str, Callable[[], Agent]], Setting]:
        with self._making:
            if self._made is None:
                self._made = makers(self.loops.path), _setting(self.loops)
            return self._made


def _setting(loops: NamedLoops) -> Setting:
    from lightning_rl.tools.config import limits_of, load_tools
    from lightning_rl.tools.trajectory import TrajectoryTools

    tools, limits = load_tools(loops.multi_turn), limits_of(loops.multi_turn, loops.tokenizer)

    def opened(selection: Sequence[str] | None, create_kwargs: Mapping[str, Mapping[str, Any]]) -> TrajectoryTools:
        return TrajectoryTools(tools, limits, selection=selection, create_kwargs=create_kwargs)

    return Setting(limits=loops.limits, open_tools=opened if tools else None, user=user_of(loops.multi_turn.user))
