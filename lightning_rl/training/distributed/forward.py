"""The forward pass of a model in shards: each worker runs it over its share of the rows, all of them equally often.

Invariant: every worker is given the same sequences, and what comes out is of all of them: numbers of tokens are
gathered, sums are added up. So actor, critic and reference are written as if they were alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_rl.training.batch import TrainingSequence
from lightning_rl.training.distributed.work_partition import parts, silent
from lightning_rl.training.forward import Forward
from lightning_rl.vision import ModelVision, PlacedFeatures, showing

T = TypeVar("T")


class ShardedForward(Forward):
    """`Forward` of a model that `fully_shard` has cut.

    Args:
        model, pad_id, packed, autocast, vision: as of `Forward`.
        talk: the group over which workers tell each other numbers; not the one that carries weights and gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        pad_id: int,
        *,
        talk: dist.ProcessGroup,
        packed: bool = False,
        autocast: torch.dtype | None = None,
        vision: ModelVision | None = None,
    ) -> None:
        self._talk = talk
        super().__init__(model, pad_id, packed=packed, autocast=autocast, vision=vision)

    def micro_batches(
        self, sequences: Sequence[TrainingSequence], *, rows: int | None, tokens: int | None
    ) -> Iterator[list[TrainingSequence]]:
        """This worker's share of `sequences`, and then as many silent rows as it takes to keep step with the others."""
        number, of = self._share()
        own = parts(sequences, of, packed=self.packed)[number]
        cut = list(super().micro_batches(own, rows=rows, tokens=tokens))
        most = torch.tensor(len(cut))
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._talk)
        yield from cut
        for _ in range(int(most) - len(cut)):
            yield [silent(sequences[0])]

    def _share(self) -> tuple[int, int]:
        """Which share of the rows is this worker's, and how many there are."""
        return self._talk.rank(), self._talk.size()

    def gathered(self, sequences: Sequence[TrainingSequence], by_id: Mapping[int, T]) -> list[T]:
        """As of `Forward`, from all workers; tensors come to the CPU."""
        own = {n: on_cpu(by_id[id(s)]) for n, s in enumerate(sequences) if id(s) in by_id}
        of_all: list[dict[int, T]] = [{}] * self._talk.size()
        dist.all_gather_object(of_all, own, group=self._talk)
        joined = {n: value for of_one in of_all for n, value in of_one.items()}
        return [joined[n] for n in range(len(sequences))]

    def total(self, sums: Mapping[str, float]) -> dict[str, float]:
        """As of `Forward`: over all workers."""
        numbers = torch.tensor(list(sums.values()), dtype=torch.float64)
        dist.all_reduce(numbers, group=self._talk)
        return dict(zip(sums, numbers.tolist(), strict=True))

    def without_gradient(self) -> AbstractContextManager[Any]:
        """Not the inference mode: FSDP2 keeps the room into which it gathers weights, and trains in it later."""
        return self._resharding()

    def _try(self, *, packed: bool) -> None:
        with self._resharding():
            super()._try(packed=packed)

    @contextmanager
    def _resharding(self) -> Iterator[None]:
        """Passes without gradient, after which no weights stay gathered: nothing but a backward pass would part with
        them, the next pass would see those of before an update, and an optimizer be given them for the shards."""
        with torch.no_grad():
            yield
        for part in self.model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def _showing(self, shown: list[PlacedFeatures]) -> AbstractContextManager[Any]:
        """As of `Forward`; where rows of another worker show images, the tower runs here too."""
        if self._vision is None:
            return super()._showing(shown)
        some_see = torch.tensor(bool(shown), dtype=torch.int)
        dist.all_reduce(some_see, dist.ReduceOp.MAX, group=self._talk)
        if shown or not some_see:
            return super()._showing(shown)
        return showing(self.model, [], self._vision.blank)


def on_cpu(value: T) -> T:
    """A tensor on the CPU, with memory of its own: one that is sent takes all that it is a part of along. Anything else
    as it is."""
    if not isinstance(value, Tensor):
        return value
    own: Any = value.cpu()
    return own.clone() if own.untyped_storage().nbytes() > own.nbytes else own  # type: ignore[no-any-return]
