"""Training rows as arrays, mini-batches of whole rollouts, micro-batches of rows of like length.

A `TrainingSequence` is one row made ready: its tokens, which of them are trained, and what each of those needs.
Padding is to the right and never trained, so under causal attention it changes nothing; rows of like length stand
together, which leaves little of it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_rl.rl.aggregation import token_weights
from lightning_rl.vision import PlacedImage
from lightning_rl_adapters.forest import check_held
from lightning_rl_adapters.rows import Row

OF_TEACHER = ("teacher_log_probs", "teacher_top_ids", "teacher_top_log_probs")
_KNOWN_LATER = ("old_log_probs", "weights", "reference_log_probs", "values", "returns", *OF_TEACHER)  # None until then
OfCalls = Mapping[str, float | NDArray[np.float64]]  # of a call, or of each of the tokens that it sampled


@dataclass
class TrainingSequence:
    """One row of T tokens.

    `token_ids` int64 [T]; `trained` int64 [K], the positions with loss mask 1 (all >= 1: a first token has no
    distribution); float32 [K] each: `rollout_log_probs` (NaN where the engine gave none), `advantages`, `temperature`,
    and `old_log_probs` once they are known. `rollout` indexes the rollout within the batch. `calls` maps each call that
    the row trains to the position of its first sampled token. `cut_context`: tokens before the first are cut off, so
    the sampler saw more than the trainer. `images` are those that the row shows. `entropies` (nats) [K] are those that
    the actor's first pass over the row found, where it was made in this process. Float32 [K] where there are any:
    `weights`, by which the policy's token losses are multiplied (rollout correction), `reference_log_probs`, and
    `teacher_log_probs` (NaN where a token has no teacher); of the C tokens that the teacher finds most likely in the
    place of each, where they are compared, `teacher_top_ids` int64 [K, C] and `teacher_top_log_probs` float32 [K, C].
    """

    rollout: int
    token_ids: NDArray[np.int64]
    trained: NDArray[np.int64]
    rollout_log_probs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    temperature: NDArray[np.float32]
    old_log_probs: NDArray[np.float32] | None = None
    weights: NDArray[np.float32] | None = None
    reference_log_probs: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None
    teacher_log_probs: NDArray[np.float32] | None = None
    teacher_top_ids: NDArray[np.int64] | None = None
    teacher_top_log_probs: NDArray[np.float32] | None = None
    calls: dict[str, int] = field(default_factory=dict)
    cut_context: bool = False
    images: tuple[PlacedImage, ...] = ()
    entropies: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def keep(self, which: NDArray[np.bool_]) -> None:
        """Train only the trained tokens that `which` [K] names; the others stay as context."""
        self.trained = self.trained[which]
        self.rollout_log_probs = self.rollout_log_probs[which]
        self.advantages = self.advantages[which]
        self.temperature = self.temperature[which]
        for name in _KNOWN_LATER:
            numbers = getattr(self, name)
            if numbers is not None:
                setattr(self, name, numbers[which])

    def truncate_response(self, max_tokens: int) -> int:
        """Cut off what stands beyond `max_tokens`; how many trained tokens went with it. Of an image that the cut goes
        through nothing is left."""
        before = len(self.trained)
        max_tokens = min([max_tokens, *(one.start for one in self.images if one.start < max_tokens < one.end)])
        self.images = tuple(one for one in self.images if one.end <= max_tokens)
        self.keep(self.trained < max_tokens)
        self.token_ids = self.token_ids[:max_tokens]
        return before - len(self.trained)

    def truncate_left(self, max_tokens: int) -> int:
        """Cut off the oldest tokens beyond `max_tokens`; how many trained tokens went with them.

        The first that is left has no distribution any more, so it is not trained. Of an image that the cut goes through
        nothing is left.
        """
        cut = len(self) - max_tokens
        if cut <= 0:
            return 0
        cut = max([cut, *(one.end for one in self.images if one.start < cut < one.end)])
        self.images = tuple(one._replace(start=one.start - cut) for one in self.images if one.start >= cut)
        before = len(self.trained)
        self.keep(self.trained > cut)
        self.trained = self.trained - cut
        self.calls = {call_id: start - cut for call_id, start in self.calls.items()}
        self.token_ids = self.token_ids[cut:]
        self.cut_context = True
        return before - len(self.trained)

    def trained_by_call(self) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.int64]]]:
        """Of each call with trained tokens its id, where these stand among the K, and their places in the answer."""
        starts = np.asarray(sorted(self.calls.values()), dtype=np.int64)
        names = sorted(self.calls, key=lambda call_id: self.calls[call_id])
        call = np.searchsorted(starts, self.trained, side="right") - 1
        distinct, firsts = np.unique(call, return_index=True)  # the trained tokens stand in the order of the row
        for i, where in zip(distinct, np.split(np.arange(len(call)), firsts[1:]), strict=True):
            yield names[i], where, self.trained[where] - starts[i]

    def spread(self, of_calls: OfCalls) -> NDArray[np.float32]:
        """Numbers of calls at their trained tokens, float32 [K]; 0 where a call has none."""
        numbers = np.zeros(len(self.trained), np.float32)
        for call_id, where, places in self.trained_by_call():
            of_call = of_calls.get(call_id, 0.0)
            numbers[where] = of_call[places] if isinstance(of_call, np.ndarray) else of_call
        return numbers


def canonical_order(sequences: Sequence[TrainingSequence]) -> NDArray[np.int64]:
    """The trained tokens of `sequences`, joined [K], in an order that the rollouts alone decide: int64 [K].

    By rollout, and within it call by call, by where its answer begins and what stands before; so rows, their cut and
    their order do not count.
    """
    calls: list[tuple[int, int, bytes, str, NDArray[np.int64]]] = []
    before = 0
    for sequence in sequences:
        trained, path, read = sequence.trained, blake2b(digest_size=16), 0
        of_calls = ((name, where) for name, where, _ in sequence.trained_by_call())
        for name, where in of_calls if sequence.calls else [("", np.arange(len(trained)))]:
            if len(where):
                first, last = trained[where[0]], trained[where[-1]]
                path.update(sequence.token_ids[read : last + 1].tobytes())
                read = last + 1
                calls.append((sequence.rollout, int(first), path.copy().digest(), name, before + where))
        before += len(trained)
    calls.sort(key=lambda call: call[:4])
    return np.concatenate([np.empty(0, np.int64), *(where for *_, where in calls)])


def sequence_of(
    row: Row, rollout: int, advantages: OfCalls | None = None, media: Mapping[str, bytes] = MappingProxyType({})
) -> TrainingSequence:
    """A row as a training sequence; `advantages` are those of its calls, 0 where they are not known yet; `media` has
    the images that it shows, by their SHA-256.

    Raises ValueError where the row trains its very first token, which no model gave a probability to, or the tokens of
    an image, which nobody sampled, and ForestError where `media` lacks one of its images.
    """
    check_held(row.media, media, f"rollout {rollout} of the batch")
    if any(any(row.loss_mask[one.start : one.start + one.length]) for one in row.media):
        raise ValueError("the tokens of an image are marked as sampled")
    trained = np.flatnonzero(np.asarray(row.loss_mask, dtype=bool))
    if len(trained) and trained[0] == 0:
        raise ValueError("a row's first token is marked as sampled; a call must have a prompt")
    sequence = TrainingSequence(
        rollout=rollout,
        token_ids=np.asarray(row.token_ids, dtype=np.int64),
        trained=trained.astype(np.int64),
        rollout_log_probs=_at(row.logprobs, trained),
        advantages=np.zeros(len(trained), np.float32),
        temperature=_at(row.temperature, trained),
        calls=_starts(row.call_ids),
        images=tuple(PlacedImage(one.start, one.length, one.sha256, media[one.sha256]) for one in row.media),
    )
    if advantages is not None:
        sequence.advantages = sequence.spread(advantages)
    return sequence


@dataclass(frozen=True)
class MiniBatch:
    """What one optimizer step trains: whole rollouts. `weights` has, by rollout, the weight of each of its trained
    tokens in the loss (`rl.aggregation`); any part of `sequences` under the same weights adds its share of it."""

    sequences: list[TrainingSequence]
    weights: dict[int, float]


def sequences_of(plan: Iterable[MiniBatch]) -> list[TrainingSequence]:
    """All of them, mini-batch by mini-batch."""
    return [sequence for mini in plan for sequence in mini.sequences]


def mini_batches(
    sequences: list[TrainingSequence], *, rollouts: int, rollouts_each: int, mode: str, scale_factor: float | None
) -> list[MiniBatch]:
    """A step of `rollouts` rollouts as ceil(rollouts / rollouts_each) mini-batches, whatever rows they were cut into.

    Those with trained tokens are dealt out in their order, as evenly as it goes, so the number of optimizer steps is
    the same in every step; only where they are fewer than mini-batches it is theirs. `mode` is verl's `loss_agg_mode`.
    """
    by_rollout: dict[int, list[TrainingSequence]] = defaultdict(list)
    for sequence in sequences:
        by_rollout[sequence.rollout].append(sequence)
    live = sorted(by_rollout)
    parts = min(-(-rollouts // rollouts_each), len(live))
    made = []
    for number in range(parts):
        part = live[number * len(live) // parts : (number + 1) * len(live) // parts]
        tokens = [sum(len(sequence.trained) for sequence in by_rollout[rollout]) for rollout in part]
        weights = token_weights(tokens, mode, scale_factor=scale_factor)
        chosen = [sequence for rollout in part for sequence in by_rollout[rollout]]
        made.append(MiniBatch(chosen, dict(zip(part, weights.tolist(), strict=True))))
    return made


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


def by_sequence(
    cut: Iterable[list[TrainingSequence]], compute: Callable[[list[TrainingSequence]], torch.Tensor]
) -> dict[int, NDArray[np.float32]]:
    """Numbers of trained tokens, float32 [K], by a sequence's `id`; `compute` gives those of a micro-batch of `cut`,
    joined."""
    by_id: dict[int, NDArray[np.float32]] = {}
    for micro in cut:
        joined: NDArray[np.float32] = compute(micro).float().cpu().numpy()
        ends = np.cumsum([len(sequence.trained) for sequence in micro])[:-1]
        by_id.update({id(s): own for s, own in zip(micro, np.split(joined, ends), strict=True)})
    return by_id


def _starts(call_ids: list[str | None]) -> dict[str, int]:
    """Where the answer of each call begins."""
    starts: dict[str, int] = {}
    for position, call_id in enumerate(call_ids):
        if call_id is not None and call_id not in starts:
            starts[call_id] = position
    return starts


def _at(values: list[float | None], positions: NDArray[np.int64]) -> NDArray[np.float32]:
    return np.asarray(values, dtype=np.float32)[positions]  # None becomes NaN
