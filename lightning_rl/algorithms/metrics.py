"""A step's rollouts as numbers, under verl's names where verl has them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

import numpy as np

from lightning_rl.algorithms.trajectories import Trajectory


def rollout_metrics(trajectories: list[Trajectory], timing: Mapping[str, float]) -> dict[str, float]:
    """Rewards, lengths, failures and speeds of the rollouts that `timing["gen"]` seconds were spent on."""
    rewards = [t.reward for t in trajectories if t.reward is not None] or [0.0]
    rows = [row for t in trajectories for row in t.rows]
    calls = sum(t.calls for t in trajectories)
    return {
        "critic/rewards/mean": float(np.mean(rewards)),
        "critic/rewards/max": float(np.max(rewards)),
        "critic/rewards/min": float(np.min(rewards)),
        "num_turns/mean": calls / max(len(trajectories), 1),
        "response_length/mean": float(np.mean([t.sampled_tokens for t in trajectories])),
        "row_length/mean": float(np.mean([len(row.token_ids) for row in rows] or [0])),
        "rollouts/rows": float(len(rows)),
        "rollouts/agent_failed": float(sum(t.agent_failed for t in trajectories)),
        "rollouts/without_reward": float(sum(t.reward is None for t in trajectories)),
        "rollouts/without_calls": float(sum(t.calls == 0 for t in trajectories)),
        "rollouts/calls_of_other_models": float(sum(t.other_calls for t in trajectories)),
        "rollouts/lost_rewards": float(sum(t.lost_rewards for t in trajectories)),
        "perf/calls_per_s": calls / timing["gen"],
        "perf/tokens_per_s": sum(t.sampled_tokens for t in trajectories) / timing["gen"],
    }


@contextmanager
def timed(timing: dict[str, float], name: str) -> Iterator[None]:
    """Enter the seconds that the block took into `timing`."""
    start = perf_counter()
    yield
    timing[name] = perf_counter() - start
