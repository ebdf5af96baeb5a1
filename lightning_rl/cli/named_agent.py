"""The agent that a command's keys name."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_rl.config.schema import TrainConfig


def agent_of(settings: "TrainConfig", server: Sequence[str] | None) -> Any:
    """The agent that is named; None where the runners of `server` have it, or loops of the configuration run.

    Raises ConfigError where there is none, or one too many.
    """
    from lightning_rl.agents.agent import agent_of_run, load_agent
    from lightning_rl.config import ConfigError
    from lightning_rl.loops.configured import configured_agents

    if settings.reward.command is not None and settings.command is None:
        raise ConfigError(
            "reward.command judges what the program of `command` did: name it, command='claude -p {prompt}'"
        )
    agent = None if settings.agent is None else load_agent(settings.agent)
    if server is None:
        agent_of_run(agent, configured_agents(settings))  # raises before anything is begun
        return agent
    if wrong := [url for url in server if not url.startswith(("http://", "https://"))]:
        raise ConfigError(f"--server {wrong[0]} is no URL; give http://... or https://...")
    at = ", ".join(server)
    if agent is not None:
        raise ConfigError(f"the runners of {at} have the agent: leave agent={settings.agent} out")
    if settings.command is not None:
        raise ConfigError(
            f"the runners of {at} have the agent: leave command={settings.command} out, and name a CommandAgent to "
            "them: lightning-rl runner --agent my_agent.py:agent (docs/command-agents.md)"
        )
    return agent
