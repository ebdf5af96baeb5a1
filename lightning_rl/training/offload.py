"""Models that wait in main memory between their uses."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


class Offload:
    """Where `model` is kept: with `enabled` on its device only while it is in use. On a CPU it stays where it is."""

    def __init__(self, model: nn.Module, *, enabled: bool) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._moves = enabled and self._device.type != "cpu"
        if self._moves:
            model.to("cpu")

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The model is on its device for the block. Not in inference mode: weights copied there take no gradient."""
        if not self._moves:
            yield
            return
        self._model.to(self._device)
        try:
            yield
        finally:
            self._model.to("cpu")
