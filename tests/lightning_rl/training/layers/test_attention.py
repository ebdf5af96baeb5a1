"""Attention by segments is attention behind the mask: results and gradients; and a mask is what everyone else sees."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lightning_rl.training.layers import attention
from lightning_rl.training.layers.attention import Segment, Size, TreeMask, calls, pairs
from tests.random_examples import examples

SIZES = st.builds(Size, st.integers(0, 30), st.integers(1, 30))


@st.composite
def forests(draw: st.DrawFn) -> tuple[tuple[int, int], list[Segment], Tensor]:
    """B and T, segments, and what each place sees, bool [B, T, T]; padding sees itself."""
    rows, length = draw(st.integers(1, 3)), draw(st.integers(1, 24))
    segments, seen = [], torch.eye(length, dtype=torch.bool).repeat(rows, 1, 1)
    for row in range(rows):
        paths: list[list[int]] = [[]]
        place = 0
        while place < length and (place == 0 or draw(st.integers(0, 9))):
            before = draw(st.sampled_from(paths))
            own = list(range(place, min(length, place + draw(st.integers(1, 6)))))
            segments.append(Segment(row * length + place, len(own), row * length + np.array(before, dtype=np.int64)))
            for n, token in enumerate(own):
                seen[row, token, before + own[: n + 1]] = True
            paths.append(before + own)
            place = own[-1] + 1
    return (rows, length), draw(st.permutations(segments)), seen


def whole(seen: Tensor) -> Tensor:
    return torch.zeros(seen[:, None].shape, dtype=torch.float64).masked_fill_(~seen[:, None], -1e300)


def made(shape: tuple[int, int], segments: list[Segment], seen: Tensor, groups: int = 1) -> TreeMask:
    return TreeMask(shape, segments, torch.float64, torch.device("cpu"), lambda: whole(seen), groups=groups)


def states(shape: tuple[int, int], *heads: int) -> list[Tensor]:
    torch.manual_seed(0)
    rows, length = shape
    return [torch.randn(rows, of, length, 4, dtype=torch.float64, requires_grad=True) for of in heads]


def result_and_gradients(given: list[Tensor], mask: Tensor, at: Tensor, **options: Any) -> list[Tensor]:
    found = scaled_dot_product_attention(*given, attn_mask=mask, **options).transpose(1, 2).flatten(0, 1)[at]
    weights = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view_as(found).sin()
    return [found, *torch.autograd.grad((weights * found).sum(), given)]


def places(segments: list[Segment]) -> Tensor:
    return torch.cat([torch.arange(s.start, s.start + s.tokens) for s in segments])


@pytest.mark.parametrize("per_call", [0, 40, 10**6])
@given(forest=forests(), keys=st.sampled_from([1, 2, 4]))
@settings(max_examples=examples(100), deadline=None)
def test_segments_give_the_results_and_gradients_of_the_mask(
    per_call: int, forest: tuple[tuple[int, int], list[Segment], Tensor], keys: int
) -> None:
    shape, segments, seen = forest
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(attention.PER_CALL, "cpu", per_call)
        mask = made(shape, segments, seen)
    given = states(shape, 4, keys, keys)
    options = {"enable_gqa": keys != 4, "scale": 0.7}
    found = result_and_gradients(given, mask, places(segments), **options)
    assert mask.used == 1
    for a, b in zip(found, result_and_gradients(given, whole(seen), places(segments), **options), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@given(forest=forests())
@settings(max_examples=examples(30), deadline=None)
def test_keys_that_are_repeated_for_heads_are_taken_once(forest: tuple[tuple[int, int], list[Segment], Tensor]) -> None:
    shape, segments, seen = forest
    query, key, value = states(shape, 4, 2, 2)
    for mask in (made(shape, segments, seen, groups=2), whole(seen)):
        repeated = [query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)]
        out = scaled_dot_product_attention(*repeated, attn_mask=mask).transpose(1, 2).flatten(0, 1)[places(segments)]
        grads = torch.autograd.grad(out.pow(3).sum(), [query, key, value])
        if isinstance(mask, TreeMask):
            expected = [out, *grads]
        else:
            for a, b in zip(expected, [out, *grads], strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def group() -> tuple[tuple[int, int], list[Segment], Tensor]:
    """A prompt of 3 and two answers of 2."""
    before = np.arange(3)
    seen = torch.ones(7, 7, dtype=torch.bool).tril()
    seen[5:, 3:5] = False
    return (1, 7), [Segment(0, 3, before[:0]), Segment(3, 2, before), Segment(5, 2, before)], seen[None]


def test_whoever_asks_for_numbers_gets_the_mask() -> None:
    shape, segments, seen = group()
    mask = made(shape, segments, seen)
    assert (mask.shape, mask.dtype, mask.device.type, mask.ndim) == ((1, 1, 7, 7), torch.float64, "cpu", 4)
    scores = torch.zeros(1, 2, 7, 7, dtype=torch.float64, requires_grad=True)
    for found, expected in [
        (scores + mask, whole(seen).expand(1, 2, 7, 7)),
        (mask[..., :4], whole(seen)[..., :4]),
        (mask.to(torch.float32), whole(seen).to(torch.float32)),
    ]:
        assert type(found) is Tensor
        assert torch.equal(found, expected)
    assert mask.used == 0


def test_other_queries_than_the_trees_go_behind_the_mask() -> None:
    shape, segments, seen = group()
    mask = made(shape, segments, seen)
    query, key, value = states((2, 7), 2, 2, 2)
    found = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    assert torch.equal(found, scaled_dot_product_attention(query, key, value, attn_mask=whole(seen)))
    assert mask.used == 0


def test_answers_of_a_group_are_one_call() -> None:
    sizes = [Size(0, 40)] + [Size(40, 32)] * 8
    assert calls(sizes, "cpu") == [[0], list(range(1, 9))]
    assert pairs(sizes, "cpu") < 296**2


def test_a_short_answer_is_padded_and_one_that_is_far_longer_is_not() -> None:
    assert calls([Size(40, 32), Size(40, 29)], "cpu") == [[0, 1]]
    assert calls([Size(40, 400), Size(40, 29)], "cpu") == [[0], [1]]


@given(st.lists(SIZES, min_size=1, max_size=40), st.sampled_from(["cpu", "cuda", "mps"]))
@settings(max_examples=examples(100), deadline=None)
def test_every_segment_is_in_one_call_and_roots_are_apart(sizes: list[Size], device: str) -> None:
    found = calls(sizes, device)
    assert sorted(number for call in found for number in call) == list(range(len(sizes)))
    assert all(len({sizes[number].before == 0 for number in call}) == 1 for call in found)
    alone = sum(pairs([size], device) for size in sizes)
    assert pairs(sizes, device) <= alone + 1e-6
