"""The reference: log probabilities of a policy that never changes, held beside the one that is trained or below it."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_rl.training.actor import Actor
from lightning_rl.training.forward import Forward
from lightning_rl.training.lora import adapted
from lightning_rl.training.reference import BaseOfAdapter, Reference
from lightning_rl_adapters import forest
from tests.lightning_rl.training.test_actor import config, forests_of_rollouts, merged, tiny_model, two_answers
from tests.random_examples import examples


def flat(found: list[Any]) -> list[float]:
    return [float(value) for of_sequence in found for value in of_sequence]


@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(forests_of_rollouts(), st.sampled_from([{}, {"rows": 1}, {"rows": 2}, {"tokens": 12}]))
def test_it_says_what_the_policy_says_however_much_is_computed_at_once(
    rollouts: list[forest.Forest], bounds: dict[str, int]
) -> None:
    sequences = merged(rollouts)
    found = Reference(tiny_model(), 0, **bounds).log_probs(sequences)
    assert [(len(own), own.dtype) for own in found] == [(len(s.trained), np.float32) for s in sequences]
    assert flat(found) == pytest.approx(flat(Actor(tiny_model(), config(), pad_id=0).log_probs(sequences)), abs=1e-6)


def test_it_stays_when_the_policy_learns() -> None:
    policy = tiny_model()
    reference = Reference(copy.deepcopy(policy), 0, offload=True)
    actor = Actor(policy, config(ppo_epochs=3), pad_id=0)
    sequences = two_answers()
    before = flat(reference.log_probs(sequences))
    assert before == flat(actor.log_probs(sequences))
    actor.update(actor.plan(sequences, rollouts=2))
    assert flat(reference.log_probs(sequences)) == before != flat(actor.log_probs(sequences))


def test_it_is_frozen() -> None:
    model = tiny_model().train()
    Reference(model, 0)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_no_rows_have_no_log_probabilities() -> None:
    assert Reference(tiny_model(), 0).log_probs([]) == []


def test_below_an_adapter_is_the_policy_that_training_began_with() -> None:
    policy: Any = adapted(tiny_model(), rank=2, alpha=4, targets="all-linear")
    sequences = two_answers()
    before = flat(Reference(tiny_model(), 0).log_probs(sequences))
    trained = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    actor = Actor(policy, config(ppo_epochs=3), pad_id=0)
    actor.update(actor.plan(sequences, rollouts=2))
    learned = flat(actor.log_probs(sequences))
    reference = BaseOfAdapter(policy, 0, rows=1)
    assert flat(reference.log_probs(sequences)) == pytest.approx(before, abs=1e-6)
    assert learned != pytest.approx(before, abs=1e-3)
    assert flat(actor.log_probs(sequences)) == learned  # the adapter is on again
    assert [name for name, parameter in policy.named_parameters() if parameter.requires_grad] == trained
    actor.update(actor.plan(sequences, rollouts=2))
    assert flat(actor.log_probs(sequences)) != learned


@pytest.mark.parametrize("of_adapter", [False, True])
def test_the_way_the_model_is_run_can_be_given(of_adapter: bool) -> None:
    model: Any = tiny_model().float()
    if of_adapter:
        model = adapted(model, rank=2, alpha=4, targets="all-linear")
    made = BaseOfAdapter if of_adapter else Reference
    rough = made(model, 0, forward=Forward(model, 0, autocast=torch.bfloat16)).log_probs(two_answers())
    fine = flat(made(model, 0).log_probs(two_answers()))
    assert flat(rough) != fine
    assert flat(rough) == pytest.approx(fine, abs=0.1)
