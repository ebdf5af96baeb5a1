"""The base of agent loops: an agent with the limits, the tools and the user of the run at hand.

Invariant: an object runs one trajectory; what it keeps on itself is of that one alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_rl.agents.agent import Agent
from lightning_rl.agents.resources import LLM
from lightning_rl.agents.task_fields import shown_messages_of
from lightning_rl.loops.conversation import Conversation
from lightning_rl.loops.limits import Limits

if TYPE_CHECKING:
    from lightning_rl.loops.user import User
    from lightning_rl.tools.trajectory import TrajectoryTools

    OpenTools = Callable[[Sequence[str] | None, Mapping[str, Mapping[str, Any]]], TrajectoryTools]


@dataclass(frozen=True)
class Setting:
    """What the run gives every loop. `open_tools` opens the tools of one trajectory: given which of them the task
    selects (None: all) and what each is created with, it makes a `TrajectoryTools`; None: there are none."""

    limits: Limits = field(default_factory=Limits)
    open_tools: "OpenTools | None" = None
    user: "User | None" = None


class AgentLoop(Agent):
    """Subclass it and define `run`; name it in `agent_loop_config_path`, or give it to a Trainer.

    The config's `_target_` is made anew for every rollout, with the YAML entry's other keys as its arguments; its
    `setting` is set before `run`.
    """

    setting = Setting()
    name = ""  # under which a config knows it; else the class's

    async def run(self, task: Any, llm: LLM) -> float | dict[str, float] | None:
        """One trajectory on `task` with the policy behind `llm`; returns a reward as any agent, or None where others
        judge it."""
        raise NotImplementedError(f"{type(self).__name__} defines no async run(task, llm)")

    async def rollout(self, task: Any, resources: Mapping[str, Any], rollout: Any) -> Any:
        """See `Agent`."""
        return await self.run(task, resources["main_llm"].resolve(rollout))

    def conversation(
        self, task: Any, llm: LLM, messages: Sequence[Mapping[str, Any]] | None = None, *, limits: Limits | None = None
    ) -> Conversation:
        """A conversation within the limits, to be entered by `async with`; it begins with `messages`, by default the
        task's."""
        begin = shown_messages_of(task) if messages is None else messages
        return Conversation(llm, begin, limits or self.setting.limits, loop=self.name or type(self).__name__)
