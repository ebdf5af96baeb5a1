"""Rows that begin alike, laid out so that what they share stands once: a token trie, depth first, in one line.

Token `i` of a line may attend to token `j` exactly where `j <= i < end[j]`: `end` is where the subtree under `j` ends,
so what `i` sees is its own path from the root, as in a row of its own; its position is its depth. Lines that share
nothing may stand one behind the other, since each ends before the next begins. Pure numpy; what a layout costs is
counted in tokens, attention included, so that layouts can be compared before anything is computed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lightning_rl.training.batch import TrainingSequence
from lightning_rl.training.layers.attention import Segment, Size
from lightning_rl.vision import PlacedImage

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Line:
    """Rows that stand in one line: their numbers, in the order of their tokens; `shared`, how many tokens each has in
    common with the one before it; and how many tokens there are, each once."""

    rows: list[int]
    shared: list[int]
    tokens: int


@dataclass(frozen=True)
class Layout:
    """What is computed at once, B x T, padded to the right: `token_ids`, `position_ids` and `end`, int64 [B, T].

    `at` int64 [U]: the places, counted through [B, T], whose distributions are needed. Of the K trained tokens, in the
    order of the rows they were given in, `which` int64 [K] says which of `at` is theirs; `targets` int64 [K],
    `temperature` float32 [K]. `distinct` counts the tokens that are no padding. `masked`: attention follows `end`; else
    it is causal, every row alone. `images` are those of the rows, in the order that they were given in. `segments`: the
    branches that `end` describes; none where they were not asked for.
    """

    token_ids: Ints
    position_ids: Ints
    end: Ints
    at: Ints
    which: Ints
    targets: Ints
    temperature: NDArray[np.float32]
    distinct: int
    masked: bool
    segments: list[Segment]
    images: list[tuple[PlacedImage, ...]]


def alone(sequences: Sequence[TrainingSequence]) -> list[Line]:
    """Every row in a line of its own."""
    return [Line([number], [0], len(sequence)) for number, sequence in enumerate(sequences)]


def shared_lines(
    sequences: Sequence[TrainingSequence],
    attention: float,
    *,
    max_rows: int | None = None,
    max_tokens: int | None = None,
) -> list[Line]:
    """The rows in lines of at most `max_rows` rows and `max_tokens` tokens (a longer row stands alone).

    A row joins the one before it, in the order of their tokens, where that costs less than a line of its own: what is
    shared is saved, but attention grows with the square of a line. So groups that have no more in common than a short
    system prompt stay apart.

    Args:
        attention: what a token that stands in a line costs each token of the line, where its own work costs 1.
    """
    if not sequences:
        return []
    order, shared = prefix_order(sequences)
    lines: list[Line] = []
    for number, common in zip(order, shared, strict=True):
        length = len(sequences[number])
        if lines:
            last = lines[-1]
            tokens = last.tokens + length - common
            saves = cost(1, tokens, attention) < cost(1, last.tokens, attention) + cost(1, length, attention)
            full = max_rows is not None and len(last.rows) >= max_rows
            if common and saves and not full and (max_tokens is None or tokens <= max_tokens):
                lines[-1] = Line([*last.rows, number], [*last.shared, common], tokens)
                continue
        lines.append(Line([number], [0], length))
    return lines


def cost(width: int, length: int, attention: float) -> float:
    """What `width` lines of `length` tokens cost, in tokens without attention."""
    return width * length * (1 + attention * length)


def stacked(lines: Sequence[Line]) -> list[list[int]]:
    """Which lines stand behind each other, so that none is longer than the longest: the long ones first, each where
    there is room."""
    room: list[int] = []
    rows: list[list[int]] = []
    longest = max(line.tokens for line in lines)
    for number in sorted(range(len(lines)), key=lambda n: -lines[n].tokens):
        place = _place(room, lines[number].tokens)
        if place == len(room):
            room.append(longest)
            rows.append([])
        room[place] -= lines[number].tokens
        rows[place].append(number)
    return rows


def cut(
    lines: Sequence[Line], *, rows: int | None, tokens: int | None, fits: Callable[[list[int]], bool]
) -> Iterator[list[int]]:
    """Lines of like length together, the longest first, as the numbers of their rows: at most `rows` rows, at most
    `tokens` tokens with padding. `fits` has the last word; a line that does not fit comes alone."""
    waiting = sorted(lines, key=lambda line: -line.tokens)
    while waiting:
        take = _first(waiting, rows, tokens)
        while take > 1 and not fits([row for line in waiting[:take] for row in line.rows]):
            take -= 1
        yield [row for line in waiting[:take] for row in line.rows]
        waiting = waiting[take:]


def sizes(sequences: Sequence[TrainingSequence], line: Line) -> list[Size]:
    """The segments of a line, before it is laid out."""
    segments: list[Size] = []
    path: list[tuple[int, int, bool]] = []  # where each branch of the present row begins and ends; whether it has forks
    for number, shared in zip(line.rows, line.shared, strict=True):
        length = len(sequences[number])
        while path and path[-1][0] >= shared:
            begin, end, _ = path.pop()
            segments.append(Size(begin, end - begin))
        if path:
            begin, end, forked = path[-1]
            if shared == end and not forked:  # the row before it goes on
                path[-1] = begin, length, False
                continue
            if shared < end:
                segments.append(Size(shared, end - shared))
            path[-1] = begin, shared, True
        if shared < length:
            path.append((shared, length, False))
    return segments + [Size(begin, end - begin) for begin, end, _ in path]


def lay_out(
    sequences: Sequence[TrainingSequence], lines: Sequence[Line], pad_id: int, *, masked: bool, segments: bool = False
) -> Layout:
    """`lines` of `sequences` as arrays; where `masked`, short lines fill the room behind others."""
    rows = stacked(lines) if masked else [[number] for number in range(len(lines))]
    shape = len(rows), max(line.tokens for line in lines)
    token_ids = np.full(shape, pad_id, dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    end = np.broadcast_to(np.arange(1, shape[1] + 1), shape).copy()  # padding sees itself
    at: list[Ints] = [np.empty(0, np.int64)] * len(sequences)
    all_segments: list[Segment] = []
    for row, numbers in enumerate(rows):
        start = 0
        for number in numbers:
            line = lines[number]
            span = slice(start, start + line.tokens)
            paths = _write(sequences, line, start, token_ids[row], position_ids[row], end[row, span])
            for own, path in zip(line.rows, paths, strict=True):
                at[own] = row * shape[1] + path[sequences[own].trained - 1]
            start += line.tokens
        if segments:
            all_segments += _segments(end[row, :start], row * shape[1])
    places, which = np.unique(np.concatenate(at), return_inverse=True)
    return Layout(
        token_ids=token_ids,
        position_ids=position_ids,
        end=end,
        at=places,
        which=which,
        targets=np.concatenate([s.token_ids[s.trained] for s in sequences]),
        temperature=np.concatenate([s.temperature for s in sequences]),
        distinct=sum(line.tokens for line in lines),
        masked=masked,
        segments=all_segments,
        images=[s.images for s in sequences],
    )


def _write(
    sequences: Sequence[TrainingSequence], line: Line, start: int, token_ids: Ints, position_ids: Ints, end: Ints
) -> list[Ints]:
    """Write a line from `start` on; `end` is its own part. Where the tokens of each of its rows stand."""
    paths: list[Ints] = []
    path = np.empty(0, dtype=np.int64)
    place = start
    for number, shared in zip(line.rows, line.shared, strict=True):
        own = sequences[number].token_ids[shared:]
        end[path[shared:] - start] = place  # what stands deeper than the fork is seen by nothing from here on
        added = np.arange(place, place + len(own))
        token_ids[added] = own
        position_ids[added] = np.arange(shared, shared + len(own))
        path = np.concatenate([path[:shared], added])
        paths.append(path)
        place += len(own)
    end[path - start] = place
    return paths


def _segments(end: Ints, first: int) -> list[Segment]:
    """The segments of a row without its padding, whose first place is counted as `first`: a branch ends where `end`
    changes, since a fork is where a subtree goes on behind that of the next token."""
    begins = np.flatnonzero(np.diff(end, prepend=-1))
    lengths = np.diff(begins, append=len(end))
    return [
        Segment(first + int(begin), int(length), first + np.flatnonzero(end[:begin] > begin))
        for begin, length in zip(begins, lengths, strict=True)
    ]


def prefix_order(sequences: Sequence[TrainingSequence]) -> tuple[list[int], list[int]]:
    """The rows by their tokens, a row before those it is a prefix of; and what each shares with the one before it."""
    keys = [sequence.token_ids.astype(">i8").tobytes() for sequence in sequences]
    order = sorted(range(len(sequences)), key=keys.__getitem__)
    shared = [_common(sequences[a].token_ids, sequences[b].token_ids) for a, b in pairwise(order)]
    return order, [0, *shared]


def _common(a: Ints, b: Ints) -> int:
    least = min(len(a), len(b))
    differ = a[:least] != b[:least]
    first = int(differ.argmax()) if least else 0
    return first if least and differ[first] else least


def _place(room: list[int], tokens: int) -> int:
    """The first place with room for `tokens`; a new one where there is none."""
    return next((place for place, free in enumerate(room) if free >= tokens), len(room))


def _first(waiting: list[Line], rows: int | None, tokens: int | None) -> int:
    """How many of `waiting`, at least one, stay within `rows` and `tokens` when they are stacked."""
    longest = waiting[0].tokens
    room: list[int] = []
    held = 0
    for count, line in enumerate(waiting):
        held += len(line.rows)
        place = _place(room, line.tokens)
        if place == len(room):
            room.append(longest)
        room[place] -= line.tokens
        if count and ((rows is not None and held > rows) or (tokens is not None and len(room) * longest > tokens)):
            return count
    return len(waiting)
