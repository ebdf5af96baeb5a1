"""The sequences being written, as arrays with one row each.

Invariant: rows 0 .. n-1 are active, the rest is free; a row here is the same row of the cache. So one
decode step is one dense pass over rows 0 .. n-1, and its bookkeeping is a few array operations.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_rl.inference.cache import NOTHING
from lightning_rl.inference.sampler import Sampled
from lightning_rl.inference.sequence import FinishReason, GenerationRequest, Output, VersionSpan
from lightning_rl.vision import ModelVision, Patches, PlacedImage

Ints = NDArray[np.int64]

LONG_PROMPT = 256  # tokens; a shorter one is sooner read twice, by two batches, than waited for


class Picture(NamedTuple):
    """What a prompt of P tokens shows: `images`, which stand at their places of the prompt; `places` int64 [3, P], each
    token's place in time, height and width; `offset`, how far the next token's place is from its index.

    `content` int64 [P] is the prompt with numbers of the images' own (below -1) where they stand: prompts are one where
    their contents are.
    """

    images: tuple[tuple[PlacedImage, Patches], ...]
    places: Ints
    offset: int
    content: Ints


def picture_of(prompt: Ints, images: tuple[PlacedImage, ...], vision: ModelVision | None) -> Picture:
    """The images of a prompt, ready to be read. Raises ValueError for those that the model cannot read there."""
    if vision is None:
        raise ValueError("the prompt shows images, and this model reads text alone")
    behind = 0
    content = prompt.copy()
    for image in images:
        if image.start < behind or image.end > len(prompt):
            raise ValueError(
                f"image {image.sha256} stands at {image.start}..{image.end}, outside of the prompt, or "
                "where another one does"
            )
        behind = image.end
        content[image.start : image.end] = -2 - int(image.sha256[:14], 16) - np.arange(image.length)
    read = vision.read(images)
    patches = tuple((image, read[image.sha256]) for image in images)
    return Picture(patches, *vision.positions(len(prompt), images, read), content)


class Sequence:
    """A request on its way: what it needs before and beside its row."""

    __slots__ = (
        "adapter",
        "content",
        "long_prompt",
        "picture",
        "prefix",
        "priority",
        "prompt",
        "pure",
        "request_id",
        "row",
        "sampling",
        "seed_key",
        "starts",
        "stop_ids",
    )

    def __init__(
        self,
        request: GenerationRequest,
        prompt: Ints,
        seed_key: np.uint64,
        stop_ids: tuple[int, ...],
        picture: Picture | None,
    ) -> None:
        self.request_id = request.request_id
        self.sampling = request.sampling
        self.adapter = request.adapter
        self.priority = request.priority
        self.prompt = prompt
        self.picture = picture
        self.content = prompt if picture is None else picture.content
        self.seed_key = seed_key
        self.stop_ids = stop_ids
        self.row = -1
        self.long_prompt = (self.adapter, self.content.tobytes()) if len(prompt) >= LONG_PROMPT else None
        self.prefix = NOTHING  # that `Prefixes` has of the prompt; once it was read, of all that was kept of it
        self.pure = True  # no weights but the ones in force wrote its keys and values
        self.starts: list[tuple[int, int]] = []  # (policy version, its first token's index)

    @property
    def unread(self) -> int:
        """Tokens of the prompt that no kept keys and values stand for."""
        return len(self.prompt) - self.prefix.shared

    def mark(self, version: int, generated: int) -> None:
        """Tokens from index `generated` on come from `version`."""
        if self.starts and self.starts[-1][1] == generated:
            self.starts.pop()
        if not self.starts or self.starts[-1][0] != version:
            self.starts.append((version, generated))

    @property
    def version(self) -> int:
        """That of the weights which sample it now."""
        return self.starts[-1][0]

    def spans(self, generated: int) -> list[VersionSpan]:
        ends = [start for _, start in self.starts[1:]] + [generated]
        pairs = zip(self.starts, ends, strict=True) if self.starts else ()
        return [VersionSpan(version, start, end) for (version, start), end in pairs if end > start]

    def unstarted(self) -> Output:
        """The answer of a request that was aborted before its first token."""
        return Output(
            request_id=self.request_id,
            token_ids=[],
            logprobs=[],
            ranks=[],
            finish_reason="abort",
            stop_reason=None,
            versions=[],
            prompt_length=len(self.prompt),
        )


class EndedSequence(NamedTuple):
    """A row that is done, and why."""

    row: int
    reason: FinishReason


class Batch:
    """`max_rows` rows of up to `max_length` tokens; memory grows by doubling."""

    def __init__(self, max_rows: int, max_length: int) -> None:
        self.max_rows = max_rows
        self.max_length = max_length
        self.sequences: list[Sequence] = []
        columns = min(max_length, 128)
        self.tokens = np.zeros((max_rows, columns), np.int64)  # the prompt's content, then what was sampled
        self.logprobs = np.zeros((max_rows, columns), np.float64)
        self.ranks = np.zeros((max_rows, columns), np.int64)
        self.length = np.zeros(max_rows, np.int64)
        self.prompt_length = np.zeros(max_rows, np.int64)
        self.offset = np.zeros(max_rows, np.int64)  # of a sampled token's place from its index
        self.limit = np.zeros(max_rows, np.int64)  # the length at which the answer is cut
        self.temperature = np.zeros(max_rows, np.float64)
        self.top_p = np.zeros(max_rows, np.float64)
        self.top_k = np.zeros(max_rows, np.int64)
        self.seed_key = np.zeros(max_rows, np.uint64)
        self.stops = np.full((max_rows, 1), -1, np.int64)  # padded with -1
        self.adapter = np.zeros(max_rows, np.int64)

    @property
    def n(self) -> int:
        return len(self.sequences)

    def generated(self, row: int) -> int:
        return int(self.length[row] - self.prompt_length[row])

    def join(self, sequence: Sequence) -> None:
        """Give the sequence the next free row, with its prompt in it."""
        row = sequence.row = self.n
        self.sequences.append(sequence)
        sampling, size = sequence.sampling, len(sequence.prompt)
        room = self.max_length - size
        most = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        self._reserve(size + most, len(sequence.stop_ids))
        self.tokens[row, :size] = sequence.content
        self.offset[row] = 0 if sequence.picture is None else sequence.picture.offset
        self.length[row] = self.prompt_length[row] = size
        self.limit[row] = size + most
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k
        self.seed_key[row] = sequence.seed_key
        self.adapter[row] = sequence.adapter
        self.stops[row] = -1
        self.stops[row, : len(sequence.stop_ids)] = sequence.stop_ids

    def extend(self, rows: Ints, sampled: Sampled) -> list[EndedSequence]:
        """Write one token to each of these rows; returns those that this ends."""
        at = self.length[rows]
        self.tokens[rows, at] = sampled.token_ids
        self.logprobs[rows, at] = sampled.logprobs
        self.ranks[rows, at] = sampled.ranks
        self.length[rows] += 1
        stopped = (self.stops[rows] == sampled.token_ids[:, None]).any(axis=1)
        done = np.flatnonzero(stopped | (self.length[rows] >= self.limit[rows]))
        return [EndedSequence(int(rows[i]), "stop" if stopped[i] else "length") for i in done]

    def written(self, row: int) -> Ints:
        """The tokens whose keys and values are in the cache: all but the last one sampled."""
        return self.tokens[row, : max(self.length[row] - 1, self.prompt_length[row])]

    def output(self, ended: EndedSequence) -> Output:
        """The answer of a row, as it stands."""
        row, sequence = ended.row, self.sequences[ended.row]
        start, end = int(self.prompt_length[row]), int(self.length[row])
        token_ids = self.tokens[row, start:end].tolist()
        by_request = ended.reason == "stop" and token_ids[-1] in sequence.sampling.stop_token_ids
        return Output(
            request_id=sequence.request_id,
            token_ids=token_ids,
            logprobs=self.logprobs[row, start:end].tolist(),
            ranks=self.ranks[row, start:end].tolist(),
            finish_reason=ended.reason,
            stop_reason=token_ids[-1] if by_request else None,
            versions=sequence.spans(end - start),
            prompt_length=start,
        )

    def leave(self, rows: list[int]) -> tuple[Ints, Ints]:
        """Free these rows; the last active ones move into the holes.

        Returns:
            (sources, targets): the moves, which the cache has to make too.
        """
        freed = set(rows)
        remaining = self.n - len(freed)
        targets = [row for row in sorted(freed) if row < remaining]
        sources = [row for row in range(remaining, self.n) if row not in freed]
        for row in freed:
            self.sequences[row].row = -1
        for source, target in zip(sources, targets, strict=True):
            self.sequences[target] = self.sequences[source]
            self.sequences[target].row = target
        del self.sequences[remaining:]
        if sources:
            for array in self._arrays():
                array[targets] = array[sources]
        return np.array(sources, np.int64), np.array(targets, np.int64)

    def _arrays(self) -> tuple[NDArray[np.generic], ...]:
        return (
            self.tokens,
            self.logprobs,
            self.ranks,
            self.length,
            self.prompt_length,
            self.offset,
            self.limit,
            self.temperature,
            self.top_p,
            self.top_k,
            self.seed_key,
            self.stops,
            self.adapter,
        )

    def _reserve(self, columns: int, stops: int) -> None:
        width = self.tokens.shape[1]
        if columns > width:
            while width < columns:
                width = min(2 * width, self.max_length)
            grown = ((0, 0), (0, width - self.tokens.shape[1]))
            self.tokens = np.pad(self.tokens, grown)
            self.logprobs = np.pad(self.logprobs, grown)
            self.ranks = np.pad(self.ranks, grown)
        if stops > self.stops.shape[1]:
            more = ((0, 0), (0, stops - self.stops.shape[1]))
            self.stops = np.pad(self.stops, more, constant_values=-1)
