"""The public names of verl's agent framework and gateway (PR 6299, and uni-agent where it went on).

Those that are here, and what to write in the place of the others: the end of the AttributeError's message.
"""

HERE = {
    "AgentFramework": ("lightning_rl.compat.sessions", "AgentFramework"),
    "OpenAICompatibleAgentFramework": ("lightning_rl.compat.sessions", "AgentFramework"),
    "SessionHandle": ("lightning_rl.compat.sessions", "Session"),
    "Trajectory": ("lightning_rl.trajectories.trajectory", "Trajectory"),
}
"""Name -> the module and the name of what it is here."""

_GATEWAY = "lightning-rl serve, whose URL AgentFramework(url, admin_key, runners) takes"
_SESSION = "AgentFramework.create_session(task), whose session has base_url and api_key"
_REWARD = "return a reward from the runner, or finalize_session(session, reward)"
_BATCH = "await AgentFramework.generate_sequences(tasks, n), whose batch has sessions, rows and stats"

INSTEAD = {
    "SessionRuntime": _GATEWAY,
    "GatewayServingRuntime": _GATEWAY,
    "GatewayActor": _GATEWAY,
    "GatewayActorConfig": "the options of lightning-rl serve",
    "GatewayManager": "several lightning-rl serve on one PostgreSQL store, which share their sessions by load",
    "GatewaySession": _SESSION,
    "MessageCodec": "actor_rollout_ref.rollout.renderer, or lightning-rl serve --renderer",
    "TrajectoryAssembler": _BATCH,
    "AgentFrameworkRolloutAdapter": "lrl.Trainer(agent).fit(lrl.PPO(config), tasks), which needs no adapter",
    "build_agent_framework": "AgentFramework(url, admin_key, runners)",
    "CliAgentFramework": "a runner that starts the program with os.environ | llm.env()",
    "RewardFn": _REWARD,
    "SessionRewardContext": _REWARD,
    "RewardLoopWorker": "a reward function: reward.custom_reward_function, or lrl.PPO(config, reward=function)",
    "LLMServerClient": "the gateway's base_url, or /v1/completions with token ids as its prompt",
    "ChatCompletionRequest": "openai's SDK at the session's base_url",
    "ChatCompletionResponse": "openai's SDK at the session's base_url",
}

METHODS_INSTEAD = {
    "complete_session": _REWARD,
    "wait_for_completion": "a session ends when its runner returns, or by finalize_session",
    "finalize_sessions": "finalize_session of each",
    "run_session": _BATCH,
}
"""What to write for methods of theirs that `AgentFramework` does not have."""
