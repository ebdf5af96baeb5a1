"""A step's rollouts as numbers, under verl's names where verl has them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import numpy as np

from lightning_rl.trajectories.trajectory import Trajectory


def rollout_metrics(trajectories: list[Trajectory], seconds: float, policy_version: int) -> dict[str, float]:
    """Rewards, lengths, failures and speeds of the rollouts that `seconds` were spent on.

    `policy_version` is that of the weights which they are to update.
    """
    rewards = [t.reward for t in trajectories if t.reward is not None] or [0.0]
    rows = [row for t in trajectories for row in t.rows]
    calls = sum(t.calls for t in trajectories)
    made = [node.call for t in trajectories for node in t.forest.nodes.values()]
    ages = [(policy_version - part.version, part.end - part.start) for call in made for part in call.versions]
    ended = Counter(t.ended_by for t in trajectories if t.ended_by is not None)
    return {f"rollouts/ended_by/{why}": float(count) for why, count in ended.items()} | {
        "critic/score/mean": float(np.mean(rewards)),
        "critic/score/max": float(np.max(rewards)),
        "critic/score/min": float(np.min(rewards)),
        "num_turns/mean": calls / max(len(trajectories), 1),
        "response_length/mean": float(np.mean([t.sampled_tokens for t in trajectories])),
        "row_length/mean": float(np.mean([len(row.token_ids) for row in rows] or [0])),
        "rollouts/rows": float(len(rows)),
        "rollouts/agent_failed": float(sum(t.agent_failed for t in trajectories)),
        "rollouts/without_reward": float(sum(t.reward is None for t in trajectories)),
        "rollouts/without_calls": float(sum(t.calls == 0 for t in trajectories)),
        "rollouts/calls_of_other_models": float(sum(t.other_calls for t in trajectories)),
        "rollouts/lost_rewards": float(sum(t.lost_rewards for t in trajectories)),
        "rollouts/cut_by_length": sum(call.finish_reason == "length" for call in made) / max(calls, 1),
        "training/staleness/mean": sum(age * n for age, n in ages) / max(sum(n for _, n in ages), 1),
        "training/staleness/max": float(max((age for age, _ in ages), default=0)),
        "perf/calls_per_s": calls / seconds,
        "perf/tokens_per_s": sum(t.sampled_tokens for t in trajectories) / seconds,
    }


@contextmanager
def timed(timing: dict[str, float], name: str) -> Iterator[None]:
    """Enter the seconds that the block took into `timing`."""
    start = perf_counter()
    yield
    timing[name] = perf_counter() - start
