"""What a vLLM server takes of a GPU: its weights, its cache, and what it keeps while it sleeps.

Fixed amounts are of vllm#11743 (a small model on a card of 80 GB): 0.67 GiB that torch does not know of and 1.2 GiB of
activations while it is awake, 0.93 GiB while it sleeps. With a model of 1.5B on an H200 it was 0.45, 0.68, and 1.0 with
CUDA graphs or 0.84 without (docs/gpu.md).
"""

from dataclasses import dataclass
from typing import Any, Final

from lightning_rl.config.schema import Config
from lightning_rl.inference.vllm.command import MOST_VERSIONS
from lightning_rl.memory.gpus import GIB, Gpu
from lightning_rl.ppo.local_workers import FORMATS
from lightning_rl.ppo.resolved_config import versions_at_once

AWAKE: Final = round((0.67 + 1.2) * GIB)
ASLEEP: Final = GIB


@dataclass(frozen=True)
class VllmMemory:
    """Bytes on each of its GPUs: `weights`, `share` of the card that it takes while it is awake, of which `cache` is
    left for keys and values (`per_token` for each token); `asleep` is what stays while it sleeps, None where it never
    does. `tokens` are those that the cache has room for."""

    weights: int
    share: int
    per_token: int
    asleep: int | None

    @property
    def cache(self) -> int:
        return self.share - self.weights - AWAKE

    @property
    def tokens(self) -> int:
        return max(0, self.cache) // max(self.per_token, 1)

    @property
    def resting(self) -> int:
        """What it takes while the trainer computes."""
        return self.share if self.asleep is None else self.asleep


def vllm_engine(
    config: Config, model: Any, parameters: int, gpu: Gpu, *, sleeps: bool, adapter: int = 0
) -> VllmMemory | None:
    """A server on one of its GPUs, which samples an adapter of so many numbers; None where the run starts none."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "vllm" or rollout.server_urls:
        return None
    parallel = rollout.tensor_model_parallel_size
    return VllmMemory(
        weights=(parameters // parallel + adapter * min(versions_at_once(config), MOST_VERSIONS))
        * sampled_dtype(config).itemsize,
        share=int(rollout.gpu_memory_utilization * gpu.memory),
        per_token=cache_bytes(config, model) // min(parallel, _heads(model.get_text_config())),
        asleep=ASLEEP if sleeps else None,
    )


def sampled_dtype(config: Config) -> Any:
    """The number format in which the engine computes."""
    dtype = config.actor_rollout_ref.rollout.dtype
    return FORMATS[dtype or config.actor_rollout_ref.actor.fsdp_config.model_dtype]


def cache_bytes(config: Config, model: Any) -> int:
    """Keys and values of a token: 2 x layers x heads of keys x their width x bytes of a number.

    Layers of linear attention keep none. With latent attention vLLM keeps a layer's latent and its rotated key (MLA,
    DeepSeek-V2, arXiv 2405.04434).
    """
    text = model.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    layers = sum(kind != "linear_attention" for kind in kinds)
    latent = getattr(text, "kv_lora_rank", None)
    if latent and config.actor_rollout_ref.rollout.name == "vllm":
        return int(layers * (latent + text.qk_rope_head_dim) * sampled_dtype(config).itemsize)
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * layers * _heads(text) * width * sampled_dtype(config).itemsize)


def _heads(text: Any) -> int:
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
