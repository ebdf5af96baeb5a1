"""The agents that a configuration names, where no function is given: a program, a LangGraph graph, or agent loops."""

from lightning_rl.agents.agent import COMMAND_KEY, GRAPH_KEY, LOOP_KEY, Agent, ConfiguredAgent
from lightning_rl.config.schema import Config
from lightning_rl.loops.loop_registry import agent_of, loops_of


def configured_agents(config: Config) -> list[ConfiguredAgent]:
    """All that the configuration names, made when asked for. Raises ConfigError for loops that cannot be."""
    graph, loops = config.actor_rollout_ref.rollout.multi_turn.langgraph, loops_of(config)
    named = []
    if (command := config.command) is not None:
        named.append(ConfiguredAgent(f"{COMMAND_KEY}={command}", lambda: _command_agent(command, config)))
    if (path := graph.path) is not None:

        def agent_of_graph() -> Agent:
            from lightning_rl.langgraph import graph_agent  # an extra

            return graph_agent.agent_of(path, recursion_limit=graph.graph_config.recursion_limit)

        named.append(ConfiguredAgent(f"{GRAPH_KEY}={path}", agent_of_graph))
    if loops is not None:
        named.append(ConfiguredAgent(f"{LOOP_KEY}={loops.default}", lambda: agent_of(loops)))
    return named


def _command_agent(command: str, config: Config) -> Agent:
    from lightning_rl.command_agent.agent import CommandAgent

    reward = config.reward
    return CommandAgent(
        command,
        reward=reward.command,
        sandbox=config.sandbox,
        judged_elsewhere=reward.custom_reward_function.path is not None
        or reward.judge.model is not None
        or reward.reward_model.enable,
        model_context_window=config.actor_rollout_ref.rollout.max_model_len,
    )
