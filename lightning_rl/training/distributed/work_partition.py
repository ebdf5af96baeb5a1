"""Who computes which rows: parts of a list of sequences that cost about the same, one for each worker.

Invariant: the parts hold every sequence once, and each worker finds the same parts by itself. Rows that begin alike
stand next to each other before the list is cut, so few workers compute a shared beginning twice.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from lightning_rl.training.batch import TrainingSequence
from lightning_rl.training.packing import prefix_order


def parts(sequences: Sequence[TrainingSequence], workers: int, *, packed: bool) -> list[list[TrainingSequence]]:
    """`sequences` in `workers` parts, some of which may be empty: ordered by their tokens and cut so that the largest
    part is as small as it can be.

    A part costs the tokens that are computed for it: all of its rows', with `packed` what rows begin with alike once.
    """
    order, shared = prefix_order(sequences)
    ordered = [sequences[number] for number in order]
    lengths = [len(sequence) for sequence in ordered]
    added = [length - prefix if packed else length for length, prefix in zip(lengths, shared, strict=False)]
    sizes = range(max(lengths, default=0), sum(lengths) + 1)
    most = sizes[bisect_left(sizes, True, key=lambda size: len(_ends(lengths, added, size)) <= workers)]
    slices = [ordered[start:end] for start, end in pairwise([0, *_ends(lengths, added, most)])]
    return slices + [[] for _ in range(workers - len(slices))]


def _ends(lengths: Sequence[int], added: Sequence[int], most: int) -> list[int]:
    """Where parts of at most `most` tokens end: a row costs its length in the first place of a part, else `added`.

    None is cut short, and a part that begins later never costs more, so there are as few as there can be.
    """
    ends, held = [], 0
    for number, (length, more) in enumerate(zip(lengths, added, strict=True)):
        if held and held + more > most:
            ends.append(number)
            held = 0
        held += more if held else length
    return [*ends, len(lengths)]


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
        teacher_log_probs=nothing,
        teacher_top_ids=None if like.teacher_top_ids is None else like.teacher_top_ids[:0],
        teacher_top_log_probs=None if like.teacher_top_log_probs is None else like.teacher_top_log_probs[:0],
    )
