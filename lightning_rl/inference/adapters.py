"""Low-rank adapters over the model that an engine runs: each row of a pass is computed with its own.

With an adapter a module gives W x + B A x. The A of all adapters of a module stand below each other, and the B beside
each other, so that a pass needs two products for all of them; in between stand zeros where a row has another adapter.

Invariant: a row's logits are those of the model with that row's adapter alone, to float rounding.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

Ints = NDArray[np.int64]
Part = tuple[str, Callable[[Tensor], Tensor] | None]  # a module's name, and how its outputs are ordered anew

A, B = ".lora_A.weight", ".lora_B.weight"  # behind a module's name: [rank, inputs] and [outputs, rank]


class LowRank:
    """The adapters of one matrix: `a` [R, inputs], `b` [outputs, R], of which column i is adapter `owners[i]`'s."""

    def __init__(self, rows: "_Rows", a: Tensor, b: Tensor, owners: tuple[int, ...]) -> None:
        self._rows = rows
        self._a, self._b, self._owners = a, b, owners

    def add(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """What the adapted matrix makes of `inputs` [n, inputs], of which the bare one made `outputs` [n, outputs]."""
        return self._added(F.linear(inputs, self._a), outputs)

    def add_embedded(self, tokens: Tensor, outputs: Tensor) -> Tensor:
        """The same of an embedding, which was given `tokens` [n]."""
        return self._added(F.embedding(tokens, self._a.t()), outputs)

    def _added(self, low: Tensor, outputs: Tensor) -> Tensor:
        return torch.addmm(outputs, low.mul_(self._rows.mask(self._owners, low)), self._b.t())


class Adapters:
    """The adapters over `model`, by number from 1 on; a row with number 0 has none."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {name: each for name, each in model.named_modules() if _sizes(each) is not None}
        parameter = next(model.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        self._matrices: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
        self._rows = _Rows(self._device)
        self._hooked: dict[str, LowRank | None] = {}

    def begin(self, adapters: Ints, columns: int) -> None:
        """The next pass is over so many columns of rows with these adapters."""
        self._rows.begin(adapters, columns)

    def put(self, adapter: int, weights: Mapping[str, Tensor]) -> None:
        """Replace an adapter by the matrices of its modules (`A`, `B`), scaled; no matrices: it changes nothing.

        Raises ValueError, and keeps what was there, where these are none of the model's modules.
        """
        names = sorted({name.removesuffix(A).removesuffix(B) for name in weights})
        for name in names:
            sizes = _sizes(self._modules[name]) if name in self._modules else None
            a, b = weights.get(name + A), weights.get(name + B)
            if sizes is None or a is None or b is None or (*a.shape, *b.shape) != (len(a), sizes[0], sizes[1], len(a)):
                raise ValueError(f"an adapter of {name}, which is no module of the engine's model, or of other sizes")
        self._matrices[adapter] = {
            name: (self._held(weights[name + A]), self._held(weights[name + B])) for name in names
        }  # copies: whoever trains changes them

    def of(self, *parts: Part) -> LowRank | None:
        """The adapters of some modules whose matrices were put below each other; None where none is adapted."""
        adapters = [self._of_one(name) for name, _ in parts]
        if not any(owners for _, _, owners in adapters):
            return None
        ordered = [b if order is None else order(b) for (_, b, _), (_, order) in zip(adapters, parts, strict=True)]
        a = torch.cat([a for a, _, _ in adapters])
        b: Tensor = torch.block_diag(*ordered)  # type: ignore[no-untyped-call]
        return LowRank(self._rows, a, b, tuple(owner for *_, owners in adapters for owner in owners))

    def hook(self) -> None:
        """Have the model's own modules add what their adapters, as they are now, give."""
        for name in {name for by_name in self._matrices.values() for name in by_name}:
            if name not in self._hooked:
                self._modules[name].register_forward_hook(self._hook(name))
            self._hooked[name] = self.of((name, None))

    def _of_one(self, name: str) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        inputs, outputs = _sizes(self._modules[name]) or (0, 0)
        there = {adapter: by_name[name] for adapter, by_name in sorted(self._matrices.items()) if name in by_name}
        empty = torch.zeros(0, inputs, device=self._device, dtype=self._dtype)
        a = torch.cat([empty, *(a for a, _ in there.values())])
        b = torch.cat([empty.new_zeros(outputs, 0), *(b for _, b in there.values())], dim=1)
        return a, b, tuple(adapter for adapter, (a, _) in there.items() for _ in range(len(a)))

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Tensor], Tensor | None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
            low = self._hooked[name]
            if low is None:
                return None
            flat = output.reshape(-1, output.shape[-1])
            if isinstance(module, nn.Embedding):
                return low.add_embedded(inputs[0].reshape(-1), flat).view_as(output)
            return low.add(inputs[0].reshape(-1, inputs[0].shape[-1]), flat).view_as(output)

        return hook

    def _held(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self._device, self._dtype, copy=True)


class _Rows(threading.local):
    """Which adapter each row of the present pass has, of each thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_count: dict[int, Tensor] = {}
        self._masks: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def begin(self, adapters: Ints, columns: int) -> None:
        rows = torch.from_numpy(adapters).to(self._device)
        # The output layer is given the last column alone.
        self._by_count = {len(rows): rows, len(rows) * columns: rows.repeat_interleave(columns)}
        self._masks = {}

    def mask(self, owners: tuple[int, ...], like: Tensor) -> Tensor:
        """[n, R]: 1 where the adapter of a row of `like` [n, R] is the column's, else 0."""
        key = (len(like), owners)
        if key not in self._masks:
            of_columns = torch.tensor(owners, device=self._device)
            self._masks[key] = (self._by_count[len(like)][:, None] == of_columns).to(like.dtype)
        return self._masks[key]


def shareable(model: nn.Module) -> bool:
    """Whether rows with different adapters may be in one pass of the model: whether each of its modules is given every
    token. Experts that are modules of their own are given some."""
    return not any("expert" in name and _sizes(module) is not None for name, module in model.named_modules())


def linear_names(model: Any) -> tuple[str, ...]:
    """The last parts of the names of a causal LM's linear layers, without the output layer's, sorted."""
    modules, output = model.named_modules(), model.get_output_embeddings()
    linear = {
        name.rpartition(".")[2] for name, each in modules if isinstance(each, nn.Linear | Conv1D) and each is not output
    }
    return tuple(sorted(linear))


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Inputs and outputs of a module that may have an adapter."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    if isinstance(module, Conv1D):
        return module.weight.shape[0], module.weight.shape[1]
    return None
