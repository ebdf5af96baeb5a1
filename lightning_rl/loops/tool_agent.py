"""The loop of tools: the policy is asked, the tools that it calls are run, until it calls none.

Invariant: every tool call of an answer has its result in the next prompt, in the order of the calls; tool calls of an
answer that ends the trajectory are not run, and what ended it says so.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from lightning_rl.agents.emit import emit_object, emit_reward
from lightning_rl.agents.resources import LLM
from lightning_rl.agents.task_fields import tools_of
from lightning_rl.loops.agent_loop import AgentLoop
from lightning_rl.loops.conversation import Answer, Conversation
from lightning_rl.trajectories import termination

if TYPE_CHECKING:
    from lightning_rl.tools.trajectory import ToolResult, TrajectoryTools


class ToolAgent(AgentLoop):
    """Many turns with the run's tools, and with its user where it has one.

    What a tool gives as reward is the reward of the call that asked for it, under the tool's name; its metrics, and
    what went wrong with it, are recorded as an object. The final reward comes from the config, or from a subclass
    (`reward`); without any the rewards of the calls add up.
    """

    name = "tool_agent"

    async def run(self, task: Any, llm: LLM) -> float | dict[str, float] | None:
        """See `AgentLoop`."""
        async with AsyncExitStack() as parts:
            talk = await parts.enter_async_context(self.conversation(task, llm))
            open_tools = self.setting.open_tools
            tools = None if open_tools is None else await parts.enter_async_context(open_tools(*tools_of(task)))
            await self._talk(task, talk, tools)
            return await self.reward(task, talk)

    async def reward(self, task: Any, talk: Conversation) -> float | dict[str, float] | None:
        """The reward of the conversation, which has ended; None where others give it."""
        return None

    async def _talk(self, task: Any, talk: Conversation, tools: "TrajectoryTools | None") -> None:
        request = {"tools": tools.schemas} if tools is not None and tools.schemas else {}
        while (answer := await talk.ask(**request)) is not None and talk.ended_by is None:
            if not self._goes_on(answer, talk):
                return
            if answer.tool_calls and tools is not None:
                talk.add(_as_messages(await _run(answer, talk, tools)))
            else:
                await self._listen(task, talk)

    def _goes_on(self, answer: Answer, talk: Conversation) -> bool:
        """Whether somebody is to speak after this answer; says what ended the conversation where nobody is."""
        user = self.setting.user
        calls_tools = bool(answer.tool_calls) and self.setting.open_tools is not None
        if not calls_tools and user is None:
            talk.ended_by = termination.ANSWER
        elif talk.assistant_turns == talk.limits.assistant_turns:
            talk.ended_by = termination.ASSISTANT_TURNS
        elif not calls_tools and talk.user_turns == talk.limits.user_turns:
            talk.ended_by = termination.USER_TURNS
        return talk.ended_by is None

    async def _listen(self, task: Any, talk: Conversation) -> None:
        """The user's turn."""
        assert self.setting.user is not None
        text = await self.setting.user(task, talk.messages, talk.llm)
        if text is None:
            talk.ended_by = termination.USER_DONE
        else:
            talk.add_user(text)


async def _run(answer: Answer, talk: Conversation, tools: "TrajectoryTools") -> "list[ToolResult]":
    """Run the tools that the answer calls; their rewards and metrics are recorded for it."""
    from lightning_rl.tools.trajectory import ToolCall

    results = await tools.run([ToolCall(**call) for call in answer.tool_calls])
    errors = Counter(talk.told.get("tool_errors", {}))
    for result in results:
        emit_reward(result.reward, name=result.name or "tool", call_id=answer.call_id)
        emit_object(
            {
                "tool": result.name,
                "tool_call_id": result.call_id,
                "call_id": answer.call_id,
                "reward": result.reward,
                "error": result.error,
                "metrics": result.metrics,
            }
        )
        if result.error is not None:
            errors[result.error] += 1
    talk.told["tool_calls"] = talk.told.get("tool_calls", 0) + len(results)
    talk.told["tool_errors"] = dict(errors)
    return results


def _as_messages(results: "Sequence[ToolResult]") -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": result.call_id, "content": result.content} for result in results]
