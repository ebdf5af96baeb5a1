"""Attention by blocks sees what the tree's mask shows, and is what torch's `flex_attention` computes of it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from lightning_rl.training.layers import flex
from lightning_rl.training.layers.attention import TreeMask
from tests.lightning_rl.training.layers.blocks import seen
from tests.lightning_rl.training.layers.test_attention import group
from tests.random_examples import examples

CPU = torch.device("cpu")
Ints = NDArray[np.int64]


@st.composite
def ends(draw: st.DrawFn) -> Ints:
    """Of lines of trees: where the subtree of each place ends, at its place at least."""
    rows, length = draw(st.integers(1, 3)), draw(st.integers(1, 40))
    found = np.zeros((rows, length), dtype=np.int64)
    for row in range(rows):
        open_until = [length]
        for place in range(length):
            while open_until[-1] <= place:
                open_until.pop()
            open_until.append(draw(st.integers(place + 1, open_until[-1])))
            found[row, place] = open_until[-1]
    return found


def rule(end: Ints) -> Tensor:
    place = torch.arange(end.shape[1])
    return (place <= place[:, None]) & (place[:, None] < torch.from_numpy(end)[:, None, :])


@pytest.mark.parametrize("block", [1, 4, 16])
@given(end=ends())
@settings(max_examples=examples(80), deadline=None)
def test_blocks_say_exactly_who_sees_whom(block: int, end: Ints) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "BLOCK", block)
        mask = flex.block_mask(end, CPU)
        some, whole = flex.seen_blocks(end)
    assert torch.equal(seen(mask), rule(end))
    for number in np.ndindex(whole.shape):
        row, query, key = number
        part = rule(end)[row, query * block : (query + 1) * block, key * block : (key + 1) * block]
        assert whole[number] <= bool(part.all())
        assert (some[number] or whole[number]) >= bool(part.any())


def test_blocks_beyond_another_branch_are_not_looked_at() -> None:
    """A prompt of 512 tokens and three answers of 512: of 16 x 16 blocks an answer's tokens see the prompt's and their
    own."""
    end = np.array([[2048] * 512 + [1024] * 512 + [1536] * 512 + [2048] * 512])
    some, whole = flex.seen_blocks(end)
    assert int(some.sum()) == 16  # those on the diagonal
    assert int(whole.sum()) == 6 * 4 + 3 * 4 * 4


def test_dropout_which_the_kernel_has_not_goes_by_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "attend", None)
    shape, segments, sees = group()
    end = np.array([[7] * 3 + [5] * 2 + [7] * 2])
    assert torch.equal(rule(end), sees)
    blocks = flex.block_mask(end, CPU)
    mask = TreeMask(shape, segments, torch.float32, CPU, lambda: sees, blocks=blocks)
    given = heads(7, torch.float32)
    scaled_dot_product_attention(*given, attn_mask=mask, dropout_p=0.5, enable_gqa=True)
    assert mask.used == 1


def heads(length: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, of, length, 16, dtype=dtype) for of in (4, 2, 2)]


END = np.array([[300] * 100 + [200] * 100 + [300] * 100])


def test_flex_attention_of_torch_takes_the_rule_in_float64() -> None:
    given = heads(300, torch.float64)
    found = flex_attention(*given, block_mask=flex.block_mask(END, CPU), enable_gqa=True)
    expected = scaled_dot_product_attention(*given, attn_mask=rule(END)[:, None], enable_gqa=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.long  # it compiles
def test_compiled_it_follows_the_blocks() -> None:
    given = heads(300, torch.float32)
    found = flex.attend(*given, flex.block_mask(END, CPU), None)
    expected = scaled_dot_product_attention(*given, attn_mask=rule(END)[:, None], enable_gqa=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.long
def test_more_shapes_of_heads_than_torch_would_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its limit of 8 torch computes the scores of T x T, with a warning that is easily missed."""
    torch.compiler.reset()
    monkeypatch.setattr(flex, "_compiled", torch.compile(flex_attention, dynamic=True, fullgraph=True, backend="eager"))
    mask = flex.block_mask(END, CPU)
    for width in range(8, 18):
        given = [torch.randn(1, of, 300, width) for of in (4, 2, 2)]
        flex.attend(*given, mask, None)
    monkeypatch.setattr(flex, "KERNELS", 1)
    with pytest.raises(FailOnRecompileLimitHit):
        flex.attend(*(torch.randn(1, of, 300, 18) for of in (4, 2, 2)), mask, None)


def test_it_is_for_gpus_and_their_number_formats() -> None:
    assert flex.usable(torch.device("cuda"), torch.bfloat16)
    assert not flex.usable(torch.device("cuda"), torch.float64)
    assert not flex.usable(CPU, torch.float32)
