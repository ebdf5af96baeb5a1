"""Teachers: what other models say of the tokens that the policy sampled, behind the very tokens that it saw.

A teacher is a frozen model in the trainer's process, as the reference is, or servers that have one. It is asked
about whole rows, so each path of a rollout's forest is scored once, however many calls are on it. Which teacher a call
has is the caller's to say; a token of a call without one is NaN, and has no part in the loss against the teacher.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lightning_rl.errors import Explained
from lightning_rl.inference.servers.errors import Unreached
from lightning_rl.inference.sglang import Scorer, ScorerUnreached, ScoresRefused
from lightning_rl.inference.vllm.control import Control, VllmRefused
from lightning_rl.training.batch import OF_TEACHER, TrainingSequence
from lightning_rl.training.forward import Forward
from lightning_rl.training.reference import Reference

_AT_ONCE = 16  # requests to each server
_AWAY_SECONDS = 5.0  # between two tries of a server that does not answer
_BUSY = (429, 502, 503, 504)  # HTTP statuses of a server that will answer later
_KEPT = 8  # batches for which what was asked ahead is kept

_log = logging.getLogger(__name__)
TeacherOf = Callable[[TrainingSequence, str], str | None]


class TeacherRefused(Explained, ValueError):
    """A teacher cannot say anything of these tokens."""


class Scores(NamedTuple):
    """What a teacher says of the K trained tokens of a row: `log_probs` (nats), float32 [K]; and where they are asked
    for its C most likely tokens in the place of each, int64 [K, C], with their log probabilities, float32 [K, C]."""

    log_probs: NDArray[np.float32]
    top_ids: NDArray[np.int64] | None = None
    top_log_probs: NDArray[np.float32] | None = None


class Teacher(Protocol):
    """Whoever scores rows."""

    def score(self, sequences: list[TrainingSequence], top: int) -> list[Scores]:
        """Per sequence what is said of its trained tokens, with the `top` most likely ones (0: without)."""
        ...


def ask_ahead(
    sequences: Sequence[TrainingSequence], teachers: Mapping[str, Teacher], teacher_of: TeacherOf, top: int
) -> None:
    """Have the teachers on servers begin with sequences of which `ask_teachers` will ask later; returns at once."""
    for sequence in sequences:
        for name in {teacher_of(sequence, call_id) for call_id, _, _ in sequence.trained_by_call()}:
            teacher = None if name is None else teachers[name]
            if isinstance(teacher, ServedTeacher):
                teacher.begin(sequence, top)


def ask_teachers(
    sequences: Sequence[TrainingSequence], teachers: Mapping[str, Teacher], teacher_of: TeacherOf, top: int
) -> None:
    """Give the sequences what their calls' teachers say of their trained tokens: `teacher_log_probs`, and with `top`
    the `top` most likely tokens of each place.

    `teacher_of` says, of a call in a sequence, by which of `teachers` it is taught (None: by none).
    """
    taught: dict[str, list[tuple[TrainingSequence, NDArray[np.int64]]]] = {name: [] for name in teachers}
    for sequence in sequences:
        _put_nothing(sequence, top)
        of_teacher: dict[str, list[NDArray[np.int64]]] = {}
        for call_id, where, _ in sequence.trained_by_call():
            if (name := teacher_of(sequence, call_id)) is not None:
                of_teacher.setdefault(name, []).append(where)
        for name, places in of_teacher.items():
            taught[name].append((sequence, np.concatenate(places)))
    for name, rows in taught.items():
        if rows:
            for (sequence, where), scores in zip(
                rows, teachers[name].score([sequence for sequence, _ in rows], top), strict=True
            ):
                _put(sequence, where, scores)


def put_taught(
    sequences: Sequence[TrainingSequence],
    rows: Iterable[tuple[TrainingSequence, NDArray[np.int64], TrainingSequence]],
    top: int,
) -> None:
    """Give the sequences what teachers said of other rows with the same tokens: of the tokens at `where` of a sequence
    what was said of the trained tokens of its row. `rows` are (sequence, where, row); the others have no teacher."""
    for sequence in sequences:
        _put_nothing(sequence, top)
    for sequence, where, row in rows:
        for name in OF_TEACHER:
            if (values := getattr(row, name)) is not None:
                getattr(sequence, name)[where] = values


def _put_nothing(sequence: TrainingSequence, top: int) -> None:
    nothing = _nothing(len(sequence.trained), top)
    sequence.teacher_log_probs = nothing.log_probs
    if top:
        sequence.teacher_top_ids, sequence.teacher_top_log_probs = nothing.top_ids, nothing.top_log_probs


def _put(sequence: TrainingSequence, where: NDArray[np.int64], scores: Scores) -> None:
    assert sequence.teacher_log_probs is not None
    sequence.teacher_log_probs[where] = scores.log_probs[where]
    if scores.top_ids is not None and scores.top_log_probs is not None:
        assert sequence.teacher_top_ids is not None
        assert sequence.teacher_top_log_probs is not None
        sequence.teacher_top_ids[where] = scores.top_ids[where]
        sequence.teacher_top_log_probs[where] = scores.top_log_probs[where]


class FrozenTeacher(Reference):
    """A causal LM that is never trained. Each token is scored at the temperature at which it was sampled, as the policy
    is.

    Args:
        model, pad_id, options: as of `Reference`.
        vocabulary: tokens that the tokenizer has; logits beyond them, which models are padded with, are no tokens.
    """

    def __init__(self, model: nn.Module, pad_id: int, vocabulary: int | None = None, **options: Any) -> None:
        super().__init__(model, pad_id, **options)
        self._vocabulary = vocabulary

    def score(self, sequences: list[TrainingSequence], top: int) -> list[Scores]:
        """As `Teacher.score`."""
        with self._place.in_use():
            cut = self._forward.micro_batches(sequences, rows=self._rows, tokens=self._tokens)
            return _score(self._forward, sequences, cut, top, self._vocabulary)


class AveragedTeacher(FrozenTeacher):
    """The policy's weights as they were, averaged: after an update each goes `rate` of the way to the policy's.

    Args:
        model: the causal LM that it begins with, of the policy's form.
        rate: 1: the policy's present weights.
    """

    def __init__(self, model: nn.Module, pad_id: int, vocabulary: int | None, rate: float, **options: Any) -> None:
        super().__init__(model, pad_id, vocabulary, **options)
        self.weights = dict(model.named_parameters())
        self._rate = rate

    def follow(self, policy: nn.Module) -> None:
        """Go towards the policy."""
        with self._place.in_use(), torch.no_grad():
            there = dict(policy.named_parameters())
            for name, weight in self.weights.items():
                weight.lerp_(there[name].to(weight.dtype), self._rate)


class PolicyAsTeacher:
    """The policy itself, as it is when it is asked; `within` may put it into another state meanwhile."""

    def __init__(
        self,
        forward: Forward,
        vocabulary: int | None = None,
        *,
        rows: int | None = None,
        tokens: int | None = None,
        within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._forward, self._vocabulary, self._within = forward, vocabulary, within
        self._rows, self._tokens = rows, tokens

    def score(self, sequences: list[TrainingSequence], top: int) -> list[Scores]:
        """As `Teacher.score`."""
        with self._within():
            cut = self._forward.micro_batches(sequences, rows=self._rows, tokens=self._tokens)
            return _score(self._forward, sequences, cut, top, self._vocabulary)


def _score(
    forward: Forward,
    sequences: list[TrainingSequence],
    cut: Iterator[list[TrainingSequence]],
    top: int,
    vocabulary: int | None,
) -> list[Scores]:
    """What a model says of the trained tokens of sequences, computed in the parts `cut`."""
    by_id: dict[int, Scores] = {}
    with forward.without_gradient():
        for micro in cut:
            sizes = [len(sequence.trained) for sequence in micro]
            parts: tuple[torch.Tensor, ...] = (
                forward.top_log_probs(micro, top, vocabulary) if top else forward.log_probs(micro)[:1]
            )
            split = zip(*(torch.split(part.cpu(), sizes) for part in parts), strict=True)
            by_id |= {id(s): _scores(*own) for s, own in zip(micro, split, strict=True)}
        return forward.gathered(sequences, by_id)


def _scores(log_probs: torch.Tensor, *of_top: torch.Tensor) -> Scores:
    if not of_top:
        return Scores(log_probs.float().numpy())
    ids, top = of_top
    return Scores(log_probs.float().numpy(), ids.numpy(), top.float().numpy())


class ServedTeacher:
    """A model on servers of vLLM or SGLang, which are asked for the log probabilities of a prompt: the row.

    They give those of temperature 1, so only tokens that were sampled at it can be taught, and of text alone.

    Args:
        name: what messages call it.
        urls: the servers; rows are dealt out among them.
        vocabulary: tokens that the policy's tokenizer has.
        when_away: a server does not answer, or says that it is busy: `wait` until it does, or `skip` the row, of
            which NaN is said then.

    `skipped` counts such rows among those that were given to `score`. Whoever makes one calls `close`.
    """

    def __init__(
        self, name: str, urls: Sequence[str], vocabulary: int, when_away: Literal["wait", "skip"] = "wait"
    ) -> None:
        self._name, self._vocabulary, self._urls, self._when_away = name, vocabulary, urls, when_away
        self._turn = itertools.count()
        self._begun: dict[tuple[bytes, bytes, int], tuple[int, Future[Scores]]] = {}  # by row; and before which batch
        self._batches = 0
        self._away: set[str] = set()  # servers, of which it was said
        self._closed = threading.Event()
        self.skipped = 0

    @cached_property
    def _servers(self) -> list[Control | Scorer]:
        scorers = [Scorer(url) for url in self._urls]
        return [scorer if scorer.is_there() else Control(scorer.url) for scorer in scorers]

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_AT_ONCE * len(self._servers), f"teacher {self._name}")

    def begin(self, sequence: TrainingSequence, top: int) -> None:
        """Ask about a row that `score` will be given later."""
        if _cannot(sequence) is None and (row := _row(sequence, top)) not in self._begun:
            self._begun[row] = self._batches, self._submit(sequence, top)

    def score(self, sequences: list[TrainingSequence], top: int) -> list[Scores]:
        """As `Teacher.score`. Raises TeacherRefused for rows that it cannot score and for a server that does not say
        what it is asked; VllmRefused and ScoresRefused for one that answers with an error."""
        for sequence in sequences:
            if why := _cannot(sequence):
                raise TeacherRefused(f"teacher {self._name}: rollout {sequence.rollout} of the batch {why}")
        pending = []
        for sequence in sequences:
            _, begun = self._begun.pop(_row(sequence, top), (0, None))
            pending.append(begun or self._submit(sequence, top))
        self._batches += 1
        self._begun = {row: (batch, of) for row, (batch, of) in self._begun.items() if batch + _KEPT > self._batches}
        scores = [each.result() for each in pending]
        self.skipped += sum(len(each.log_probs) > 0 and bool(np.isnan(each.log_probs).all()) for each in scores)
        return scores

    def close(self) -> None:
        """Wait for no server any more."""
        self._closed.set()
        if "_pool" in self.__dict__:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, sequence: TrainingSequence, top: int) -> "Future[Scores]":
        server = self._servers[next(self._turn) % len(self._servers)]
        return self._pool.submit(self._score, server, sequence, top)

    def check(self, probe: Sequence[tuple[str, list[int]]]) -> None:
        """Whether each server writes these texts with these token ids, as the policy does.

        Raises TeacherRefused where it does not, and what `score` raises.
        """
        for server in self._servers:
            for text, token_ids in probe:
                try:
                    ids = server.tokenize(text)
                except (KeyError, TypeError) as error:
                    raise self._refused(server, f"the tokens of a text ({type(error).__name__}: {error})") from error
                if ids != token_ids:
                    raise TeacherRefused(
                        f"teacher {self._name}: the server at {server.url} writes {text!r} as the tokens {ids}, and "
                        f"the policy as {token_ids}: a teacher of another tokenizer cannot score the policy's tokens. "
                        "Take one with the same tokenizer, or let the policy learn from its answers as text, by "
                        "supervised training (sft.teacher; docs/sft.md)"
                    )

    def _score(self, server: Control | Scorer, sequence: TrainingSequence, top: int) -> Scores:
        try:
            entries = self._entries_of(server, sequence.token_ids.tolist(), top)
        except (VllmRefused, ScoresRefused) as error:
            of_vllm = "--max-model-len of at least one token more, and --max-logprobs of at least so many"
            error.add_note(
                f"teacher {self._name} was asked about {len(sequence)} tokens, the {top} most likely of each place: "
                f"the server needs {of_vllm if isinstance(error, VllmRefused) else '--context-length for them'}"
            )
            raise
        if entries is None:
            return _nothing(len(sequence.trained), top)
        if len(entries) != len(sequence):
            raise self._refused(server, f"log probabilities of {len(sequence)} tokens, and it told of {len(entries)}")
        try:
            scored = [_entry(entries[place], int(sequence.token_ids[place]), top) for place in sequence.trained]
        except msgspec.ValidationError as error:
            raise self._refused(server, f"log probabilities of a prompt's tokens ({error})") from error
        log_probs = np.asarray([own for own, *_ in scored], np.float32)
        if not top:
            return Scores(log_probs)
        ids = np.asarray([ids for _, ids, _ in scored], np.int64).reshape(-1, top)
        if ids.size and ids.max() >= self._vocabulary:
            raise TeacherRefused(
                f"teacher {self._name} finds token {ids.max()} likely, and the policy's tokenizer has "
                f"{self._vocabulary} tokens: take a teacher with the same tokenizer"
            )
        return Scores(log_probs, ids, np.asarray([likely for *_, likely in scored], np.float32).reshape(-1, top))

    def _refused(self, server: Control | Scorer, question: str) -> TeacherRefused:
        return TeacherRefused(
            f"teacher {self._name}: the server at {server.url} did not answer what it was asked: {question}. Is it "
            "vLLM or SGLang of a version that docs/engines.md names, reached without anything between that changes "
            "answers?"
        )

    def _entries_of(self, server: Control | Scorer, token_ids: list[int], top: int) -> list[dict[str, Any]] | None:
        """What a server says; None where it is away and nobody waits for it."""
        while True:
            try:
                entries = server.score(token_ids, top)
            except (Unreached, VllmRefused, ScoresRefused) as error:
                if not _is_away(error):
                    raise
                if server.url not in self._away:
                    self._away.add(server.url)
                    effect = "the step waits for it" if self._when_away == "wait" else "the step goes on without it"
                    _log.warning("teacher %s: %s; %s (distillation.when_away)", self._name, error, effect)
                if self._when_away == "skip":
                    return None
                if self._closed.wait(_AWAY_SECONDS):
                    raise
            else:
                if server.url in self._away:
                    self._away.discard(server.url)
                    _log.warning("teacher %s: the server at %s answers again", self._name, server.url)
                return entries


def _row(sequence: TrainingSequence, top: int) -> tuple[bytes, bytes, int]:
    """What is asked of a server."""
    return sequence.token_ids.tobytes(), sequence.trained.tobytes(), top


def _cannot(sequence: TrainingSequence) -> str | None:
    """Why servers cannot score a row."""
    if len(sequence.temperature) and not (sequence.temperature == 1).all():
        return (
            f"was sampled at temperature {sequence.temperature[sequence.temperature != 1][0]:g}, and servers give the "
            "log probabilities of a prompt at temperature 1 only: set actor_rollout_ref.rollout.temperature=1, or give "
            "the teacher as a folder (model_path)"
        )
    if sequence.images:
        return "shows images, and servers score text alone: give the teacher as a folder (model_path)"
    return None


def _nothing(trained: int, top: int) -> Scores:
    """Of tokens that nobody scored."""
    nan = np.full(trained, np.nan, np.float32)
    if not top:
        return Scores(nan)
    ids = np.tile(np.arange(top, dtype=np.int64), (trained, 1))
    return Scores(nan, ids, np.full((trained, top), np.nan, np.float32))


class _ScoredToken(msgspec.Struct):
    """What a server says of one token at a place."""

    logprob: float
    rank: int


def _entry(entry: Mapping[str, Any], token_id: int, top: int) -> tuple[float, list[int], list[float]]:
    """Of one place of a prompt: the log probability of its token, and the `top` most likely ones, by rank. Raises
    msgspec.ValidationError where it has not both."""
    by_token = msgspec.convert(entry, dict[int, _ScoredToken], strict=False)
    ranked = sorted(by_token.items(), key=lambda item: item[1].rank)[:top]
    if token_id not in by_token or len(ranked) < top:
        raise msgspec.ValidationError(
            f"of token {token_id} and the {top} most likely ones it told of {sorted(by_token)}"
        )
    return by_token[token_id].logprob, [each for each, _ in ranked], [one.logprob for _, one in ranked]


def _is_away(error: Unreached | VllmRefused | ScoresRefused) -> bool:
    """Whether a server will answer later."""
    return isinstance(error, Unreached | ScorerUnreached) or error.status in _BUSY
