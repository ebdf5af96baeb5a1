"""Actor, critic and reference that a group of workers holds: the same methods, asked of all workers at once."""

import numpy as np
from numpy.typing import NDArray

from lightning_rl.training.actor import ActorConfig
from lightning_rl.training.batch import MiniBatch, TrainingSequence, sequences_of
from lightning_rl.training.critic import CriticConfig
from lightning_rl.training.distributed.group import WorkerGroup
from lightning_rl.training.learner import Planner
from lightning_rl.training.teacher import Scores

OfTokens = list[NDArray[np.float32]]


class RemoteActor(Planner):
    """As `training.actor.Actor`."""

    def __init__(self, group: WorkerGroup, config: ActorConfig) -> None:
        self.config: ActorConfig = config
        self._group = group

    def log_probs(self, sequences: list[TrainingSequence]) -> OfTokens:
        """Per sequence the log probabilities (nats) of its trained tokens, float32 [K]."""
        of_sequences: OfTokens = self._group.ask("actor", "log_probs", sequences)
        return of_sequences

    def values(self, sequences: list[TrainingSequence]) -> OfTokens:
        """Per sequence the values of its trained tokens, float32 [K], by the value head."""
        of_sequences: OfTokens = self._group.ask("actor", "values", sequences)
        return of_sequences

    def update(self, plan: list[MiniBatch], *, values_alone: bool = False) -> dict[str, float]:
        """One PPO update; its metrics are those of the whole batch. The plan's sequences get their `entropies`, and
        their `old_log_probs` where the update finds these."""
        metrics: dict[str, float]
        metrics, of_sequences = self._group.ask(None, "update_actor", plan, values_alone=values_alone)
        for sequence, (entropies, old) in zip(sequences_of(plan), of_sequences, strict=True):
            sequence.entropies, sequence.old_log_probs = entropies, old
        return metrics

    def offload(self) -> None:
        """With `param_offload`, let the weights wait in main memory."""
        self._group.ask("actor", "offload")

    def onload(self) -> None:
        """Bring them back."""
        self._group.ask("actor", "onload")


class RemoteCritic(Planner):
    """As `training.critic.Critic`."""

    def __init__(self, group: WorkerGroup, config: CriticConfig) -> None:
        self.config: CriticConfig = config
        self._group = group

    def values(self, sequences: list[TrainingSequence]) -> OfTokens:
        """Per sequence the values of its trained tokens, float32 [K]."""
        of_sequences: OfTokens = self._group.ask("critic", "values", sequences)
        return of_sequences

    def update(self, plan: list[MiniBatch]) -> dict[str, float]:
        """One update; its metrics are those of the whole batch."""
        metrics: dict[str, float] = self._group.ask("critic", "update", plan)
        return metrics


class RemoteTeacher:
    """As `training.teacher.FrozenTeacher`, of one that the workers have under its name."""

    def __init__(self, group: WorkerGroup, name: str) -> None:
        self._group, self._name = group, name

    def score(self, sequences: list[TrainingSequence], top: int) -> list[Scores]:
        """Per sequence what is said of its trained tokens."""
        scores: list[Scores] = self._group.ask(None, "teacher_scores", self._name, sequences, top)
        return scores


class RemoteReference:
    """As `training.reference.Reference`."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def log_probs(self, sequences: list[TrainingSequence]) -> OfTokens:
        """Per sequence the log probabilities (nats) of its trained tokens, float32 [K]."""
        of_sequences: OfTokens = self._group.ask("reference", "log_probs", sequences)
        return of_sequences
