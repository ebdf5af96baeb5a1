"""A model from disk with the engine that samples it: what an algorithm opens to have a policy on this machine."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rl.inference.adapters import shareable
from lightning_rl.inference.engine import EmbeddedEngine
from lightning_rl.inference.load import ModelSource
from lightning_rl.inference.server import EngineServer
from lightning_rl.inference.weights.four_bit import plain_copy
from lightning_rl.inference.weights.stream import WeightStream
from lightning_rl.vision import vision_of


class EmbeddedPolicy:
    """The model of `source`, sampled at `url` from `start` to `close`.

    Args:
        source: of `model`; with `load_in_4bit` the engine computes with the same numbers, whole.
        trained: the engine samples a copy, so that `model` may be updated while it does.
        dtype: the number format in which the engine computes logits, None: the model's; logprobs are float32 in any.
        max_num_seqs, max_model_len, expected_len, threads: as in `EmbeddedEngine`.
        beside: policies of adapters over the same weights, made before this one: where the model can be sampled with
            several adapters at once, this one is sampled by their engine. None: nobody else may be.

    `name` is what the gateway calls it, `folder` holds its tokenizer; `vision` is how it sees images, if it does.
    `adapter` is its number in an engine that others may have too, which wants adapters as they are
    (`training.lora.low_rank`); 0: the engine has its weights, and nobody else's.
    """

    adapter = 0

    def __init__(
        self,
        source: ModelSource,
        *,
        trained: bool = False,
        dtype: torch.dtype | None = None,
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
        expected_len: int = 0,
        threads: int | None = None,
        beside: "Sequence[EmbeddedPolicy] | None" = None,
    ) -> None:
        self.folder, self.name = source.located
        own = source.loaded()
        self.model: Any = source.model() if source.elsewhere else own
        self.vision = vision_of(self.folder, self.model)
        shares = beside is not None and self.vision is None and shareable(own)
        if beside and shares:
            self.engine: EmbeddedEngine = beside[0].engine
        else:
            copied = source.load_in_4bit or (trained and not source.elsewhere)
            self.engine = EmbeddedEngine(
                (plain_copy(own) if copied else own).to(dtype or source.dtype),
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                expected_len=expected_len,
                threads=threads,
                vision=self.vision,
            )
        if shares:
            self.adapter = self.engine.add_adapter()
        self._server = EngineServer(self.engine, adapter=self.adapter)

    @property
    def takes_adapter(self) -> bool:
        """Whether `update_weights` is given an adapter alone."""
        return self.adapter > 0

    def start(self) -> None:
        """Begin to sample; `url` is there from now on. Whoever calls this calls `close`, whatever comes between."""
        if not self.engine.running:
            self.engine.start()
        self._server.start()
        self.url = self._server.url

    def registrations(self) -> list[dict[str, Any]]:
        """What the gateway is told of the engine."""
        version = self.engine.version(self.adapter)
        return [{"model": self.name, "kind": "embedded", "url": self.url, "policy_version": version}]

    def update_weights(
        self, weights: nn.Module | Mapping[str, Tensor] | WeightStream, version: int, *, partial: bool = False
    ) -> None:
        """Give the engine the weights, or the adapter: see `EmbeddedEngine`."""
        if self.adapter:
            assert not isinstance(weights, nn.Module)
            self.engine.update_adapter(self.adapter, weights, version)
        else:
            self.engine.update_weights(weights, version, partial=partial)

    def check(self) -> None:
        """Raise what ended the engine, when something has."""
        self.engine.check()

    def close(self) -> None:
        """Stop the server and the engine, which then samples for nobody."""
        self._server.stop()
        self.engine.stop()


class Unsampled(EmbeddedPolicy):
    """The model of `source` as it is trained where nothing is sampled: there is no engine, and no copy for one."""

    def __init__(self, source: ModelSource) -> None:
        self.folder, self.name = source.located
        self.model = source.model()
        self.vision = vision_of(self.folder, self.model)

    def close(self) -> None:
        """There is nothing to stop."""
