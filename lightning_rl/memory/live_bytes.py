"""How many bytes of tensors are alive, and the most that ever were: a storage counts from its first use to its death.

Works with fake tensors (`FakeTensorMode`), which have sizes and no numbers; whoever asks one for a number is told 1.
What kernels allocate for themselves and give back is not seen.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

_A_NUMBER: Final = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}


class Peak(NamedTuple):
    """Bytes at the moment when most are alive: all of them, and those of them that are as wide as the vocabulary."""

    total: int
    logits: int


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered.

    Args:
        vocabulary: tensors whose last dimension is so wide are logits.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._vocabulary = vocabulary
        self._sizes: Any = WeakIdKeyDictionary()
        self.now = 0
        self._logits = 0
        self._peak = Peak(0, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count what it makes."""
        if func in _A_NUMBER:
            return 1.0
        out = func(*args, **(kwargs or {}))
        for one in tree_iter(out):
            if isinstance(one, Tensor):
                self.count(one)
        return out

    def count(self, tensor: Tensor) -> None:
        """Count a tensor from now on."""
        storage = tensor.untyped_storage()
        if storage in self._sizes:
            return
        size, wide = storage.nbytes(), tensor.dim() > 1 and tensor.shape[-1] == self._vocabulary
        self._sizes[storage] = size
        weakref.finalize(storage, self._died, size, wide)
        self.now += size
        self._logits += size * wide
        if self.now > self._peak.total:
            self._peak = Peak(self.now, self._logits)

    def _died(self, size: int, wide: bool) -> None:
        self.now -= size
        self._logits -= size * wide

    @contextmanager
    def peak(self) -> Iterator[list[Peak]]:
        """Of the block the peak, which the list has when it is over."""
        peaks: list[Peak] = []
        self._peak = Peak(self.now, self._logits)
        yield peaks
        peaks.append(self._peak)
