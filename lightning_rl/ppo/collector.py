"""The rollouts of a step: what is asked for, how what came back is read, and which groups are worth training."""

from collections.abc import Iterable, Sequence
from typing import Any

from lightning_rl.config.schema import Config
from lightning_rl.store.contract import SEED_KEY, RolloutConfig, RolloutRequest
from lightning_rl.trajectories.trajectory import Trajectory, informative

Tasks = Sequence[tuple[int, Any]]  # (index in the dataset, task)


def requests(
    config: Config,
    name: str,
    mode: str,
    tasks: Tasks,
    n: int,
    step: int,
    *,
    run: str,
    resources_id: str | None = None,
    ahead: bool = False,
) -> list[RolloutRequest]:
    """`n` rollouts of each task, group by group, in the order of `tasks`. Their ids begin with `name` and end with
    `run`: a run that is resumed asks for the same ones, and no other run has them. What they are sampled with does not
    hang on `run`. Without `resources_id` they get the latest resources. `ahead`: another step
    than `step` may come to train them."""
    agent = config.actor_rollout_ref.rollout.agent
    return [
        RolloutRequest(
            task=task,
            mode=mode,  # type: ignore[arg-type]
            rollout_id=f"{name}-{index}-{k}.{run}",
            group_id=f"{name}-{index}",
            resources_id=resources_id,
            config=RolloutConfig(max_attempts=agent.max_attempts, timeout_seconds=agent.timeout_seconds),
            metadata={"task_index": f"{index}-{k}", "step": step, SEED_KEY: f"{name}-{index}-{k}"}
            | ({"ahead": True} if ahead else {}),
        )
        for index, task in tasks
        for k in range(n)
    ]


def with_variance(
    batches: Iterable[list[Trajectory]], groups: int, metric: str
) -> tuple[list[Trajectory], list[Trajectory], dict[str, str]]:
    """DAPO's dynamic sampling: take batches until `groups` groups differ in `metric`.

    Returns all rollouts, those that are trained, and why each group of the others is not, by group id.
    """
    rolled_out: list[Trajectory] = []
    chosen: list[list[Trajectory]] = []
    for batch in batches:
        rolled_out += batch
        chosen += informative(batch, metric)
        if len(chosen) >= groups:
            break
    trained = chosen[:groups]
    taken = {group[0].group_id for group in trained}
    why_not = {t.group_id: "zero_variance" for t in rolled_out if t.group_id not in taken}
    why_not |= {group[0].group_id: "surplus" for group in chosen[groups:]}
    return rolled_out, [trajectory for group in trained for trajectory in group], why_not
