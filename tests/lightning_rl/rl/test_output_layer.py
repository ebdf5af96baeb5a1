"""Through the output layer by chunks: the numbers and the gradients of whole logits, without whole logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from lightning_rl.rl.logits import token_log_probs, top_log_probs
from lightning_rl.rl.output_layer import Behind, Layer, token_log_probs_of_states, top_log_probs_of_states
from tests.random_examples import examples

TOKENS, WIDTH, VOCABULARY = 11, 6, 17
BEHIND = [Behind(), Behind(cap=1.5), Behind(divisor=3.0), Behind(factor=0.25), Behind(factor=2.0, cap=0.7)]


def drawn(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """States, weight, bias, targets, temperature, candidates."""
    made = torch.Generator().manual_seed(seed)
    floats = [torch.randn(*size, generator=made, dtype=torch.float64).to(dtype).requires_grad_()
              for size in ((TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))]  # fmt: skip
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=made)
    temperature = 0.5 + torch.rand(TOKENS, generator=made, dtype=torch.float64)
    candidates = torch.stack([torch.randperm(VOCABULARY, generator=made)[:3] for _ in range(TOKENS)])
    return floats[0], floats[1], floats[2], targets, temperature.to(dtype), candidates


def whole_logits(states: Tensor, weight: Tensor, bias: Tensor | None, behind: Behind) -> Tensor:
    z = torch.nn.functional.linear(states, weight, bias) * behind.factor / behind.divisor
    return z if behind.cap is None else behind.cap * torch.tanh(z / behind.cap)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 99), st.sampled_from([1, 40, 60, 10**6]), st.sampled_from(BEHIND), st.booleans(), st.booleans())
def test_chunks_have_the_numbers_and_the_gradients_of_whole_logits(
    seed: int, chunk: int, behind: Behind, with_bias: bool, with_entropy: bool
) -> None:
    states, weight, bias, targets, temperature, candidates = drawn(seed)
    of_layer = (weight, bias if with_bias else None)
    weights = torch.randn(TOKENS, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    asked = {"with_entropy": with_entropy, "candidates": candidates}
    logits = whole_logits(states, *of_layer, behind)
    expected = token_log_probs(logits, torch.arange(TOKENS), targets, temperature, with_entropy=with_entropy,
                               candidates=candidates)  # fmt: skip
    found = token_log_probs_of_states(states, Layer(*of_layer, behind), targets, temperature, chunk=chunk, **asked)  # type: ignore[arg-type]
    inputs = [states, weight, *([bias] if with_bias else [])]
    gradients = []
    for log_probs, entropies, of_candidates in (found, expected):
        assert of_candidates is not None
        loss = (weights[:, 0] * log_probs).sum() + (weights[:, 2:] * of_candidates).sum()
        if entropies is not None:
            loss = loss + (weights[:, 1] * entropies).sum()
        gradients.append(torch.autograd.grad(loss, inputs))
    for own, other in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-12)


def test_the_most_likely_tokens_are_those_of_whole_logits() -> None:
    states, weight, bias, targets, temperature, _ = drawn(0)
    logits = whole_logits(states, weight, bias, Behind(cap=1.5))
    expected = top_log_probs(logits, torch.arange(TOKENS), targets, temperature, 4, vocabulary=15)
    layer = Layer(weight, bias, Behind(cap=1.5))
    found = top_log_probs_of_states(states, layer, targets, temperature, 4, vocabulary=15, chunk=40)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="the 18 most likely of 17 tokens"):
        top_log_probs_of_states(states, layer, targets, temperature, 18)


def test_a_frozen_layer_has_no_gradient_and_the_states_have_theirs() -> None:
    states, weight, _, targets, temperature, _ = drawn(0)
    weight.requires_grad_(False)
    log_probs, _, _ = token_log_probs_of_states(states, Layer(weight), targets, temperature, chunk=40)
    log_probs.sum().backward()  # type: ignore[no-untyped-call]
    assert states.grad is not None
    assert weight.grad is None


def test_a_layer_in_bfloat16_adds_its_gradient_up_in_float32() -> None:
    """Ones that are added one by one end at 256 in bfloat16."""
    states = torch.ones(2000, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(2000, dtype=torch.int64)
    log_probs, _, _ = token_log_probs_of_states(states, Layer(weight), targets, torch.ones(2000), chunk=2)
    [gradient] = torch.autograd.grad(log_probs.sum(), weight)
    assert gradient.flatten().tolist() == [1000, -1000]


def peak(tokens: int, vocabulary: int, *, by_chunks: bool) -> int:
    """The largest number of bytes that forward and backward pass hold, parameters and states included."""
    with FakeTensorMode(), (tracker := MemTracker()):
        states = torch.randn(tokens, 64, requires_grad=True)
        weight = torch.randn(vocabulary, 64, requires_grad=True)
        targets, temperature = torch.zeros(tokens, dtype=torch.int64), torch.ones(tokens)
        if by_chunks:
            found = token_log_probs_of_states(states, Layer(weight), targets, temperature, with_entropy=True)
        else:
            rows = torch.arange(tokens)
            found = token_log_probs(states @ weight.t(), rows, targets, temperature, with_entropy=True)
        assert found[1] is not None
        (found[0] + 0.1 * found[1]).sum().backward()
        [snapshot] = tracker.get_tracker_snapshot("peak").values()
        return int(snapshot["Total"])


@pytest.mark.long
def test_no_more_logits_are_held_than_a_chunk_has() -> None:
    """1,024 tokens and a vocabulary of 150,000: whole logits and their gradient are 1.1 GiB."""
    whole, chunks = (peak(1024, 150_000, by_chunks=way) for way in (False, True))
    assert whole > 2 * 1024 * 150_000 * 4
    assert chunks < 0.5 * 2**30
    assert peak(2048, 150_000, by_chunks=True) < chunks + 2**24
