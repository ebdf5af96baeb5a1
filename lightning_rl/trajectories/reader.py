"""How a configuration has finished rollouts read as trajectories."""

from collections.abc import Callable, Collection
from functools import partial

from lightning_rl.config.schema import Config
from lightning_rl.store.contract import RolloutTrace
from lightning_rl.trajectories.trajectory import Trajectory, trajectory_of
from lightning_rl_adapters.call import Call


def reader(
    config: Config,
    model: str | Collection[str],
    select: Callable[[Call], bool] | None,
    reward: str | None = None,
    *,
    messages: bool = False,
) -> Callable[[RolloutTrace], Trajectory]:
    """What reads a finished rollout as the trajectory of `model`, or of several; `reward` and `messages` as in
    `trajectory_of`."""
    overlong = config.data.overlong
    return partial(
        trajectory_of,
        agent_failure=agent_failure(config),
        max_tokens=None if overlong.startswith("truncate") else config.data.max_tokens,
        model=model,
        select=select,
        spans=config.algorithm.train_spans,
        weights=config.algorithm.credit.weights,
        whole=overlong == "drop_rollout",
        reward=reward,
        messages=messages,
        rewards_count=not config.distillation.without_rewards,
    )


def agent_failure(config: Config) -> float | None:
    """The reward of a rollout whose agent failed; None: it has none."""
    rule = config.algorithm.agent_failure
    return {"zero": 0.0, "exclude": None}[rule] if isinstance(rule, str) else float(rule)
