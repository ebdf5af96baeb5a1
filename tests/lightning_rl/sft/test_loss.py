"""The loss is cross-entropy: equal to a plain one over padded rows, each token counted once, in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen2Config, Qwen2ForCausalLM

from lightning_rl.config import compose
from lightning_rl.ppo.resolved_config import actor_config
from lightning_rl.sft.examples import Example
from lightning_rl.sft_algorithm import as_trained, weighted
from lightning_rl.training.actor import Actor
from lightning_rl.training.batch import sequence_of
from lightning_rl.training.forward import Forward
from lightning_rl_adapters import forest, rows
from lightning_rl_adapters.call import Call

# A trunk with two branches, and a second rollout: calls as (rollout, parent, prompt, answer).
CALLS = {
    "a0": ("a", None, [1, 2], [3, 4]),
    "a1": ("a", "a0", [5], [6, 7, 8]),
    "a2": ("a", "a0", [9, 10], [11]),
    "b0": ("b", None, [12], [13, 14, 15]),
}


def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).double().eval()


def examples(weights: tuple[float, float]) -> list[Example]:
    found = []
    for rollout, weight in zip("ab", weights, strict=True):
        calls = [
            Call(
                call_id=call_id, rollout_id=rollout, attempt_id=rollout, number=number, model="m", parent_id=parent,
                prompt_ids=prompt, response_ids=answer, logprobs=None, versions=[], temperature=1.0,
                finish_reason="stop",
            )
            for number, (call_id, (of, parent, prompt, answer)) in enumerate(CALLS.items())
            if of == rollout
        ]  # fmt: skip
        made = [sequence_of(row, 0) for row in rows.cut(forest.build(calls), {})]
        made = [replace(row, old_log_probs=np.zeros(len(row.trained), np.float32)) for row in made]
        found.append(Example(rollout, rollout, weight, made))
    return found


def plain(student: Qwen2ForCausalLM, weights: tuple[float, float]) -> torch.Tensor:
    """Each call a padded row of its own; the prompt is not counted."""
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for of, parent, prompt, answer in CALLS.values():
        before = [] if parent is None else [*CALLS[parent][2], *CALLS[parent][3]]
        ids = torch.tensor([[*before, *prompt, *answer, 0, 0]])
        labels = torch.full_like(ids, -100)
        start = len(before) + len(prompt)
        labels[0, start : start + len(answer)] = ids[0, start : start + len(answer)]
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        logits = student(ids, attention_mask=mask).logits
        weight = weights["ab".index(of)]
        total = total + weight * cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")
        count += weight * len(answer)
    return total / count


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.25, 3.0)])
def test_it_is_cross_entropy_of_the_answers_each_token_once(weights: tuple[float, float], packed: bool) -> None:
    student, oracle = model(), model()
    settings = compose(
        {"data": {"train_batch_size": 2}, "actor_rollout_ref": {"actor": {"entropy_coeff": 0.5, "optim": {"lr": 1e-2}}}}
    )
    actor = Actor(student, actor_config(as_trained(settings), 10), 0, Forward(student, 0, packed=packed))
    [mini] = actor.plan(weighted(examples(weights)), 2)
    found = actor.accumulate(mini)
    expected = plain(oracle, weights)
    expected.backward()  # type: ignore[no-untyped-call]
    assert found["actor/pg_loss"] == pytest.approx(expected.item(), rel=1e-6)  # weights are float32
    for ours, theirs in zip(student.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-8)


def test_what_is_of_ppo_alone_has_no_part_in_supervised_training() -> None:
    actor = {"ppo_epochs": 3, "use_kl_loss": True, "entropy_coeff": 0.5, "loss_agg_mode": "seq-mean-token-sum"}
    settings = compose(
        {
            "data": {"train_batch_size": 2},
            "sft": {"lr": 0.25},
            "actor_rollout_ref": {"actor": actor | {"optim": {"lr": 1e-2}}, "rollout": {"name": "vllm", "n": 4}},
            "algorithm": {"use_kl_in_reward": True, "adv_estimator": "gae"},
            "critic": {"enable": True},
            "distillation": {"enabled": True, "teacher_models": {"itself": {"weights": "initial"}}},
        }
    )
    found = as_trained(settings)
    ours = found.actor_rollout_ref.actor
    assert (ours.ppo_epochs, ours.use_kl_loss, ours.entropy_coeff) == (1, False, 0.0)
    assert (ours.loss_agg_mode, ours.ppo_mini_batch_size, ours.optim.lr) == ("token-mean", 2, 0.25)
    assert not found.algorithm.use_kl_in_reward
    assert not found.critic.enable
    assert (found.algorithm.adv_estimator, found.distillation.enabled) == ("grpo", False)
    assert (found.actor_rollout_ref.rollout.name, found.actor_rollout_ref.rollout.n) == ("embedded", 1)
