"""Law 7 for every loss: rows, their order, micro-batches and workers change neither loss nor gradient. In float64.

And what else goes into the actor's loss: importance weights, the divergence from a reference, numbers that are none.
"""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_rl.rl.aggregation import MODES, token_weights
from lightning_rl.rl.kl import kl_penalty
from lightning_rl.rl.losses import LOSSES, Loss, LossInputs, LossOptions, PolicyLoss, gpg
from lightning_rl.training.actor import Actor
from lightning_rl.training.batch import MiniBatch, TrainingSequence, canonical_order
from lightning_rl_adapters import forest
from tests.lightning_rl.training.test_actor import config, forests_of_rollouts, merged, per_call, tiny_model
from tests.random_examples import examples

# Wide enough that losses which choose tokens choose some of these few.
OPTIONS = {
    "dro_beta": 0.1, "clip_cov_ratio": 0.3, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0, "kl_cov_ratio": 0.3,
    "rollout_is": "sequence", "entropy_coeff": 0.0,
}  # fmt: skip
OFTEN = ("vanilla", "gspo", "kl_cov", "clip_cov")  # by token, by row, and by what the rows of a batch have together
several = settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def learned(
    sequences: list[TrainingSequence], *, workers: int = 1, order: random.Random | None = None, **changes: object
) -> tuple[float, Tensor]:
    """Loss and gradient of one mini-batch; with several workers, the sum of what each makes of its rows."""
    actor = Actor(tiny_model(), config(**(OPTIONS | changes)), pad_id=0)
    [mini] = actor.plan(sequences, rollouts=1)
    if order is not None:
        order.shuffle(mini.sequences)
    constants = actor.prepare(mini.sequences)
    parts = [MiniBatch(mini.sequences[worker::workers], mini.weights) for worker in range(workers)]
    loss = sum(actor.accumulate(part, constants)["actor/pg_loss"] for part in parts if part.sequences)
    return loss, torch.cat([p.grad.flatten() for p in actor.model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.long) for name in LOSSES]
)
@several
@given(
    forests_of_rollouts(),
    st.sampled_from(MODES),
    st.randoms(use_true_random=False),
    st.integers(1, 3),
    st.integers(6, 40),
    st.integers(2, 3),
)
def test_rows_order_micro_batches_and_workers_change_nothing(
    name: str,
    rollouts: list[forest.Forest],
    mode: str,
    order: random.Random,
    micro_rows: int,
    micro_tokens: int,
    workers: int,
) -> None:
    how = {"loss_mode": name, "loss_agg_mode": mode}
    loss, gradient = learned(merged(rollouts), **how)
    others: tuple[tuple[list[TrainingSequence], dict[str, Any]], ...] = (
        (per_call(rollouts), {}),
        (merged(rollouts), {"order": order}),
        (per_call(rollouts), {"order": order, "micro_batch_rows": micro_rows}),
        (merged(rollouts), {"micro_batch_tokens": micro_tokens}),
        (merged(rollouts), {"workers": workers}),
    )
    for sequences, changes in others:
        other_loss, other_gradient = learned(sequences, **how, **changes)
        assert other_loss == pytest.approx(loss, abs=1e-6, rel=1e-6)
        torch.testing.assert_close(other_gradient, gradient, atol=1e-6, rtol=1e-5)


@given(forests_of_rollouts(), st.randoms(use_true_random=False))
@several
def test_the_canonical_order_is_one_of_all_tokens_that_rows_do_not_change(
    rollouts: list[forest.Forest], order: random.Random
) -> None:
    def said(sequences: list[TrainingSequence]) -> list[tuple[int, int, int]]:
        tokens = [(s.rollout, int(place), int(s.token_ids[place])) for s in sequences for place in s.trained]
        found = canonical_order(sequences)
        assert sorted(found.tolist()) == list(range(len(tokens)))
        return [tokens[i] for i in found]

    shuffled = merged(rollouts)
    order.shuffle(shuffled)
    assert said(merged(rollouts)) == said(shuffled) == said(per_call(rollouts))


def test_the_canonical_order_does_without_calls_and_without_tokens() -> None:
    [one, other] = answered([1.0, 1.0])
    one.calls = other.calls = {}
    assert canonical_order([other, one]).tolist() == [2, 3, 0, 1]
    assert canonical_order([]).tolist() == []
    one.keep(np.zeros(2, bool))
    assert canonical_order([one, other]).tolist() == [0, 1]


def answered(advantages: list[float]) -> list[TrainingSequence]:
    """Rollouts with the same prompt, two trained tokens each."""
    made = []
    for rollout, advantage in enumerate(advantages):
        made.append(
            TrainingSequence(
                rollout=rollout,
                token_ids=np.array([3, 4, 5 + rollout, 9]),
                trained=np.array([2, 3]),
                rollout_log_probs=np.full(2, -3.3, np.float32),
                advantages=np.full(2, advantage, np.float32),
                temperature=np.ones(2, np.float32),
                old_log_probs=np.full(2, -3.4, np.float32),
                calls={str(rollout): 2},
            )
        )
    return made


@pytest.mark.parametrize(("name", "passes"), [("vanilla", 2), ("cispo", 2), ("gspo", 4), ("clip_cov", 4)])
def test_only_a_loss_that_must_know_the_mini_batch_costs_another_pass(name: str, passes: int) -> None:
    actor = Actor(tiny_model(), config(loss_mode=name, micro_batch_rows=1), pad_id=0)
    counted = []
    actor.model.register_forward_hook(lambda *_: counted.append(1))
    actor.update(actor.plan(answered([1.0, -1.0]), rollouts=2))
    assert len(counted) == passes


def test_the_draw_of_clip_cov_is_made_of_the_optimizer_step() -> None:
    def dropped(step: int) -> list[float]:
        actor = Actor(tiny_model(), config(**OPTIONS | {"loss_mode": "clip_cov"}), pad_id=0)
        actor.optimizer.steps = step
        sequences = answered([1.0, -1.0, 0.5, -0.5, 2.0])
        constants = actor.prepare(sequences)
        return [float(value) for s in sequences for value in constants[id(s)]]

    before = torch.get_rng_state()
    first = dropped(0)
    torch.manual_seed(12345)
    assert dropped(0) == first
    assert any(dropped(step) != first for step in range(1, 5))
    torch.set_rng_state(before)


@pytest.mark.parametrize("name", ["vanilla", "gspo", "geo_mean", "sapo"])
def test_importance_weights_multiply_the_loss_of_their_tokens(name: str) -> None:
    """Where the loss is linear in A: as if A were multiplied. verl takes for GMPO the weights' mean over a row."""
    weighted, scaled = answered([1.0, -1.0]), answered([1.0, -1.0])
    for own, other in zip(weighted, scaled, strict=True):
        own.weights = np.array([0.5, 2.0], np.float32)
        other.advantages = other.advantages * own.weights
    found, expected = (learned(s, loss_mode=name) for s in (weighted, scaled))
    assert found[0] == pytest.approx(expected[0])
    torch.testing.assert_close(found[1], expected[1])
    one = answered([1.0, -1.0])
    one[0].weights = np.array([0.5, 2.0], np.float32)  # the other's are 1
    assert learned(one, loss_mode=name, micro_batch_rows=1)[0] == pytest.approx(learned(one, loss_mode=name)[0])


def test_tokens_that_are_left_out_take_their_numbers_with_them() -> None:
    [sequence] = answered([1.0])
    sequence.weights, sequence.reference_log_probs = np.array([1, 2], np.float32), np.array([3, 4], np.float32)
    sequence.keep(np.array([False, True]))
    assert (sequence.weights.tolist(), sequence.reference_log_probs.tolist()) == ([2], [4])
    assert len(sequence.old_log_probs if sequence.old_log_probs is not None else []) == 1


@pytest.mark.parametrize("kind", ["k1", "k3", "low_var_kl+"])
def test_the_divergence_from_a_reference_is_added(kind: str) -> None:
    sequences = answered([1.0, -1.0])
    for sequence in sequences:
        sequence.reference_log_probs = np.full(2, -2.5, np.float32)
    plain = learned(sequences)[1]
    changes: dict[str, object] = {"kl_loss_coef": 0.3, "kl_loss_type": kind, "loss_agg_mode": "token-mean"}
    actor = Actor(tiny_model(), config(**(OPTIONS | changes)), pad_id=0)
    [mini] = actor.plan(sequences, rollouts=1)
    metrics = actor.accumulate(mini)
    own = torch.from_numpy(np.concatenate(actor.log_probs(sequences)))
    expected = kl_penalty(own, torch.full((4,), -2.5), kind).mean().item()
    assert metrics["actor/kl_loss"] == pytest.approx(expected, abs=1e-6)
    gradient = torch.cat([p.grad.flatten() for p in actor.model.parameters() if p.grad is not None])
    assert not torch.allclose(gradient, plain)


def test_what_the_update_needs_must_be_there_and_be_numbers() -> None:
    sequences = answered([1.0, -1.0])
    with pytest.raises(ValueError, match="reference_log_probs are not set; compute them before the update"):
        learned(sequences, kl_loss_coef=0.1)
    sequences[1].old_log_probs = np.array([-1.0, np.nan], np.float32)
    with pytest.raises(ValueError, match="old_log_probs of rollout 1 are nan at position 3"):
        learned(sequences)


def test_a_loss_that_is_no_number_names_its_rollouts() -> None:
    actor = Actor(tiny_model(), config(), pad_id=0)
    with torch.no_grad():
        next(actor.model.parameters()).fill_(float("nan"))
    [mini] = actor.plan(answered([1.0, -1.0]), rollouts=1)
    with pytest.raises(FloatingPointError, match=r"actor/pg_loss is nan for the rollouts \[0, 1\]"):
        actor.accumulate(mini)


def test_a_loss_of_your_own_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(tokens: LossInputs, options: LossOptions) -> PolicyLoss:
        own = gpg(tokens, options)
        return own._replace(loss=own.loss / 2)

    monkeypatch.setitem(LOSSES, "mine", Loss(half))
    mine, whole = (learned(answered([1.0, -1.0]), loss_mode=name) for name in ("mine", "gpg"))
    torch.testing.assert_close(2 * mine[1], whole[1])
    for wrong, told in (
        (lambda tokens, options: half(tokens, options).loss, r"a Tensor; it must give PolicyLoss"),
        (lambda tokens, options: PolicyLoss(*[part.sum() for part in half(tokens, options)]), r"a loss of \[\]; it mu"),
    ):
        monkeypatch.setitem(LOSSES, "mine", Loss(wrong))
        with pytest.raises(TypeError, match=rf"loss_mode 'mine' gave {told}"):
            learned(answered([1.0, -1.0]), loss_mode="mine")
    monkeypatch.setitem(LOSSES, "mine", half)
    with pytest.raises(ValueError, match=r"LOSSES\['mine'\] is .*; give Loss\(function\)"):
        Actor(tiny_model(), config(loss_mode="mine"), pad_id=0)
    with pytest.raises(ValueError, match="'yours' is unknown; there are vanilla"):
        Actor(tiny_model(), config(loss_mode="yours"), pad_id=0)


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_is_the_sum_of_weight_times_token_loss(mode: str) -> None:
    """By hand, for gpg: rollouts of 2 and 1 trained tokens."""
    sequences = answered([1.0, -1.0])
    sequences[1].keep(np.array([True, False]))
    actor = Actor(tiny_model(), config(loss_mode="gpg", loss_agg_mode=mode), pad_id=0)
    own = actor.log_probs(sequences)
    first, second = token_weights([2, 1], mode, scale_factor=8.0)
    [mini] = actor.plan(sequences, rollouts=1)
    expected = -first * own[0].sum() + second * own[1].sum()
    assert actor.accumulate(mini)["actor/pg_loss"] == pytest.approx(expected, abs=1e-6)
