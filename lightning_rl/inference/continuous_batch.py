"""Continuous batching: requests join and leave between two steps, and a step samples the next token of all rows.

Invariant: `Batch`, the cache and the weights agree: row i is the same sequence everywhere, and every sampled token is
marked with the version of the weights that gave it.
"""

from collections.abc import Iterator, Set
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_rl.inference.batch import Batch, EndedSequence, Sequence
from lightning_rl.inference.cache import SHORTEST_PREFIX, Prefixes
from lightning_rl.inference.policy import Policy
from lightning_rl.inference.sampler import Sampled, sample, uniforms
from lightning_rl.inference.sequence import Output
from lightning_rl.vision import PlacedFeatures

Ints = NDArray[np.int64]

PREFILL_TOKENS = 8192  # a prefill pass takes at most this many tokens, padding included


class Step(NamedTuple):
    """What one pass gave: a token of each of `sequences`, in their order, and the answers that this ended."""

    sequences: list[Sequence]
    sampled: Sampled
    ended: list[Output]


class ContinuousBatch:
    """Sequences that one thread writes with a model, which other batches may use at the same time.

    Args:
        policy: the model.
        prefixes: prompts and answers that are kept for prompts that begin like them, of all batches.
        max_rows: sequences that can be written at once.
    """

    def __init__(self, policy: Policy, prefixes: Prefixes, max_rows: int) -> None:
        self._policy = policy
        self._prefixes = prefixes
        self._cache = policy.cache(max_rows)
        self._batch = Batch(max_rows, policy.max_length)

    @property
    def free(self) -> int:
        """Sequences that can join."""
        return self._batch.max_rows - self._batch.n

    @property
    def adapters(self) -> Ints:
        """By which adapter each row is written, [n]."""
        return self._batch.adapter[: self._batch.n]

    def join(self, sequences: list[Sequence]) -> Iterator[Step]:
        """Read the prompts of at most `free` sequences, in as many passes as it takes, and sample a token of each."""
        while sequences:
            with self._prefixes.lock:
                # Anew for each group: what came after the one before it may have pushed out what was found.
                for sequence in sequences:
                    sequence.prefix = self._prefixes.find(sequence.content, sequence.adapter, sequence.prefix)
                group, sequences = _length_group(sequences)
                copied_from = self._place(group)
            yield self._read(group, copied_from)

    def step(self, going: Ints) -> Step:
        """The next token of the rows that go on. The others are read with them, which writes what is there already."""
        batch = self._batch
        rows, last = np.arange(batch.n), batch.length[: batch.n] - 1
        places = (last + batch.offset[: batch.n])[:, None] if batch.offset[: batch.n].any() else None
        tokens, adapters = batch.tokens[rows, last][:, None], batch.adapter[: batch.n]
        logits = self._policy.forward(self._cache, tokens, last[:, None], 0, places, adapters=adapters)
        if len(going) < batch.n:
            logits = logits.index_select(0, torch.from_numpy(going).to(logits.device))
        return self._sample(going, logits)

    def end(self, ended: list[EndedSequence]) -> list[Output]:
        """Free these rows; their answers as they stand."""
        outputs = [self._batch.output(one) for one in ended]
        pure = [one.row for one in ended if self._batch.sequences[one.row].pure]
        self._keep(pure, [self._batch.written(row) for row in pure])
        sources, targets = self._batch.leave([one.row for one in ended])
        if len(sources):
            longest = int(self._batch.length[targets].max())
            self._cache.copy_to(self._cache, sources, targets, longest)
        return outputs

    def abort(self, request_ids: Set[str]) -> list[Output]:
        """End those of these requests that have rows here."""
        rows = [row for row, one in enumerate(self._batch.sequences) if one.request_id in request_ids]
        return self.end([EndedSequence(row, "abort") for row in rows]) if rows else []

    def updated(self, version: int, adapter: int) -> None:
        """The weights (0), or those of an adapter, are of that version from here on."""
        for row, sequence in enumerate(self._batch.sequences):
            if adapter in (0, sequence.adapter):  # an adapter's answers are the weights' below it, too
                sequence.pure = False
            if sequence.adapter == adapter:
                sequence.mark(version, self._batch.generated(row))

    def _place(self, group: list[Sequence]) -> list[int]:
        """Give rows to the group, and to each that reads its prompt what is kept of it.

        Equal prompts (the rollouts of one task) are read once, by the first rows; of the others, which come behind
        them, the rows that they are copied from are returned.
        """
        originals: dict[tuple[int, bytes], int] = {}
        copies: list[tuple[Sequence, int]] = []
        with_prefix: list[Sequence] = []
        for sequence in group:
            read = sequence.adapter, sequence.content.tobytes()
            if read in originals:
                copies.append((sequence, originals[read]))
            else:
                originals[read] = self._batch.n
                self._batch.join(sequence)
                with_prefix += [sequence] if sequence.prefix.shared else []
        if with_prefix:
            prefix_rows, rows = [one.prefix.row for one in with_prefix], [one.row for one in with_prefix]
            self._prefixes.restore(self._cache, prefix_rows, rows, max(one.prefix.shared for one in with_prefix))
        for sequence, _ in copies:
            self._batch.join(sequence)
        return [row for _, row in copies]

    def _read(self, group: list[Sequence], copied_from: list[int]) -> Step:
        """Read the prompts of the group, which has the last rows, and sample a token of each."""
        first, end = self._batch.n - len(group), self._batch.n - len(copied_from)
        readers = self._batch.sequences[first:end]
        tokens, positions = _left_padded(readers)
        adapters = self._batch.adapter[first:end]
        places, shown = _places(readers, positions), _shown(readers)
        logits = self._policy.forward(self._cache, tokens, positions, first, places, shown, adapters)
        fresh = [sequence for sequence in readers if sequence.unread > SHORTEST_PREFIX]
        self._keep([one.row for one in fresh], [one.content for one in fresh])
        if copied_from:
            for copy, source in zip(self._batch.sequences[end:], copied_from, strict=True):
                copy.prefix = self._batch.sequences[source].prefix
            sources, targets = np.array(copied_from), np.arange(end, self._batch.n)
            longest = max(len(one.prompt) for one in self._batch.sequences[end:])
            self._cache.copy_to(self._cache, sources, targets, longest)
            picked = np.concatenate([np.arange(len(readers)), sources - first])
            logits = logits.index_select(0, torch.from_numpy(picked).to(logits.device))
        for sequence in self._batch.sequences[first:]:
            sequence.mark(self._policy.versions[sequence.adapter], 0)
        return self._sample(np.arange(first, self._batch.n), logits)

    def _sample(self, rows: Ints, logits: Tensor) -> Step:
        batch = self._batch
        index = batch.length[rows] - batch.prompt_length[rows]
        sampled = sample(
            logits,
            temperature=batch.temperature[rows],
            top_p=batch.top_p[rows],
            top_k=batch.top_k[rows],
            uniform=uniforms(batch.seed_key[rows], index),
        )
        ended = batch.extend(rows, sampled)
        sequences = [batch.sequences[row] for row in rows.tolist()]
        return Step(sequences, sampled, self.end(ended) if ended else [])

    def _keep(self, rows: list[int], contents: list[Ints]) -> None:
        sequences = [self._batch.sequences[row] for row in rows]
        with self._prefixes.lock:
            previous = [one.prefix for one in sequences]
            current = self._prefixes.keep(self._cache, rows, contents, self._batch.adapter[rows], previous)
        for sequence, one in zip(sequences, current, strict=True):
            sequence.prefix = one


def _left_padded(sequences: list[Sequence]) -> tuple[Ints, Ints]:
    """What is unread of the prompts, up to q tokens -> tokens and positions [b, q].

    Padding, position -1, stands on the left.
    """
    unread = np.array([sequence.unread for sequence in sequences])[:, None]
    shared = np.array([sequence.prefix.shared for sequence in sequences])[:, None]
    width = int(unread.max())
    index = np.arange(width) - (width - unread)
    tokens = np.zeros((len(sequences), width), np.int64)
    tokens[index >= 0] = np.concatenate([one.prompt[one.prefix.shared :] for one in sequences])
    return tokens, np.where(index >= 0, index + shared, -1)


def _places(sequences: list[Sequence], positions: Ints) -> Ints | None:
    """Where the unread tokens stand in time, height and width, [3, b, q]; None where no prompt shows anything."""
    if all(sequence.picture is None for sequence in sequences):
        return None
    places = np.repeat(np.maximum(positions, 0)[None], 3, axis=0)
    for row, sequence in enumerate(sequences):
        if sequence.picture is not None:
            places[:, row, -sequence.unread :] = sequence.picture.places[:, sequence.prefix.shared :]
    return places


def _shown(sequences: list[Sequence]) -> list[PlacedFeatures]:
    """The images of the unread parts, by the columns of `_left_padded`."""
    width = max(sequence.unread for sequence in sequences)
    features: list[PlacedFeatures] = []
    for row, sequence in enumerate(sequences):
        pad = width - len(sequence.prompt)  # of its first token's column, were all of it there
        unread = slice(width - sequence.unread, width)
        for image, patches in () if sequence.picture is None else sequence.picture.images:
            part = PlacedFeatures(row, pad + image.start, patches, 0, image.length).within(unread)
            if part is not None:
                features.append(part._replace(column=part.column + unread.start))
    return features


def _length_group(sequences: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Prompts to read together, the longest first, and the rest.

    A short one never pads to more than twice its length.
    """
    ordered = sorted(sequences, key=lambda one: -one.unread)
    longest = ordered[0].unread
    size = sum(2 * sequence.unread >= longest for sequence in ordered)
    size = min(size, max(1, PREFILL_TOKENS // longest))
    return ordered[:size], ordered[size:]
