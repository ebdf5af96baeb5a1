"""Who computes which rows: parts of a list of sequences that cost about the same, one for each worker.

Invariant: the parts hold every sequence once, and each worker finds the same parts by itself. Rows that begin alike
stand next to each other before the list is cut, so few workers compute a shared beginning twice.
"""

from collections.abc import Sequence

import numpy as np

from lightning_rl.training.batch import TrainingSequence
from lightning_rl.training.packing import prefix_order


def parts(sequences: Sequence[TrainingSequence], workers: int, *, packed: bool) -> list[list[TrainingSequence]]:
    """`sequences` in `workers` parts, some of which may be empty; no part has more tokens to compute than its even
    share and one row.

    With `packed` a row costs the tokens that it does not share with the row before it, otherwise all of its tokens.
    """
    if not sequences:
        return [[] for _ in range(workers)]
    order, shared = prefix_order(sequences)
    ordered = [sequences[number] for number in order]
    costs = np.array([len(s) - (known if packed else 0) for s, known in zip(ordered, shared, strict=True)], float)
    costs += 1e-9  # a row that is another's beginning costs next to nothing, and still has its place
    middles = np.cumsum(costs) - costs / 2
    owner = np.minimum((middles / costs.sum() * workers).astype(int), workers - 1)
    return [[s for s, own in zip(ordered, owner, strict=True) if own == worker] for worker in range(workers)]


def silent(like: TrainingSequence) -> TrainingSequence:
    """A row of one token that trains nothing: what a worker computes while others have micro-batches left, since a
    model in shards runs on all workers or on none. It adds 0 to loss, gradient and metrics."""
    nothing = np.empty(0, np.float32)
    return TrainingSequence(
        rollout=like.rollout,
        token_ids=like.token_ids[:1],
        trained=np.empty(0, np.int64),
        rollout_log_probs=nothing,
        advantages=nothing,
        temperature=nothing,
        old_log_probs=nothing,
        weights=nothing,
        reference_log_probs=nothing,
        values=nothing,
        returns=nothing,
    )
