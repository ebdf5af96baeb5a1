"""The embedded engine: one model in threads of its own, which any thread may ask for answers.

Each of its threads writes a batch; between two steps it takes its share of those that wait. A decode step of a small
model is many small operations, which several cores together do hardly faster than one: a batch for each does.

Invariant: weights and pauses change by orders of other threads, which one of the engine's carries out while all of
them stand between two steps. Every accepted request ends with exactly one `Output` or one `Failure`.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from concurrent.futures import Future
from functools import partial as bind
from random import Random
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from lightning_rl.inference import scheduler
from lightning_rl.inference.batch import Sequence, picture_of
from lightning_rl.inference.cache import ModelUnfit, Prefixes
from lightning_rl.inference.continuous_batch import ContinuousBatch, Step
from lightning_rl.inference.policy import Policy
from lightning_rl.inference.sampler import stream_key
from lightning_rl.inference.scheduler import Scheduler
from lightning_rl.inference.sequence import Event, Failure, GenerationRequest, Output, Token
from lightning_rl.inference.weights.stream import BUCKET_BYTES, WeightStream, buckets
from lightning_rl.processes.openmp import end_threads
from lightning_rl.vision import ModelVision

Outbox = Callable[[list[Event]], None]
PauseMode = Literal["keep", "wait", "abort"]

DEFAULT_MAX_MODEL_LEN = 2048
MOST_BATCHES = 4  # between two operations all wait for one interpreter
LARGE = 10_000_000  # parameters from which on one operation is large enough for several cores
_LOOK_SECONDS = 1.0  # between two looks of a resting thread whether the process ends


class EngineStopped(RuntimeError):
    """The engine is not running, and cannot take or finish requests."""


class _Order:
    """Something to do between two steps, and the future of whoever waits for it."""

    __slots__ = ("done", "run")

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self.done: Future[None] = Future()


class _Outboxes:
    """Those of the requests in flight, and what is on its way to them. Any thread may use it."""

    def __init__(self) -> None:
        self._by_id: dict[str, Outbox] = {}
        self._streamed: set[str] = set()  # of these each token is told
        self._events: dict[Outbox, list[Event]] = {}
        self._lock = threading.Lock()
        self._delivery = threading.Lock()  # outboxes are called by one thread at a time, in the order of events
        self._delivering = False

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, request_ids: list[str], outbox: Outbox, *, stream: bool) -> None:
        """These are in flight. Raises ValueError where one is already."""
        with self._lock:
            in_flight = self._by_id.keys() & set(request_ids)
            if in_flight or len(set(request_ids)) < len(request_ids):
                raise ValueError(f"request_id {min(in_flight or request_ids)!r} is already in flight")
            self._by_id.update(dict.fromkeys(request_ids, outbox))
            self._streamed.update(request_ids if stream else ())

    def take(self, step: Step) -> None:
        """A token of each was sampled, the last one of those that ended: both are told at once."""
        with self._lock:
            if self._streamed:
                columns = (column.tolist() for column in step.sampled)
                for sequence, token_id, logprob, rank in zip(step.sequences, *columns, strict=True):
                    if sequence.request_id in self._streamed:
                        events = self._events.setdefault(self._by_id[sequence.request_id], [])
                        events.append(Token(sequence.request_id, token_id, logprob, rank, sequence.version))
            for output in step.ended:
                self._end(output)

    def end(self, event: Output | Failure) -> None:
        """A request is in flight no longer."""
        with self._lock:
            self._end(event)

    def _end(self, event: Output | Failure) -> None:
        self._streamed.discard(event.request_id)
        self._events.setdefault(self._by_id.pop(event.request_id), []).append(event)

    def fail(self, error: Exception) -> None:
        """So does every request that is left."""
        for request_id in list(self._by_id):
            self.end(Failure(request_id, error))

    def deliver(self) -> None:
        """Call the outboxes."""
        with self._delivery:
            with self._lock:
                events, self._events = self._events, {}
                self._delivering = True
            for outbox, news in events.items():
                outbox(news)
            self._delivering = False

    @property
    def delivered(self) -> bool:
        """Whether nothing is on its way. Where another thread is delivering, it is not."""
        return not self._events and not self._delivering


class _Threads:
    """The engine's threads: each writes a batch, and one carries out the orders while all stand between two steps.

    Args:
        policy: what computes the batches.
        scheduler: which requests are written next, and where.
        batches: one for each thread.
        cores_alone: with how many threads an operation computes while one batch alone is written.
        cores_each: the same while several are.
    """

    def __init__(
        self,
        policy: Policy,
        scheduler: Scheduler,
        batches: list[ContinuousBatch],
        *,
        cores_alone: int,
        cores_each: int,
    ) -> None:
        self.batches = batches
        self.orders: deque[_Order] = deque()
        self._policy, self._scheduler = policy, scheduler
        self._cores_alone, self._cores_each = cores_alone, cores_each
        self._cores = [cores_alone] * len(batches)  # of each batch at present
        self._outboxes = _Outboxes()
        self._sequences: dict[str, Sequence] = {}
        self._arrived: list[Sequence] = []
        self._pausing: list[tuple[int, Future[None]]] = []  # who wait until an adapter is quiet
        self._changed = threading.Condition()  # its lock holds for all but the batches and their weights
        self._resting = 0  # threads that stand between two steps
        self._state: Literal["new", "running", "stopped"] = "new"
        self._stopping = False
        self._cause: BaseException | None = None  # of a thread's end
        self._started: list[threading.Thread] = []
        self._over = 0  # of them

    @property
    def begun(self) -> bool:
        """Whether they have been started."""
        return self._state != "new"

    @property
    def running(self) -> bool:
        """Whether they take requests and orders, and carry them out."""
        return self._state == "running" and not self._stopping

    @property
    def in_flight(self) -> int:
        """Requests taken and not yet ended."""
        return len(self._outboxes)

    def start(self) -> None:
        """Begin, once. Raises EngineStopped."""
        with self._changed:
            if self._state != "new":
                raise EngineStopped("an engine is started once: make another")
            self._state = "running"
        if self._cores_alone > 1:  # those of who loaded the model
            end_threads()
        try:
            for number in range(len(self.batches)):
                thread = threading.Thread(target=self._run, args=(number,), name=f"engine-{number}")
                thread.start()
                self._started.append(thread)
        except BaseException:  # those that run are of no use alone
            self.stop()
            raise

    def stop(self) -> None:
        """End; what is in flight ends with reason "abort". Raises what stopped one of them before."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._started:
            thread.join()
        if len(self._started) < len(self.batches):  # else the last one has closed
            self._close()
        self.check()

    def check(self) -> None:
        """Raises what ended one of them, when something has."""
        if self._cause is not None:
            raise self._cause

    def add(self, sequences: list[Sequence], outbox: Outbox, *, stream: bool) -> None:
        """Take requests; see `EmbeddedEngine.post`. Raises EngineStopped, and ValueError where one is in flight."""
        with self._changed:
            if self._state == "stopped" or self._stopping:
                raise EngineStopped("the engine is stopped")
            self._outboxes.open([sequence.request_id for sequence in sequences], outbox, stream=stream)
            self._arrived += sequences
            self._changed.notify_all()

    def call(self, function: Callable[[], None]) -> None:
        """Run the function while all stand between two steps, and wait; here, when they have not begun."""
        if self._state == "new":
            return function()
        if self._cores_alone > 1:  # else the engine has no threads of OpenMP's that the trainer's could hinder
            end_threads()
        order = _Order(function)
        with self._changed:
            if not self.running:
                raise EngineStopped("the engine does not run")
            self.orders.append(order)
            self._changed.notify_all()
        return order.done.result()

    def abort(self, request_id: str) -> None:
        """End a request, if it is in flight."""
        with self._changed:
            self.orders.append(_Order(lambda: self._abort({request_id})))
            self._changed.notify_all()

    def pause(self, mode: PauseMode, adapter: int) -> None:
        """Stop sampling with that adapter; returns when it is quiet."""
        quiet: Future[None] = Future()
        self.call(lambda: self._pause(mode, quiet, adapter))
        if self._state != "new":
            quiet.result()

    def resume(self, adapter: int) -> None:
        """Go on with that adapter."""
        self.call(lambda: self._resume(adapter))

    # Orders.

    def _abort(self, request_ids: Set[str]) -> None:
        for sequence in [self._sequences[name] for name in request_ids if name in self._sequences]:
            if sequence.row < 0:
                self._scheduler.remove(sequence)
                self._outboxes.end(self._sequences.pop(sequence.request_id).unstarted())
        for number, batch in enumerate(self.batches):
            for output in batch.abort(request_ids):
                self._leave(number, output)
                self._outboxes.end(output)

    def _pause(self, mode: PauseMode, quiet: "Future[None]", adapter: int) -> None:
        self._scheduler.pause(adapter, freeze=mode == "keep")
        if mode == "abort":
            self._abort({name for name, one in self._sequences.items() if one.adapter == adapter})
        self._pausing.append((adapter, quiet))

    def _resume(self, adapter: int) -> None:
        self._scheduler.resume(adapter)
        self._tell_paused([adapter])

    # The threads.

    def _run(self, number: int) -> None:
        cause: BaseException | None = None
        try:
            torch.set_num_threads(self._cores[number])  # of this thread alone: OpenMP keeps the number by thread
            with torch.inference_mode():
                while (work := self._next(number)) is not None:
                    work()
                    self._deliver()
        except BaseException as error:  # noqa: BLE001 - `check` raises it
            cause = error
        self._thread_ended(cause)

    def _next(self, number: int) -> Callable[[], None] | None:
        """Rest until there is something for this thread to do; None when it is time to end."""
        with self._changed:
            self._resting += 1
            while not self._stopping:
                if self.orders and self._resting == len(self.batches):
                    self._resting -= 1
                    return self._carry_out_orders
                if not self.orders and not self._policy.torn:
                    self._admit()
                    joining = self._scheduler.take(number, self.batches[number].free)
                    going = self._scheduler.going
                    if going[number]:
                        self._resting -= 1
                        cores = self._cores_alone if sum(going) == 1 else self._cores_each
                        return bind(self._step, number, joining, cores)
                if self._cores[number] > 1:
                    end_threads()
                self._wait()
            return None

    def _wait(self) -> None:
        """Until something has changed. A process that ends without a stop of the engine, as where that was interrupted,
        waits for its threads: then they end by themselves."""
        while not self._changed.wait(_LOOK_SECONDS):
            if not threading.main_thread().is_alive():
                self._stopping = True
                return

    def _carry_out_orders(self) -> None:
        while self.orders:  # one that is left there keeps the other threads from stepping
            self._admit()  # also those who came during the last one, whom this one may abort
            order = self.orders[0]
            try:
                order.run()
            except ValueError as error:
                order.done.set_exception(error)
            else:
                order.done.set_result(None)
            self.orders.popleft()
        with self._changed:
            self._changed.notify_all()

    def _admit(self) -> None:
        """Those who have come since wait, or are held by a pause."""
        if not self._arrived:
            return
        with self._changed:
            arrived, self._arrived = self._arrived, []
        self._sequences.update((sequence.request_id, sequence) for sequence in arrived)
        self._scheduler.add(arrived)

    def _step(self, number: int, joining: list[Sequence], cores: int) -> None:
        if cores != self._cores[number]:
            if self._cores[number] > 1:
                end_threads()
            torch.set_num_threads(cores)
            self._cores[number] = cores
        batch = self.batches[number]
        for step in batch.join(joining):
            self._report(number, step)
        if (rows := np.flatnonzero(~self._scheduler.frozen[batch.adapters])).size:
            self._report(number, batch.step(rows))

    def _report(self, number: int, step: Step) -> None:
        """Leave what a step gave for those who asked."""
        with self._changed:
            self._outboxes.take(step)
            for output in step.ended:
                self._leave(number, output)
            self._scheduler.read(step.sequences)
            if self._scheduler.waiting:  # there may be room for them now
                self._changed.notify_all()

    def _leave(self, number: int, output: Output) -> None:
        """A row of that batch is free."""
        self._scheduler.leave(number, self._sequences.pop(output.request_id))

    def _deliver(self) -> None:
        """Tell those who asked what there is for them, then those who wait for a pause whether it has taken hold."""
        self._outboxes.deliver()
        with self._changed:
            if self._pausing and self._outboxes.delivered:
                self._tell_paused([adapter for adapter, _ in self._pausing if self._scheduler.quiet(adapter)])

    def _tell_paused(self, adapters: Iterable[int]) -> None:
        paused = set(adapters)
        for future in [future for adapter, future in self._pausing if adapter in paused]:
            future.set_result(None)
        self._pausing = [each for each in self._pausing if each[0] not in paused]

    def _thread_ended(self, cause: BaseException | None) -> None:
        """One that fails ends the others; the last one closes."""
        with self._changed:
            self._cause = self._cause or cause
            self._stopping = True
            self._changed.notify_all()
            self._over += 1
            last = self._over == len(self.batches)
        if last:
            self._close()

    def _close(self) -> None:
        """The threads are over: nobody may be left waiting, whatever ended them."""
        with self._changed:
            self._state = "stopped"
        if self._started and self._cause is None:
            with torch.inference_mode():
                self._admit()
                self._abort(set(self._sequences))
        error = EngineStopped("the engine stopped before this request ended")
        error.__cause__ = self._cause
        while self.orders:
            self.orders.popleft().done.set_exception(error)
        self._outboxes.fail(error)
        self._outboxes.deliver()
        self._tell_paused(adapter for adapter, _ in self._pausing)


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
        prefix_rows: how many conversations are kept for prompts that begin like them; by default `max_num_seqs`, 0
            keeps none.
        version: the policy version of the weights that `model` has.
        name: by which the server lists the model.
        vision: how `model` sees images; None for one that reads text alone.
        threads: cores that it may use; by default what torch takes. On a CPU, and of a model that `fused` computes, up
            to `MOST_BATCHES` batches are written at once while there are more than `scheduler.ALONE` rows for each. The
            operations of a large model use the cores that are left: all of them, while one batch alone is written.

    Raises:
        ModelUnfit: the architecture cannot be run, or not with such a context.
        ValueError: `max_num_seqs` is out of range.
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
        self._vision = vision
        allowed = _max_positions(model)
        self.max_model_len = max_model_len or min(allowed, max(DEFAULT_MAX_MODEL_LEN, expected_len))
        if not 2 <= self.max_model_len <= allowed:
            raise ModelUnfit(
                f"max_model_len {max_model_len} is not in 2..{allowed}, the model's max_position_embeddings: set "
                "actor_rollout_ref.rollout.max_model_len, or --max-model-len of `lightning-rl serve`, to one of these, "
                "or leave it out"
            )
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
        self.name = name
        self.max_num_seqs = max_num_seqs
        self.eos_token_ids = tuple(_eos(model) if eos_token_ids is None else eos_token_ids)
        prefix_count = max_num_seqs if prefix_rows is None else prefix_rows
        self._policy = Policy(model, self.max_model_len, version)
        with torch.inference_mode():
            self._policy.check()
        threads = torch.get_num_threads() if threads is None else threads
        most = min(threads, MOST_BATCHES, max_num_seqs // scheduler.ALONE) if self._policy.for_several_threads else 1
        batches = max(1, most)
        self._prefixes = Prefixes(prefix_count, self._policy.n_layers, self.max_model_len)
        rows = -(-max_num_seqs // batches)
        self._scheduler = Scheduler(batches, max_num_seqs, copies_prompts=prefix_count > 0)
        large = sum(each.numel() for each in model.parameters()) >= LARGE
        self._threads = _Threads(
            self._policy,
            self._scheduler,
            [ContinuousBatch(self._policy, self._prefixes, rows) for _ in range(batches)],
            cores_alone=threads if large else 1,
            cores_each=threads // batches if large else 1,
        )
        self._seeds = Random(seed)

    def add_adapter(self) -> int:
        """Make room for an adapter, which changes nothing until its first update; its number. Before `start`."""
        if self._threads.begun:
            raise EngineStopped("adapters are added before the engine is started")
        self._policy.versions.append(0)
        return self._scheduler.add_adapter()

    def start(self) -> None:
        """Begin to serve. An engine is started once."""
        self._threads.start()

    def stop(self) -> None:
        """End the threads; what is in flight ends with reason "abort". Raises what stopped them before."""
        self._threads.stop()

    def check(self) -> None:
        """Raises what ended a thread, when something has."""
        self._threads.check()

    def __enter__(self) -> "EmbeddedEngine":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def submit(self, request: GenerationRequest, on_token: Callable[[Token], None] | None = None) -> Future[Output]:
        """Ask for one answer.

        Args:
            request: the prompt and how to sample.
            on_token: called on one of the engine's threads with every token as it is made; must be quick.

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
            outbox: called on one of the engine's threads, by one at a time, once per step that has news for it, with
                all of that step's events; must be quick.
            stream: whether `Token` events are wanted beside the final ones.

        Raises: as `submit`.
        """
        self._threads.add([self._sequence(request) for request in requests], outbox, stream=stream)

    def abort(self, request_id: str) -> None:
        """End a request with what it has, reason "abort"; nothing happens if it is not in flight."""
        self._threads.abort(request_id)

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
            self._threads.call(lambda: self._load(state, version, partial))
        else:
            shapes = {name: each.shape for name, each in weights.described.items()}
            self._threads.call(lambda: self._policy.require_fitting(shapes, partial=partial))
            self._threads.call(lambda: self._policy.tear(partial=partial))
            for bucket in buckets(weights, BUCKET_BYTES):
                self._threads.call(bind(self._policy.put, bucket))
            self._threads.call(lambda: self._mend(version))

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
        self._threads.call(lambda: self._put_adapter(adapter, whole, version))

    def pause(self, mode: PauseMode = "keep", adapter: int = 0) -> None:
        """Stop sampling with that adapter; requests are still taken and wait for `resume`. Returns when it is quiet.

        Args:
            mode: "keep" freezes what is in flight until `resume`; "wait" lets it finish first; "abort"
                ends it with reason "abort".
        """
        self._threads.pause(mode, adapter)

    def resume(self, adapter: int = 0) -> None:
        """Go on after `pause`."""
        self._threads.resume(adapter)

    def paused(self, adapter: int = 0) -> bool:
        """Whether requests with that adapter wait."""
        return self._scheduler.paused(adapter)

    def version(self, adapter: int = 0) -> int:
        """The policy version that is sampled with that adapter."""
        return self._policy.versions[adapter]

    @property
    def in_flight(self) -> int:
        """Requests taken and not yet ended."""
        return self._threads.in_flight

    @property
    def running(self) -> bool:
        return self._threads.running

    def _sequence(self, request: GenerationRequest) -> Sequence:
        prompt = np.asarray(request.token_ids, dtype=np.int64)
        if not 1 <= len(prompt) < self.max_model_len:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens does not fit: max_model_len is {self.max_model_len}, so a prompt "
                f"has 1 to {self.max_model_len - 1} tokens; shorten the conversation, or "
                "raise actor_rollout_ref.rollout.max_model_len, or --max-model-len of `lightning-rl serve`, where the "
                "model allows it"
            )
        if prompt.min() < 0 or prompt.max() >= self._policy.vocab_size:
            raise ValueError(
                f"token ids must be in 0..{self._policy.vocab_size - 1}, got {int(prompt.min())}..{int(prompt.max())}"
            )
        if not 0 <= request.adapter < self._scheduler.adapters:
            raise ValueError(f"there is no adapter {request.adapter}: the engine has {self._scheduler.adapters - 1}")
        sampling = request.sampling
        seed = self._seeds.getrandbits(64) if sampling.seed is None else sampling.seed
        stops = sampling.stop_token_ids + (() if sampling.ignore_eos else self.eos_token_ids)
        picture = picture_of(prompt, request.images, self._vision) if request.images else None
        return Sequence(request, prompt, stream_key(seed), stops, picture)

    # Orders.

    def _load(self, weights: Mapping[str, Tensor], version: int, partial: bool) -> None:
        self._policy.load(weights, version, partial=partial)
        self._updated(version)

    def _mend(self, version: int) -> None:
        self._policy.mend(version)
        self._updated(version)

    def _put_adapter(self, adapter: int, weights: Mapping[str, Tensor], version: int) -> None:
        self._policy.put_adapter(adapter, weights, version)
        self._updated(version, adapter)

    def _updated(self, version: int, adapter: int = 0) -> None:
        self._prefixes.clear(adapter)
        for batch in self._threads.batches:
            batch.updated(version, adapter)


def _max_positions(model: nn.Module) -> int:
    config = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    return int(config.max_position_embeddings)


def _eos(model: nn.Module) -> tuple[int, ...]:
    """The end tokens of the model's generation config: none, one or several."""
    ids: Any = model.generation_config.eos_token_id  # type: ignore[union-attr]
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)
