"""Loaded by vLLM's workers, in vLLM's own environment: weights come from a file that the trainer wrote.

A vLLM server takes it with this folder in PYTHONPATH, `--worker-extension-cls lightning_rl_vllm.WorkerExtension` and
`--weight-transfer-config {"backend": "lightning_rl_file"}`. Invariant: a file that is not the model's is refused before
anything of the model changes. Nothing of this project can be imported here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "lightning_rl_file"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """`shapes` is what every file must hold: the tensors' names and shapes."""

    shapes: dict[str, list[int]]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """`path` is a safetensors file that this machine can read."""

    path: str


class FileWeights(WeightTransferEngine[InitInfo, UpdateInfo]):
    """All weights at once, from one file; every worker reads it and keeps its share."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """See vLLM."""
        self._shapes = init_info.shapes

    def start_weight_update(self) -> None:
        """Nothing yet: the model is touched when the file is known to fit."""

    def finish_weight_update(self) -> None:
        """Nothing more."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See vLLM, whose own waits for an accelerator that a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """See vLLM. Raises ValueError for a file that does not fit, RuntimeError where weights did not arrive."""
        with safe_open(update_info.path, framework="pt") as file:
            _check({name: list(file.get_slice(name).get_shape()) for name in file.keys()}, self._shapes)  # noqa: SIM118
            initialize_layerwise_reload(self.model)
            arrived = self.model.load_weights(_tensors(file))
            finalize_layerwise_reload(self.model, self.model_config)
        _repack_embeddings(self.model)
        if arrived is not None and (missing := {name for name, _ in self.model.named_parameters()} - arrived):
            raise RuntimeError(f"the weights of {_some(missing)} did not arrive: this engine must not go on")

    def shutdown(self) -> None:
        """Nothing is held."""


def _tensors(file: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name in file.keys():  # noqa: SIM118  # no mapping
        yield name, file.get_tensor(name)


def _check(actual: dict[str, list[int]], expected: dict[str, list[int]]) -> None:
    odd = {name for name in actual.keys() | expected.keys() if actual.get(name) != expected.get(name)}
    if odd:
        name = min(odd)
        raise ValueError(
            f"the file is not of this model: {_some(odd)} differ; {name} has shape {actual.get(name)}, "
            f"expected {expected.get(name)}"
        )


def _repack_embeddings(model: torch.nn.Module) -> None:
    """On the CPU vLLM multiplies with a copy of an output layer's weight, which its reload forgets where it is tied."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


def _some(names: set[str]) -> str:
    first = ", ".join(sorted(names)[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"


class WorkerExtension:
    """Has nothing of its own: naming it makes a worker load this file, which registers the backend."""


WeightTransferEngineFactory.register_engine(BACKEND, FileWeights)
