"""In chunks or at once: the same log probabilities, entropies and gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_rl.rl.logits import rows_at, token_log_probs, top_log_probs
from lightning_rl.rl.losses import entropy
from tests.random_examples import examples


def directly(logits: Tensor, rows: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    at = logits[rows].to(torch.promote_types(logits.dtype, torch.float32)) / temperature[:, None]
    return at.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1), entropy(at)


def drawn(tokens: int, dtype: torch.dtype, seed: int, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(9, 17, generator=made, dtype=torch.float64)).to(dtype).requires_grad_()
    rows, targets = (torch.randint(0, top, (tokens,), generator=made) for top in (9, 17))  # some rows twice
    return logits, rows, targets, 0.5 + torch.rand(tokens, generator=made)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.integers(0, 12),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 99),
    st.sampled_from([1, 17, 40, 10**6]),
    st.booleans(),
)
def test_chunks_change_nothing(tokens: int, dtype: torch.dtype, seed: int, chunk: int, with_entropy: bool) -> None:
    inputs = drawn(tokens, dtype, seed)
    weights = torch.randn(2, tokens, generator=torch.Generator().manual_seed(seed))
    found = token_log_probs(*inputs, with_entropy=with_entropy, chunk=chunk)
    expected = directly(*inputs)
    torch.testing.assert_close(found[0], expected[0])
    losses = [(weights[0] * log_probs).sum() for log_probs in (found[0], expected[0])]
    if with_entropy:
        assert found[1] is not None
        torch.testing.assert_close(found[1], expected[1])
        losses = [loss + (weights[1] * own).sum() for loss, own in zip(losses, (found[1], expected[1]), strict=True)]
    else:
        assert found[1] is None
    gradients = [torch.autograd.grad(loss, inputs[0])[0] for loss in losses]
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-2 if dtype.itemsize == 2 else 1e-6, rtol=1e-2)
    if dtype.itemsize > 2:
        torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-5)


def test_chunks_of_any_size_agree_to_the_last_bit() -> None:
    inputs = drawn(12, torch.float32, 0)
    one, other = (token_log_probs(*inputs, with_entropy=True, chunk=chunk) for chunk in (17, 10**6))
    for part, same in zip(one[:2], other[:2], strict=True):
        assert part is not None
        assert same is not None
        assert torch.equal(part, same)
    first, second = (
        torch.autograd.grad(p.sum() + 0.1 * e.sum(), inputs[0])[0] for p, e, _ in (one, other) if e is not None
    )
    torch.testing.assert_close(first, second, rtol=0, atol=1e-6)  # a row that is read twice is summed in another order


def test_the_gradients_are_those_of_the_values() -> None:
    logits, rows, targets, temperature = drawn(6, torch.float64, 0)
    assert torch.autograd.gradcheck(
        lambda at: token_log_probs(at, rows, targets, temperature.double(), with_entropy=True, chunk=40)[:2], logits
    )


def test_entropies_alone_have_a_gradient_too() -> None:
    inputs = drawn(6, torch.float64, 0)
    _, entropies, _ = token_log_probs(*inputs, with_entropy=True)
    assert entropies is not None
    [found] = torch.autograd.grad(entropies.sum(), inputs[0])
    [expected] = torch.autograd.grad(directly(*inputs)[1].sum(), inputs[0])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_and_masked_logits_stay_finite(dtype: torch.dtype) -> None:
    logits = torch.tensor([[3e4, -3e4, 0.0], [0.0, 0.0, -math.inf]], dtype=dtype, requires_grad=True)
    log_probs, entropies, _ = token_log_probs(
        logits, torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]), torch.ones(3), with_entropy=True
    )
    assert entropies is not None
    assert entropies.tolist() == pytest.approx([0.0, 0.0, math.log(2)])
    assert log_probs.isfinite().all()
    [gradient] = torch.autograd.grad(log_probs.sum() + entropies.sum(), logits)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("chunk", [17, 40, 10**6])
def test_log_probabilities_of_candidates_and_their_gradient_are_those_of_the_whole_distribution(chunk: int) -> None:
    logits, rows, targets, temperature = drawn(7, torch.float64, 1)
    candidates = torch.stack([torch.randperm(17, generator=torch.Generator().manual_seed(n))[:4] for n in range(7)])
    weights = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = (logits[rows] / temperature[:, None]).log_softmax(-1)
    log_probs, _, found = token_log_probs(logits, rows, targets, temperature, candidates=candidates, chunk=chunk)
    assert found is not None
    torch.testing.assert_close(found, whole.gather(-1, candidates))
    losses = [
        (weights * of).sum() + own.sum()
        for of, own in ((found, log_probs), (whole.gather(-1, candidates), whole.gather(-1, targets[:, None])))
    ]
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in losses))
    chosen, likely, of_likely = top_log_probs(logits, rows, targets, temperature, 3, chunk=chunk)
    torch.testing.assert_close(chosen, log_probs.detach())
    torch.testing.assert_close(of_likely, whole.topk(3).values)
    torch.testing.assert_close(whole.gather(-1, likely), of_likely)
    with pytest.raises(ValueError, match="the 18 most likely of 17 tokens"):
        top_log_probs(logits, rows, targets, temperature, 18)


def test_rows_that_are_taken_several_times_add_up_their_gradients_in_one_order() -> None:
    values, above = torch.randn(800, 512), torch.randn(768, 512)
    places = torch.arange(768)
    places[[192, 384, 576]] = 0
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        gradients = []
        for _ in range(50):
            leaf = values.clone().requires_grad_()
            rows_at(leaf, places).backward(above)
            gradients.append(leaf.grad)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(gradients[0], gradient) for gradient in gradients[1:])
    torch.testing.assert_close(gradients[0][0], above[[0, 192, 384, 576]].sum(0))
