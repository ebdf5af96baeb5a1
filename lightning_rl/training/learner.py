"""What actor and critic share: a step is cut into mini-batches and micro-batches, whose metrics add up."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from lightning_rl.training.batch import MiniBatch, TrainingSequence, mini_batches
from lightning_rl.training.forward import Forward
from lightning_rl.training.optimizer import Optimizer, OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """verl's keys that `actor` and `critic` have in common, resolved.

    `mini_batch_rollouts` is ppo_mini_batch_size x rollout.n; at most `micro_batch_rows` rows or `micro_batch_tokens`
    tokens are computed at once (None: no bound). With `param_offload`, the weights wait in main memory between their
    uses, with `optimizer_offload` the optimizer's state does so between updates.
    """

    mini_batch_rollouts: int
    micro_batch_rows: int | None
    micro_batch_tokens: int | None
    ppo_epochs: int
    loss_agg_mode: str
    loss_scale_factor: float
    optim: OptimizerConfig
    param_offload: bool = False
    optimizer_offload: bool = False


class Planner:
    """Whoever updates a model knows how a step is cut, wherever the model is."""

    config: LearnerConfig

    def plan(self, sequences: list[TrainingSequence], rollouts: int) -> list[MiniBatch]:
        """The mini-batches of a step that asked for `rollouts` rollouts."""
        return mini_batches(
            sequences,
            rollouts=rollouts,
            rollouts_each=self.config.mini_batch_rollouts,
            mode=self.config.loss_agg_mode,
            scale_factor=self.config.loss_scale_factor,
        )


class Learner(Planner):
    """A model that is updated on training sequences; subclasses say by which loss."""

    forward: Forward
    optimizer: Optimizer

    def _micro_batches(self, sequences: list[TrainingSequence]) -> list[list[TrainingSequence]]:
        config = self.config
        return list(
            self.forward.micro_batches(sequences, rows=config.micro_batch_rows, tokens=config.micro_batch_tokens)
        )


def add_up(
    sums: dict[str, float], values: Mapping[str, Tensor], micro: Sequence[TrainingSequence], *, advice: str
) -> None:
    """Add a micro-batch's share. Raises FloatingPointError for NaN or infinity, with the rollouts and `advice`."""
    for name, value in values.items():
        number = value.item()
        if not math.isfinite(number):
            rollouts = sorted({s.rollout for s in micro})
            raise FloatingPointError(f"{name} is {number} for the rollouts {rollouts} of the batch: {advice}")
        sums[name] = sums.get(name, 0.0) + number


def means(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of every metric its mean over optimizer steps."""
    return {name: float(np.mean([one[name] for one in metrics])) for name in metrics[0]}
