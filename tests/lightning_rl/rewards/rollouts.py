"""Finished rollouts of one group, as the tests of rewards need them."""

from typing import Any

from lightning_rl.rewards import FinishedRollout

TASK = {"data_source": "sums", "reward_model": {"ground_truth": "4"}, "extra_info": {"index": 7}}


def finished(answer: str, rollout_id: str = "r0", task: Any = None, group_id: str = "g") -> FinishedRollout:
    return FinishedRollout(
        rollout_id=rollout_id,
        group_id=group_id,
        task=TASK if task is None else task,
        answer=answer,
        messages=[{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": answer}],
    )


def group(*answers: str, group_id: str = "g") -> list[FinishedRollout]:
    """A group of rollouts, one for each answer."""
    return [finished(answer, f"{group_id}-{n}", group_id=group_id) for n, answer in enumerate(answers)]
