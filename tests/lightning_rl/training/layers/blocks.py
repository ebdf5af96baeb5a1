"""What a kernel of `flex_attention` does with a block mask, in plain torch and in any number format: it looks at the
blocks that are listed, and asks the rule only of those that are listed as seen in part."""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention


def listed(count: Tensor, which: Tensor) -> Tensor:
    """Which pairs of blocks are listed, bool [B, N, N]."""
    first = torch.arange(which.shape[-1]) < count[..., None]
    found = torch.zeros_like(which, dtype=torch.bool)
    return found.scatter_(-1, which.long(), first)[:, 0]


def seen(mask: BlockMask) -> Tensor:
    """Which pairs of places are seen, bool [B, T, T]."""
    length, _ = mask.seq_lengths
    size = mask.BLOCK_SIZE[0]
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    some = listed(mask.kv_num_blocks, mask.kv_indices)
    whole = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (some & whole).any()
    place = torch.arange(some.shape[-1] * size)
    rows = torch.arange(len(some))[:, None, None]
    by_rule = mask.mask_mod(rows, torch.tensor(0), place[:, None], place)
    spread = [part.repeat_interleave(size, 1).repeat_interleave(size, 2) for part in (some, whole)]
    return ((spread[0] & by_rule) | spread[1])[:, :length, :length]


def by_blocks(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    """As `layers.flex.attend`."""
    grouped = key.shape[1] != query.shape[1]
    return scaled_dot_product_attention(
        query, key, value, attn_mask=seen(mask)[:, None], scale=scale, enable_gqa=grouped
    )
