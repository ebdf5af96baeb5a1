"""A model from disk that vLLM samples: what an algorithm opens to have a policy on vLLM servers.

Invariants: a server samples under a version only after it has taken the file of that version whole, whose names and
shapes are the trained model's; and what it then gives as log probabilities is compared with the model's own.
"""

import logging
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial as bind
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from lightning_rl.inference.adapters import linear_names, shareable
from lightning_rl.inference.load import ModelSource
from lightning_rl.inference.servers.errors import Unreached
from lightning_rl.inference.servers.replicas import Member, OwnServer, Replicas
from lightning_rl.inference.vllm.command import Options
from lightning_rl.inference.vllm.control import Control, VllmRefused
from lightning_rl.inference.vllm.server import VllmServer
from lightning_rl.inference.vllm.transfer import AdapterTransfer, Transfer, transfer_of
from lightning_rl.inference.weights.check import FLOAT32, LogProbs, SampledTokens, Tolerance, log_probs_of, prove
from lightning_rl.inference.weights.stream import WeightStream, as_saved, stream_of
from lightning_rl.processes.gpus import free_unused_memory
from lightning_rl.vision import vision_of

_log = logging.getLogger(__name__)
_FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class VllmPolicy:
    """The model of `source`, sampled by vLLM from `start` to `close`.

    Args:
        source: of `model`; servers get its weights whole where they are in 4 bits here.
        options: how its servers are started; `model`, `sees`, and a `context` of None, are the model's own.
        run_dir: where the logs of the servers are, and the weights on their way to them.
        urls: servers that run already and read the same files, instead of ones of our own.
        make: a server, of its options, `run_dir` and its number; None: a child process of ours.
        tolerance: how far log probabilities of server and model may be apart.
        beside: policies of adapters over the same weights, made before this one (`options.adapters` are all): where
            the model can be sampled with adapters, this one is sampled by their servers, or by its own where there are
            none, which get the adapter alone. None: servers get whole models.

    `name` is what the gateway calls it, `folder` holds its tokenizer, `model` is the one that is trained. `on_outage`
    is called, from another thread, with True when no server is left that could answer, and with False when one is back.
    `make_room` is called before servers that sleep take memory, for their `weights` or for their `kv_cache`. `score` is
    what the model says of tokens, by which servers are judged; None: nobody can say yet. `takes_adapter`: the servers
    want the adapter alone (`training.lora.low_rank`).
    """

    def __init__(
        self,
        source: ModelSource,
        options: Options,
        run_dir: Path,
        *,
        urls: Iterable[str] = (),
        make: Callable[[Options, Path, int], OwnServer] | None = None,
        tolerance: Tolerance = FLOAT32,
        beside: "Sequence[VllmPolicy] | None" = None,
    ) -> None:
        self.folder, self.name = source.located
        self.model = model = source.model()
        self.score: LogProbs | None = None if source.elsewhere else bind(log_probs_of, model)
        self._vocabulary = int(model.config.get_text_config().vocab_size)
        self.on_outage: Callable[[bool], None] = lambda away: None
        self.make_room: Callable[[str], None] = lambda memory: free_unused_memory()
        context = options.context or model.config.get_text_config().max_position_embeddings
        sees = vision_of(self.folder, model) is not None
        # The servers' own weights, which an adapter would be put over, are not those in 4 bits; and one policy of
        # several would put the servers of all to sleep.
        whole = sees or source.load_in_4bit or (options.sleeps and options.adapters > 1)
        self.takes_adapter = beside is not None and not whole and shareable(model)
        self._options = msgspec.structs.replace(
            options,
            model=str(self.folder),
            context=context,
            sees=sees,
            adapters=options.adapters if self.takes_adapter else 0,
            adapter_modules=linear_names(model) if self.takes_adapter else (),
        )
        self._tolerance = tolerance
        self._outbox = run_dir / "weights"
        if beside and self.takes_adapter:
            self.replicas: Replicas[Control] = beside[0].replicas
        else:
            attached = [Member(Control(url)) for url in urls]
            own = [(make or _child)(self._options, run_dir, i) for i in range(0 if attached else options.servers)]
            self.replicas = Replicas(attached + [Member(Control(server.url), server) for server in own])
        self.replicas.policies.append(self)
        self._version: int | None = None
        self._asleep = False
        self._in_training = False
        self._proven = False
        self._transfer: Transfer = transfer_of(options.weight_transfer, self._outbox, _FORMATS[options.dtype])

    def start(self) -> None:
        """Start the servers, which want weights then. Whoever calls this calls `close`, whatever comes between.

        Raises VllmNotStarted.
        """
        shutil.rmtree(self._outbox, ignore_errors=True)
        if self.takes_adapter:
            self._transfer = AdapterTransfer(self._outbox, self.name, self._options.adapter_versions)
        self.replicas.start()

    def registrations(self) -> list[dict[str, Any]]:
        """What the gateway is told of the servers."""
        return [
            {"model": self.name, "kind": "vllm", "url": member.control.url, "policy_version": 0}
            | ({"adapter": True} if self.takes_adapter else {})
            for member in self._members
        ]

    def update_weights(
        self,
        weights: nn.Module | Mapping[str, Tensor] | WeightStream,
        version: int,
        *,
        partial: bool = False,
    ) -> None:
        """Give every server new weights; returns when all that run sample with them. Calls should wait meanwhile.

        Args:
            weights: the model, its whole state dict, or a stream of all under their names in the checkpoint; or of the
                adapter alone.
            version: the policy version of every token sampled from here on.
            partial: not possible here: vLLM packs weights together, so it wants all of them.

        A server that is away is given them when it is back; the first time all must be there.

        Raises WeightsRefused, Unreached, EngineMismatch, VllmNotStarted or ServerEnded.
        """
        if partial:
            raise ValueError("vLLM takes the whole model's weights, not some of them")
        own = weights if isinstance(weights, WeightStream) else as_saved(self.model, stream_of(weights))
        with self.replicas.lock:
            self._transfer.offer(own, version)
            first, self._version, self._in_training = self._version is None, version, False
            self._wake_and_give()
        self.replicas.updated(first=first)
        self._compare()

    def begin_training(self) -> None:
        """The model's weights change from here on, until `update_weights`: a server that comes back meanwhile cannot
        be given them where each is sent from the model itself."""
        with self.replicas.lock:
            self._in_training = True

    def prove(self) -> None:
        """Compare what servers sample with what the model says, where that was never done. Raises EngineMismatch."""
        if not self._proven:
            self._compare()

    def _compare(self) -> None:
        if self.score is None or self._version is None:
            return
        for member in self._members:
            if not member.away:
                self._prove(member, self.score, self._version)

    @property
    def sleeps(self) -> bool:
        """Whether the servers leave their GPUs to the trainer while it computes."""
        return self._options.sleeps

    def sleep(self) -> None:
        """Let the servers leave their GPUs to the trainer, where they were started so: they sleep until `wake`.

        Calls must wait meanwhile. Raises WeightsRefused or Unreached.
        """
        if self._options.sleeps and not self._asleep:
            self._asleep = True
            with self.replicas.lock:
                for member in self._members:
                    self._order(member, self._put_to_sleep)

    def _put_to_sleep(self, control: Control) -> None:
        control.sleep(keep_weights=self.takes_adapter)

    def wake(self) -> None:
        """See `sleep`: the servers have the present weights again, and room for what they compute."""
        if self._asleep:
            with self.replicas.lock:
                self._wake_and_give()

    def _wake_and_give(self) -> None:
        """Give every server the present weights. Those that sleep get memory for weights before, and for their cache
        after, so that it never stands beside what a transfer needs. Before either the trainer makes room."""
        if self._asleep:
            self.make_room("weights")
            for member in self._members:
                self._order(member, lambda control: control.wake("weights"))
        if self._version is not None:
            self.replicas.order_all(self._transfer.give, self._transfer.forget)
        if self._asleep:
            self.make_room("kv_cache")
            for member in self._members:
                self._order(member, lambda control: control.wake("kv_cache"))
            self._asleep = False

    def check(self) -> None:
        """Raise what ended a server for good, when something has."""
        self.replicas.check()

    def close(self) -> None:
        """Stop the servers that are ours, which then sample for nobody."""
        self.replicas.close()
        shutil.rmtree(self._outbox, ignore_errors=True)

    def has_weights(self, control: Control) -> bool:
        """See `SampledPolicy`. A server that sleeps gets weights when it wakes."""
        return self._transfer.is_given(control) or self._version is None or self._asleep

    def renew(self, control: Control) -> bool:
        """See `SampledPolicy`."""
        self._transfer.forget(control)
        if self._in_training and self._transfer.sends_the_model:
            return False
        if self._asleep:  # its GPU is the trainer's now
            self._put_to_sleep(control)
        elif self._version is not None:
            if self._options.sleeps:  # it may have missed that it should wake
                control.wake("weights", "kv_cache")
            if self.takes_adapter:  # answers end with what they began with
                self._transfer.give(control)
            else:
                with control.emptied():
                    self._transfer.give(control)
        return True

    def tell_outage(self, away: bool) -> None:
        """See `SampledPolicy`."""
        self.on_outage(away)

    @property
    def _members(self) -> Sequence[Member[Control]]:
        return self.replicas.members

    def _order(self, member: Member[Control], order: Callable[[Control], None]) -> None:
        self.replicas.order(member, order, self._transfer.forget)

    def _prove(self, member: Member[Control], score: LogProbs, version: int) -> None:
        """Compare a server's log probabilities with the model's, unless it is paused. It may have ended."""

        def sample(prompt: list[int], n: int) -> SampledTokens:
            served = self._transfer.served_name if isinstance(self._transfer, AdapterTransfer) else None
            return member.control.sample(prompt, n, seed=version, model=served)

        url = member.control.url
        try:
            if not member.control.paused() and self.has_weights(member.control):
                prove(
                    score, self._vocabulary, sample, engine=f"vLLM at {url}", version=version, tolerance=self._tolerance
                )
                self._proven = True
        except (Unreached, VllmRefused) as error:  # it is the watcher's
            _log.warning("%s: what it samples is not compared with the model this time", error)


def _child(options: Options, run_dir: Path, index: int) -> OwnServer:
    return VllmServer(options, run_dir, index, options.devices[index] if options.devices else ())
