"""The forward pass of the Llama family (Llama, Qwen2, Qwen3) with few, large operations.

The modules of transformers spend most of a small model's decode step between operations. Here q, k and v
are one matrix, gate and up another; q and k are stored with the two halves of each head interleaved, so
that rotary embedding is one complex product, and k and v lie side by side, so that one copy caches both.

Invariant: the logits equal the modules' to float rounding, with the same weights: the matrices that are
merged as they stand share their memory with the modules, and `refresh` redoes the interleaved ones.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_rl.inference.adapters import Adapters, LowRank
from lightning_rl.inference.cache import SlotCache

FAMILIES = {"llama", "qwen2", "qwen3"}
STATIC_ROPE = {"default", "linear", "llama3", "yarn"}


def fits(model: nn.Module) -> bool:
    """Whether this model is one that `FusedDecoder` computes exactly: family, dtype, rope, names."""
    config: Any = model.config
    parameter = next(model.parameters())
    return (
        config.model_type in FAMILIES
        and parameter.dtype in (torch.float32, torch.bfloat16)
        and config.hidden_act == "silu"
        and config.rope_parameters.get("rope_type") in STATIC_ROPE
        and config.rope_parameters.get("partial_rotary_factor", 1.0) == 1.0
        and getattr(config, "pretraining_tp", 1) == 1
        and all(name.removesuffix(".bias").endswith(_KNOWN) for name in model.state_dict())
    )


_KNOWN = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"self_attn.{name}_norm.weight" for name in "qk"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "layernorm.weight",
    "model.norm.weight",
    "embed_tokens.weight",
    "lm_head.weight",
)


class _Layer:
    """One layer's weights, merged; `n_rotary` heads (q's, then k's) are interleaved."""

    def __init__(self, module: Any, head_dim: int) -> None:
        self.module = module
        attention, mlp = module.self_attn, module.mlp
        self.eps = module.input_layernorm.variance_epsilon
        half = torch.arange(head_dim // 2, device=attention.q_proj.weight.device)
        self.interleave = torch.stack([half, half + head_dim // 2], dim=1).reshape(-1)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.qkv = torch.cat([one.weight.data for one in projections])
        _share(attention.v_proj.weight, self.qkv)
        self.qkv_bias: Tensor | None = None
        if attention.q_proj.bias is not None:
            self.qkv_bias = torch.cat([one.bias.data for one in projections])
            _share(attention.v_proj.bias, self.qkv_bias)
        self.gate_up = torch.cat([mlp.gate_proj.weight.data, mlp.up_proj.weight.data])
        mlp.gate_proj.weight.data, mlp.up_proj.weight.data = self.gate_up.chunk(2)
        self.gate_up_bias: Tensor | None = None
        if mlp.gate_proj.bias is not None:
            self.gate_up_bias = torch.cat([mlp.gate_proj.bias.data, mlp.up_proj.bias.data])
            mlp.gate_proj.bias.data, mlp.up_proj.bias.data = self.gate_up_bias.chunk(2)
        self.head_norm: Tensor | None = None  # [q heads + k heads, head_dim]
        self.low_qkv: LowRank | None = None
        self.low_output: LowRank | None = None
        self.low_gate_up: LowRank | None = None
        self.low_down: LowRank | None = None
        self.refresh()

    def refresh(self) -> None:
        """Redo the interleaved copies of q's and k's weights from the modules'."""
        attention = self.module.self_attn
        rotary = (attention.q_proj, attention.k_proj)
        start = 0
        for projection in rotary:
            size = projection.weight.shape[0]
            rows = slice(start, start + size)
            self.qkv[rows] = self._interleaved(projection.weight.data)
            if self.qkv_bias is not None:
                self.qkv_bias[rows] = self._interleaved(projection.bias.data)
            start += size
        if hasattr(attention, "q_norm"):
            dim = len(self.interleave)
            counts = [one.weight.shape[0] // dim for one in rotary]
            norms = (attention.q_norm.weight.data, attention.k_norm.weight.data)
            self.head_norm = torch.cat(
                [norm[self.interleave].expand(n, dim) for norm, n in zip(norms, counts, strict=True)]
            )

    def adapt(self, adapters: Adapters, name: str) -> None:
        """Take the adapters of the module, which has this name."""
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        rotary = ((f"{attention}.{one}_proj", self._interleaved) for one in "qk")
        self.low_qkv = adapters.of(*rotary, (f"{attention}.v_proj", None))
        self.low_output = adapters.of((f"{attention}.o_proj", None))
        self.low_gate_up = adapters.of((f"{mlp}.gate_proj", None), (f"{mlp}.up_proj", None))
        self.low_down = adapters.of((f"{mlp}.down_proj", None))

    def _interleaved(self, weight: Tensor) -> Tensor:
        heads = weight.reshape(len(weight) // len(self.interleave), len(self.interleave), *weight.shape[1:])
        return heads[:, self.interleave].flatten(0, 1)


class FusedDecoder:
    """Runs tokens through the layers of `model`; several threads may, each with a cache of its own."""

    def __init__(self, model: nn.Module, max_length: int) -> None:
        top: Any = model
        config = top.config
        first = top.model.layers[0].self_attn
        self.head_dim: int = first.head_dim
        self.kv_heads: int = config.num_key_value_heads
        self.repeat: int = config.num_attention_heads // self.kv_heads
        self.rotary_heads = config.num_attention_heads + self.kv_heads
        self.scale: float = first.scaling
        self.embedding = top.model.embed_tokens
        self.norm = top.model.norm
        self.head = top.lm_head
        self.layers = [_Layer(module, self.head_dim) for module in top.model.layers]
        positions = torch.arange(max_length, device=self.norm.weight.device)[None]
        cos, sin = top.model.rotary_emb(self.norm.weight, positions)
        half = self.head_dim // 2
        self.rotation = torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float())
        self.low_embedding: LowRank | None = None
        self.low_head: LowRank | None = None

    def adapt(self, adapters: Adapters) -> None:
        """Take the adapters as they are now."""
        for number, layer in enumerate(self.layers):
            layer.adapt(adapters, f"model.layers.{number}")
        self.low_embedding = adapters.of(("model.embed_tokens", None))
        self.low_head = adapters.of(("lm_head", None))

    def refresh(self) -> None:
        """Follow the modules' weights after they were written."""
        for layer in self.layers:
            layer.refresh()

    def forward(self, cache: SlotCache, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Logits [b, vocab] after the last column.

        Args:
            cache: the keys and values of the rows, which was told where the tokens go.
            tokens, positions: [b, q], positions not negative.
            mask: [b, 1, q, window], added to the attention scores.
        """
        b, q = tokens.shape
        cache.allocate(self.kv_heads, self.head_dim, self.norm.weight)
        hidden = self.embedding.weight.index_select(0, tokens.reshape(-1))
        if self.low_embedding is not None:
            hidden = self.low_embedding.add_embedded(tokens.reshape(-1), hidden)
        rotation = self.rotation.index_select(0, positions.reshape(-1))[:, None]
        if self.repeat > 1 and q > 1:
            mask = mask.repeat(1, 1, self.repeat, 1)
        for number, layer in enumerate(self.layers):
            hidden = self._attend(cache, number, layer, hidden, rotation, mask)
            hidden = self._think(layer, hidden)
        last = hidden.view(b, q, -1)[:, -1]
        last = F.rms_norm(last, last.shape[-1:], self.norm.weight, self.norm.variance_epsilon)
        logits = F.linear(last, self.head.weight)
        return logits if self.low_head is None else self.low_head.add(last, logits)

    def _attend(
        self,
        cache: SlotCache,
        number: int,
        layer: _Layer,
        hidden: Tensor,
        rotation: Tensor,
        mask: Tensor,
    ) -> Tensor:
        dim, kv_heads, repeat = self.head_dim, self.kv_heads, self.repeat
        n, b = len(hidden), len(mask)
        q = n // b
        normed = F.rms_norm(hidden, hidden.shape[-1:], layer.module.input_layernorm.weight, layer.eps)
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias)
        if layer.low_qkv is not None:
            qkv = layer.low_qkv.add(normed, qkv)
        qkv = qkv.view(n, -1, dim)
        rotary = heads = qkv[:, : self.rotary_heads]
        if layer.head_norm is not None:
            rotary = F.rms_norm(rotary, (dim,), None, layer.eps) * layer.head_norm
        if rotary.dtype != torch.float32:
            rotary = rotary.float()  # complex numbers are of two float32
        torch.view_as_complex(rotary.view(n, -1, dim // 2, 2)).mul_(rotation)
        if rotary is not heads:
            heads.copy_(rotary)
        keys, values = cache.write(number, qkv[:, repeat * kv_heads :])
        # The query heads that share a key head stand in a column: [b, kv_heads, repeat * q, dim].
        queries = qkv[:, : repeat * kv_heads].view(b, q, kv_heads, repeat, dim)
        queries = queries.permute(0, 2, 3, 1, 4).reshape(b, kv_heads, repeat * q, dim)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=self.scale)
        mixed = mixed.view(b, kv_heads, repeat, q, dim).permute(0, 3, 1, 2, 4).reshape(n, -1)
        projection = layer.module.self_attn.o_proj
        hidden = torch.addmm(hidden, mixed, projection.weight.t())
        if layer.low_output is not None:
            hidden = layer.low_output.add(mixed, hidden)
        return hidden if projection.bias is None else hidden + projection.bias

    def _think(self, layer: _Layer, hidden: Tensor) -> Tensor:
        norm, down = layer.module.post_attention_layernorm, layer.module.mlp.down_proj
        normed = F.rms_norm(hidden, hidden.shape[-1:], norm.weight, layer.eps)
        gate_up = F.linear(normed, layer.gate_up, layer.gate_up_bias)
        if layer.low_gate_up is not None:
            gate_up = layer.low_gate_up.add(normed, gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        inner = F.silu(gate).mul_(up)
        hidden = torch.addmm(hidden, inner, down.weight.t())
        if layer.low_down is not None:
            hidden = layer.low_down.add(inner, hidden)
        return hidden if down.bias is None else hidden + down.bias


def _share(parameter: nn.Parameter, merged: Tensor) -> None:
    """Let the parameter be the last rows of `merged`, where its values already are."""
    parameter.data = merged[-parameter.shape[0] :]
