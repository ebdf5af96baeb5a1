"""The reference: log probabilities under a policy that never changes, by default the one that training began with."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_rl.training.batch import TrainingSequence, by_sequence
from lightning_rl.training.forward import Forward
from lightning_rl.training.offload import Offload


class Reference:
    """A frozen causal LM.

    Args:
        model: on the device that it is used on; its parameters are frozen.
        pad_id: what fills rows up.
        rows, tokens: bounds of what is computed at once (`Forward.micro_batches`).
        offload: it waits in main memory between its uses.
        forward: how the model is run; by default as it is.
    """

    def __init__(
        self,
        model: nn.Module,
        pad_id: int,
        *,
        rows: int | None = None,
        tokens: int | None = None,
        offload: bool = False,
        forward: Forward | None = None,
    ) -> None:
        self._forward = forward or Forward(model, pad_id)
        self._rows, self._tokens = rows, tokens
        self._place = Offload(model.requires_grad_(False).eval(), enabled=offload)

    def log_probs(self, sequences: list[TrainingSequence]) -> list[NDArray[np.float32]]:
        """Per sequence the log probabilities (nats) of its trained tokens, float32 [K], at their own temperature."""
        with self._place.in_use():
            return _log_probs(self._forward, sequences, self._rows, self._tokens)


class BaseOfAdapter:
    """The policy itself with its adapter switched off: the weights below it are never trained. They are what training
    began with, unless it began with an adapter.

    Args:
        model: the policy, wrapped by `peft`: `disable_adapter()` is a context in which its adapter does nothing. It is
            where it is needed (`Actor.onload`).
        pad_id, rows, tokens, forward: as of `Reference`.
    """

    def __init__(
        self,
        model: Any,
        pad_id: int,
        *,
        rows: int | None = None,
        tokens: int | None = None,
        forward: Forward | None = None,
    ) -> None:
        self._disabled: Callable[[], AbstractContextManager[Any]] = model.disable_adapter
        self._forward = forward or Forward(model, pad_id)
        self._rows, self._tokens = rows, tokens

    def log_probs(self, sequences: list[TrainingSequence]) -> list[NDArray[np.float32]]:
        """As `Reference.log_probs`."""
        with self._disabled():
            return _log_probs(self._forward, sequences, self._rows, self._tokens)


def _log_probs(
    forward: Forward, sequences: list[TrainingSequence], rows: int | None, tokens: int | None
) -> list[NDArray[np.float32]]:
    def compute(micro: Iterable[TrainingSequence]) -> Tensor:
        return forward.log_probs(list(micro))[0]

    with forward.without_gradient():
        by_id = by_sequence(forward.micro_batches(sequences, rows=rows, tokens=tokens), compute)
        return forward.gathered(sequences, by_id)
