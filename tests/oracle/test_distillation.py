"""The loss against a teacher: ours and verl's on random distributions."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_rl.rl.distillation import DistillationOptions, Taught, distillation_loss, policy_gradient
from lightning_rl.rl.losses import LossInputs
from tests.oracle.batches import AGGREGATIONS, SEEDS, batch, tensor

losses: Any = pytest.importorskip("verl.trainer.distillation.fsdp.losses", exc_type=ImportError)

pytestmark = pytest.mark.oracle


@given(SEEDS, st.integers(1, 6), st.sampled_from([None, -2.0]))
def test_forward_divergence_over_the_most_likely_tokens(seed: int, top: int, clamp: float | None) -> None:
    made = torch.Generator().manual_seed(seed)
    student, teacher = (3 * torch.randn(4, 9, generator=made, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    likely = teacher.log_softmax(-1).topk(top)
    config = SimpleNamespace(
        distillation_loss=SimpleNamespace(log_prob_min_clamp=clamp, use_chunked_topk=False, topk=top)
    )
    expected = losses.compute_forward_kl_topk(
        student[None],
        torch.nested.nested_tensor([likely.values], layout=torch.jagged),
        torch.nested.nested_tensor([likely.indices], layout=torch.jagged),
        config,
        "thd",
    )["distillation_losses"][0].clamp_min(0)
    options = DistillationOptions(loss_mode="forward_kl_topk", topk=top, log_prob_min_clamp=clamp)
    own = student.log_softmax(-1)
    tokens = Taught(own[:, 0], teacher.log_softmax(-1)[:, 0], own.gather(-1, likely.indices), likely.values)
    found = distillation_loss(tokens, options)
    torch.testing.assert_close(found, expected.double(), atol=1e-5, rtol=1e-5)  # verl computes it in float32
    assume(not ((found > 0) & (found < 1e-4)).any())  # where rounding decides about the floor of 0
    first, second = (torch.autograd.grad(x.sum(), student, retain_graph=True)[0] for x in (found, expected))
    torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)


@given(SEEDS, AGGREGATIONS, st.sampled_from([None, 0.5]))
def test_the_policy_gradient_of_an_estimate(seed: int, mode: str, clamp: float | None) -> None:
    import verl.trainer.ppo.core_algos as core

    random = batch(seed)
    theirs = tensor(random.new, grad=True)
    each = core.kl_penalty(theirs, tensor(random.reference), "k1")
    each = each if clamp is None else each.clamp(-clamp, clamp)
    config = SimpleNamespace(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, global_batch_info={})
    config.get = lambda name, default=None: getattr(config, name, default)
    expected, _ = core.get_policy_loss_fn("vanilla")(
        tensor(random.old), theirs, -each.detach(), tensor(random.mask), loss_agg_mode=mode, config=config
    )
    own = tensor(random.new[random.which], grad=True)
    options = DistillationOptions(loss_mode="k1", use_policy_gradient=True, loss_max_clamp=clamp)
    tokens = Taught(own, tensor(random.reference[random.which]))
    inputs = LossInputs(own, tensor(random.old[random.which]), torch.zeros_like(own), torch.from_numpy(random.rollout))
    found = policy_gradient(tokens, distillation_loss(tokens, options), inputs, options).loss
    total = (random.weights(mode) * found).sum()
    assert total.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
    [first], [second] = torch.autograd.grad(total, own), torch.autograd.grad(expected, theirs)
    assert first.tolist() == pytest.approx(second[random.which].tolist(), rel=1e-6, abs=1e-6)
