"""Training rows as arrays, mini-batches of whole rollouts, micro-batches of rows of like length.

A `TrainingSequence` is one row made ready: its tokens, which of them are trained, and what each of those needs.
Padding is to the right and never trained, so under causal attention it changes nothing.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_rl_adapters.rows import Row


@dataclass
class TrainingSequence:
    """One row of T tokens.

    `token_ids` int64 [T]; `trained` int64 [K], the positions with loss mask 1 (all >= 1: a first token has no
    distribution); float32 [K] each: `rollout_log_probs` (NaN where the engine gave none), `advantages`, `temperature`,
    and `old_log_probs` once they are known. `rollout` indexes the rollout within the batch.
    """

    rollout: int
    token_ids: NDArray[np.int64]
    trained: NDArray[np.int64]
    rollout_log_probs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    temperature: NDArray[np.float32]
    old_log_probs: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def keep(self, which: NDArray[np.bool_]) -> None:
        """Train only the trained tokens that `which` [K] names; the others stay as context."""
        self.trained = self.trained[which]
        self.rollout_log_probs = self.rollout_log_probs[which]
        self.advantages = self.advantages[which]
        self.temperature = self.temperature[which]


def sequence_of(row: Row, rollout: int, advantages: Mapping[str, float]) -> TrainingSequence:
    """A row as a training sequence; `advantages` gives each call's advantage.

    Raises ValueError where the row trains its very first token, which no model gave a probability to.
    """
    trained = np.flatnonzero(np.asarray(row.loss_mask, dtype=bool))
    if len(trained) and trained[0] == 0:
        raise ValueError("a row's first token is marked as sampled; a call must have a prompt")
    return TrainingSequence(
        rollout=rollout,
        token_ids=np.asarray(row.token_ids, dtype=np.int64),
        trained=trained.astype(np.int64),
        rollout_log_probs=_at(row.logprobs, trained),
        advantages=_spread(row.call_ids, trained, advantages),
        temperature=_at(row.temperature, trained),
    )


def mini_batches(sequences: list[TrainingSequence], rollouts_each: int) -> Iterator[list[TrainingSequence]]:
    """Cut by whole rollouts, `rollouts_each` at a time, in their order."""
    by_rollout: dict[int, list[TrainingSequence]] = defaultdict(list)
    for sequence in sequences:
        by_rollout[sequence.rollout].append(sequence)
    rollouts = list(by_rollout.values())
    for start in range(0, len(rollouts), rollouts_each):
        yield [sequence for rollout in rollouts[start : start + rollouts_each] for sequence in rollout]


def micro_batches(
    sequences: list[TrainingSequence], *, rows: int | None, tokens: int | None
) -> Iterator[list[TrainingSequence]]:
    """Rows of like length together: at most `rows` rows, or at most `tokens` tokens with padding (None: no bound)."""
    batch: list[TrainingSequence] = []
    for sequence in sorted(sequences, key=len):
        full = rows is not None and len(batch) >= rows
        if batch and (full or (tokens is not None and (len(batch) + 1) * len(sequence) > tokens)):
            yield batch
            batch = []
        batch.append(sequence)
    if batch:
        yield batch


@dataclass(frozen=True)
class MicroBatch:
    """B rows padded to T: `token_ids` int64 [B, T], and of their K trained tokens in row order: `row` and `position`
    int64 [K] (the token stands at [row, position], its distribution at position - 1), the rest float32 [K]."""

    token_ids: torch.Tensor
    row: torch.Tensor
    position: torch.Tensor
    temperature: torch.Tensor


def collate(sequences: list[TrainingSequence], pad_id: int, device: torch.device) -> MicroBatch:
    """Pad to the right and find the trained tokens."""
    longest = max(len(s) for s in sequences)
    token_ids = np.full((len(sequences), longest), pad_id, dtype=np.int64)
    for i, sequence in enumerate(sequences):
        token_ids[i, : len(sequence)] = sequence.token_ids
    rows = np.repeat(np.arange(len(sequences)), [len(s.trained) for s in sequences])
    return MicroBatch(
        token_ids=torch.from_numpy(token_ids).to(device),
        row=torch.from_numpy(rows).to(device),
        position=torch.from_numpy(np.concatenate([s.trained for s in sequences])).to(device),
        temperature=torch.from_numpy(np.concatenate([s.temperature for s in sequences])).to(device),
    )


def _at(values: list[float | None], positions: NDArray[np.int64]) -> NDArray[np.float32]:
    return np.asarray(values, dtype=np.float32)[positions]  # None becomes NaN


def _spread(
    call_ids: list[str | None], positions: NDArray[np.int64], advantages: Mapping[str, float]
) -> NDArray[np.float32]:
    spread = np.empty(len(call_ids), dtype=np.float32)
    start = 0
    for call_id, run in groupby(call_ids):
        end = start + sum(1 for _ in run)
        if call_id is not None:
            spread[start:end] = advantages[call_id]
        start = end
    return spread[positions]
