"""The embedded engine: one model in one thread of its own, which any thread may ask for answers.

Invariant: what changes (`ContinuousBatch` with its weights, who waits, pauses) is touched by the engine's thread
alone, between two steps; other threads leave orders and get events. Every accepted request ends with
exactly one `Output` or one `Failure`.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial as bind
from operator import attrgetter
from random import Random
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_rl.inference.batch import EndedSequence, Sequence, picture_of
from lightning_rl.inference.continuous_batch import ContinuousBatch, Step
from lightning_rl.inference.sampler import Sampled, stream_key
from lightning_rl.inference.sequence import Event, Failure, GenerationRequest, Output, Token
from lightning_rl.inference.weights.stream import BUCKET_BYTES, WeightStream, buckets
from lightning_rl.processes.openmp import end_threads
from lightning_rl.vision import ModelVision

Ints = NDArray[np.int64]
Outbox = Callable[[list[Event]], None]
PauseMode = Literal["keep", "wait", "abort"]

DEFAULT_MAX_MODEL_LEN = 2048


class EngineStopped(RuntimeError):
    """The engine is not running, and cannot take or finish requests."""


class _Order:
    """Something to do between two steps, and the future of whoever waits for it."""

    __slots__ = ("done", "run")

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self.done: Future[None] = Future()


class _Served:
    """The engine's model, or an adapter over it, as those see it who ask for it: its pauses."""

    def __init__(self) -> None:
        self.admitting = True
        self.frozen = False
        self.held: list[Sequence] = []  # that came during a pause
        self.quiet: list[Future[None]] = []  # of those who wait for a pause to take hold


class EmbeddedEngine:
    """Samples from a transformers causal LM for many requests at once, also with several adapters over it.

    Args:
        model: the model; the engine owns it from here on (give it a copy of what you train).
        max_num_seqs: requests that are written at the same time; others wait, by priority and in order of arrival.
        max_model_len: tokens of prompt and answer together; by default what the model's config allows, at most 2048
            or `expected_len`, where that is more.
        expected_len: tokens that the longest sequences are expected to have.
        seed: of the seeds that requests without one get.
        eos_token_ids: end tokens; by default those of the model's generation config.
        prefix_rows: how many prompts and answers are kept for prompts that begin like them; by
            default `max_num_seqs`, 0 keeps none.
        version: the policy version of the weights that `model` has.
        name: by which the server lists the model.
        vision: how `model` sees images; None for one that reads text alone.
        threads: cores that one decode step may use; by default what torch takes. Small models on a busy machine
            are fastest with one.

    Raises:
        ValueError: the architecture cannot be run, or a limit is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
        expected_len: int = 0,
        seed: int = 0,
        version: int = 0,
        eos_token_ids: Iterable[int] | None = None,
        prefix_rows: int | None = None,
        name: str = "policy",
        threads: int | None = None,
        vision: ModelVision | None = None,
    ) -> None:
        self._threads = threads
        self._vision = vision
        allowed = _max_positions(model)
        self.max_model_len = max_model_len or min(allowed, max(DEFAULT_MAX_MODEL_LEN, expected_len))
        if not 2 <= self.max_model_len <= allowed:
            raise ValueError(f"max_model_len {max_model_len} is not in 2..{allowed} (max_position_embeddings)")
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
        self.name = name
        self.max_num_seqs = max_num_seqs
        self._served = [_Served()]  # by number; the adapters begin at 1
        self.eos_token_ids = tuple(_eos(model) if eos_token_ids is None else eos_token_ids)
        kept = max_num_seqs if prefix_rows is None else prefix_rows
        self._batch = ContinuousBatch(model, max_num_seqs, self.max_model_len, kept, version)
        self._policy = self._batch.policy
        self._waiting: deque[Sequence] = deque()
        self._by_priority = False  # whether any request ever had one
        self._outboxes: dict[str, Outbox] = {}  # of every request in flight
        self._streams: dict[str, Outbox] = {}  # of those that want each token
        self._sequences: dict[str, Sequence] = {}
        self._events: dict[Outbox, list[Event]] = {}
        self._seeds = Random(seed)
        self._orders: deque[_Order] = deque()
        self._wake = threading.Condition()
        self._state: Literal["new", "running", "stopped"] = "new"
        self._stopping = False
        self._thread_id: int | None = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._run_future: Future[None] | None = None

    # Any thread.

    def add_adapter(self) -> int:
        """Make room for an adapter, which changes nothing until its first update; its number. Before `start`."""
        if self._state != "new":
            raise EngineStopped("adapters are added before the engine is started")
        self._served.append(_Served())
        self._batch.versions.append(0)
        return len(self._served) - 1

    def start(self) -> None:
        """Begin to serve. An engine is started once."""
        with self._wake:
            if self._state != "new":
                raise EngineStopped("an engine is started once: make another")
            self._state = "running"
        self._run_future = self._executor.submit(self._run)
        self._run_future.add_done_callback(lambda run: self._close(run.exception()))

    def stop(self) -> None:
        """End the thread; what is in flight ends with reason "abort". Raises what stopped it before."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._executor.shutdown(wait=True)
        if self._run_future is None:
            self._close(None)
        else:
            self._run_future.result()

    def check(self) -> None:
        """Raises what ended the thread, when something has."""
        if self._run_future is not None and self._run_future.done():
            self._run_future.result()

    def __enter__(self) -> "EmbeddedEngine":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def submit(self, request: GenerationRequest, on_token: Callable[[Token], None] | None = None) -> Future[Output]:
        """Ask for one answer.

        Args:
            request: the prompt and how to sample.
            on_token: called on the engine's thread with every token as it is made; must be quick.

        Raises:
            ValueError: the prompt does not fit, a token id is not in the vocabulary, or the id is
                in flight.
            EngineStopped: the engine does not run.
        """
        future: Future[Output] = Future()

        def outbox(events: list[Event]) -> None:
            for event in events:
                if isinstance(event, Output):
                    future.set_result(event)
                elif isinstance(event, Failure):
                    future.set_exception(event.error)
                elif on_token is not None:
                    on_token(event)

        future.set_running_or_notify_cancel()
        self.post([request], outbox, stream=on_token is not None)
        return future

    def post(self, requests: Iterable[GenerationRequest], outbox: Outbox, *, stream: bool = False) -> None:
        """Ask for several answers; all or none are taken.

        Args:
            requests: as in `submit`.
            outbox: called on the engine's thread, once per step that has news for it, with all of that
                step's events; must be quick.
            stream: whether `Token` events are wanted beside the final ones.

        Raises: as `submit`.
        """
        sequences = [self._sequence(request) for request in requests]
        ids = [sequence.request_id for sequence in sequences]
        with self._wake:
            if self._state == "stopped" or self._stopping:
                raise EngineStopped("the engine is stopped")
            known = self._outboxes.keys() & set(ids)
            if known or len(set(ids)) < len(ids):
                raise ValueError(f"request_id {min(known or ids)!r} is already in flight")
            self._outboxes.update(dict.fromkeys(ids, outbox))
            if stream:
                self._streams.update(dict.fromkeys(ids, outbox))
            self._orders.append(_Order(lambda: self._accept(sequences)))
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        """End a request with what it has, reason "abort"; nothing happens if it is not in flight."""
        with self._wake:
            self._orders.append(_Order(lambda: self._abort([request_id])))
            self._wake.notify()

    def update_weights(
        self, weights: nn.Module | Mapping[str, Tensor] | WeightStream, version: int, *, partial: bool = False
    ) -> None:
        """Take new weights between two steps; returns when they are in.

        Generations in flight go on with them (their cache keeps what the old weights wrote), and
        their version spans say from which token on.

        Args:
            weights: a model of the same architecture, or its state dict; must not change meanwhile. Of a stream one
                bucket is here at a time; where it breaks off, nothing is sampled until all weights have come.
            version: the policy version of every token sampled from here on.
            partial: `weights` are those that changed (as an adapter's: `training.lora.changed`); the others stay.

        Raises:
            ValueError: names or shapes do not match; the old weights stay.
        """
        if not isinstance(weights, WeightStream):
            state = weights.state_dict() if isinstance(weights, nn.Module) else weights
            self._call(lambda: self._batch.load(state, version, partial=partial))
        else:
            shapes = {name: each.shape for name, each in weights.described.items()}
            self._call(lambda: self._policy.require_fitting(shapes, partial=partial))
            self._call(lambda: self._batch.tear(partial=partial))
            for bucket in buckets(weights, BUCKET_BYTES):
                self._call(bind(self._policy.put, bucket))
            self._call(lambda: self._batch.updated(version))

    def update_adapter(self, adapter: int, weights: Mapping[str, Tensor] | WeightStream, version: int) -> None:
        """Replace an adapter between two steps; returns when it is in. Answers with other adapters go on untouched.

        Args:
            adapter: its number.
            weights: its matrices (`training.lora.low_rank`); none: it changes nothing.
            version: the policy version of every token sampled with it from here on.

        Raises:
            ValueError: the matrices are not of this model; the old ones stay.
        """
        whole = dict(weights)  # it is small
        self._call(lambda: self._batch.put_adapter(adapter, whole, version))

    def pause(self, mode: PauseMode = "keep", adapter: int = 0) -> None:
        """Stop sampling with that adapter; requests are still taken and wait for `resume`. Returns when it is quiet.

        Args:
            mode: "keep" freezes what is in flight until `resume`; "wait" lets it finish first; "abort"
                ends it with reason "abort".
        """
        quiet: Future[None] = Future()
        self._call(lambda: self._pause(mode, quiet, adapter))
        if self._state != "new":
            quiet.result()

    def resume(self, adapter: int = 0) -> None:
        """Go on after `pause`."""
        self._call(lambda: self._resume(adapter))

    def paused(self, adapter: int = 0) -> bool:
        """Whether requests with that adapter wait."""
        return not self._served[adapter].admitting

    def version(self, adapter: int = 0) -> int:
        """The policy version that is sampled with that adapter."""
        return self._batch.versions[adapter]

    @property
    def in_flight(self) -> int:
        """Requests taken and not yet ended."""
        return len(self._outboxes)

    @property
    def running(self) -> bool:
        return self._state == "running" and not self._stopping

    def _sequence(self, request: GenerationRequest) -> Sequence:
        prompt = np.asarray(request.token_ids, dtype=np.int64)
        if not 1 <= len(prompt) < self.max_model_len:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens does not fit: max_model_len is {self.max_model_len}, so a prompt "
                f"has 1 to {self.max_model_len - 1} tokens; shorten the conversation, or "
                "raise actor_rollout_ref.rollout.max_model_len where the model allows it"
            )
        if prompt.min() < 0 or prompt.max() >= self._policy.vocab_size:
            raise ValueError(
                f"token ids must be in 0..{self._policy.vocab_size - 1}, got {int(prompt.min())}..{int(prompt.max())}"
            )
        if not 0 <= request.adapter < len(self._served):
            raise ValueError(f"there is no adapter {request.adapter}: the engine has {len(self._served) - 1}")
        sampling = request.sampling
        seed = self._seeds.getrandbits(64) if sampling.seed is None else sampling.seed
        stops = sampling.stop_token_ids + (() if sampling.ignore_eos else self.eos_token_ids)
        picture = picture_of(prompt, request.images, self._vision) if request.images else None
        return Sequence(request, prompt, stream_key(seed), stops, picture)

    def _order(self, function: Callable[[], None]) -> "Future[None]":
        order = _Order(function)
        with self._wake:
            if self._state != "running" or self._stopping:
                raise EngineStopped("the engine does not run")
            self._orders.append(order)
            self._wake.notify()
        return order.done

    def _call(self, function: Callable[[], None]) -> None:
        """Run the function on the engine's thread, and wait; here, when that has not begun."""
        if self._state == "new":
            function()
        else:
            self._leave_cores()
            self._order(function).result()

    def _leave_cores(self) -> None:
        """The calling thread computes no more for now: the trainer's, which gives new weights, or the engine's."""
        if self._threads != 1:  # else the engine has no threads that another's could hinder
            end_threads()

    # The engine's thread.

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)  # of this thread alone: OpenMP keeps the number by thread
        with torch.inference_mode():
            while self._take_orders():
                if self._can_step():
                    self._step()
                self._deliver()
                self._tell_quiet()
                if not self._can_step():
                    self._leave_cores()
            self._abort(list(self._sequences))
            self._deliver()

    def _take_orders(self) -> bool:
        """Wait for something to do, and carry out the orders; False when it is time to end."""
        with self._wake:
            while not (self._orders or self._stopping or self._can_step()):
                self._wake.wait()
            orders, self._orders = self._orders, deque()
        for order in orders:
            try:
                order.run()
            except ValueError as error:
                order.done.set_exception(error)
            else:
                order.done.set_result(None)
        return not self._stopping

    def _can_step(self) -> bool:
        return not self._batch.torn and (bool(self._waiting and self._batch.free) or self._going.size > 0)

    @property
    def _going(self) -> Ints:
        """The rows that are not frozen."""
        frozen = np.array([one.frozen for one in self._served])
        return np.flatnonzero(~frozen[self._batch.adapters])

    def _step(self) -> None:
        joining = [self._waiting.popleft() for _ in range(min(self._batch.free, len(self._waiting)))]
        for step in self._batch.join(joining):
            self._report(step)
        if (rows := self._going).size:
            self._report(self._batch.step(rows))

    def _report(self, step: Step) -> None:
        """Leave what a step gave for those who asked."""
        if self._streams:
            self._stream(step.sequences, step.sampled)
        for output in step.ended:
            self._emit(output)

    def _stream(self, sequences: list[Sequence], sampled: Sampled) -> None:
        for sequence, *token in zip(sequences, *(column.tolist() for column in sampled), strict=True):
            if outbox := self._streams.get(sequence.request_id):
                self._events.setdefault(outbox, []).append(Token(sequence.request_id, *token))

    def _emit(self, event: Output | Failure) -> None:
        with self._wake:
            outbox = self._outboxes.pop(event.request_id)
            self._streams.pop(event.request_id, None)
        self._sequences.pop(event.request_id, None)
        self._events.setdefault(outbox, []).append(event)

    def _deliver(self) -> None:
        events, self._events = self._events, {}
        for outbox, news in events.items():
            outbox(news)

    def _accept(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            served = self._served[sequence.adapter]
            (self._waiting if served.admitting else served.held).append(sequence)
            self._by_priority = self._by_priority or sequence.priority != 0
        self._order_waiting()
        self._sequences.update((sequence.request_id, sequence) for sequence in sequences)

    def _order_waiting(self) -> None:
        """The lowest priority first; of equal ones the order stays."""
        if self._by_priority:
            self._waiting = deque(sorted(self._waiting, key=attrgetter("priority")))

    def _abort(self, request_ids: Iterable[str]) -> None:
        found = [self._sequences[name] for name in request_ids if name in self._sequences]
        for sequence in found:
            if sequence.row < 0:
                held = self._served[sequence.adapter].held
                (held if sequence in held else self._waiting).remove(sequence)
                self._emit(sequence.unstarted())
        active = [EndedSequence(sequence.row, "abort") for sequence in found if sequence.row >= 0]
        for output in self._batch.end(active) if active else ():
            self._emit(output)

    def _pause(self, mode: PauseMode, quiet: "Future[None]", adapter: int) -> None:
        served = self._served[adapter]
        served.admitting = False
        served.held += [one for one in self._waiting if one.adapter == adapter]
        self._waiting = deque(one for one in self._waiting if one.adapter != adapter)
        if mode == "abort":
            self._abort([name for name, one in self._sequences.items() if one.adapter == adapter])
        if mode == "keep":
            served.frozen = True
        served.quiet.append(quiet)

    def _resume(self, adapter: int) -> None:
        served = self._served[adapter]
        served.admitting, served.frozen = True, False
        self._waiting.extend(served.held)
        self._order_waiting()
        served.held = []
        _tell(served)

    def _tell_quiet(self) -> None:
        """Tell those who wait for a pause that it has taken hold, where it has."""
        for adapter, served in enumerate(self._served):
            if served.quiet and (served.frozen or adapter not in self._batch.adapters):
                _tell(served)

    def _close(self, cause: BaseException | None) -> None:
        """The thread is over: nobody may be left waiting, whatever ended it."""
        with self._wake:
            self._state = "stopped"
            orders, self._orders = self._orders, deque()
            left = list(self._outboxes)
        error = EngineStopped("the engine stopped before this request ended")
        error.__cause__ = cause
        for order in orders:
            order.done.set_exception(error)
        for request_id in left:
            self._emit(Failure(request_id, error))
        self._deliver()
        for served in self._served:
            _tell(served)


def _tell(served: _Served) -> None:
    quiet, served.quiet = served.quiet, []
    for future in quiet:
        future.set_result(None)


def _max_positions(model: nn.Module) -> int:
    config = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    return int(config.max_position_embeddings)


def _eos(model: nn.Module) -> tuple[int, ...]:
    """The end tokens of the model's generation config: none, one or several."""
    ids: Any = model.generation_config.eos_token_id  # type: ignore[union-attr]
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)
