"""The loop of one answer."""

from typing import Any

from lightning_rl.agents.resources import LLM
from lightning_rl.loops.agent_loop import AgentLoop


class SingleTurnAgent(AgentLoop):
    """Asks once. Rewards come from the config, or from a subclass."""

    name = "single_turn_agent"

    async def run(self, task: Any, llm: LLM) -> float | dict[str, float] | None:
        """See `AgentLoop`."""
        async with self.conversation(task, llm) as talk:
            await talk.ask()
        return None
