"""The critic: values of the states that tokens are sampled from, and an update that depends on rollouts alone."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from lightning_rl.rl.aggregation import MODES
from lightning_rl.training.batch import MiniBatch, TrainingSequence
from lightning_rl.training.critic import Critic, CriticConfig, ValueModel, value_head, values_of, weighted_value_loss
from lightning_rl.training.forward import Forward
from lightning_rl.training.lora import adapted
from lightning_rl.training.offload import Offload
from lightning_rl_adapters import forest
from tests.lightning_rl.training.test_actor import (
    forests_of_rollouts,
    merged,
    optim,
    per_call,
    tiny_model,
    two_answers,
)
from tests.random_examples import examples

several = settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def config(**changes: object) -> CriticConfig:
    values: dict[str, object] = {
        "cliprange_value": 0.5, "mini_batch_rollouts": 100, "micro_batch_rows": None, "micro_batch_tokens": None,
        "ppo_epochs": 1, "loss_agg_mode": "token-mean", "loss_scale_factor": 8.0, "optim": optim(),
    }  # fmt: skip
    return CriticConfig(**(values | changes))  # type: ignore[arg-type]


def critic_of(*, fresh: bool = False, **changes: object) -> Critic:
    """A tiny one in float64; unless `fresh` its values are not all 0."""
    model = ValueModel(tiny_model().base_model)
    if not fresh:
        nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    return Critic(model.eval(), config(**changes), pad_id=0)


def ready(sequences: list[TrainingSequence]) -> list[TrainingSequence]:
    """With old values and returns that the tokens before each decide, so that rows do not matter."""
    for sequence in sequences:
        before = np.cumsum(sequence.token_ids)[sequence.trained - 1]
        sequence.values = np.sin(before).astype(np.float32)
        sequence.returns = np.cos(before).astype(np.float32)
    return sequences


def gradient_of(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def learned(sequences: list[TrainingSequence], **changes: object) -> tuple[dict[str, float], Tensor]:
    """The metrics and the gradient of one mini-batch."""
    critic = critic_of(**changes)
    [mini] = critic.plan(sequences, rollouts=1)
    return critic.accumulate(mini), gradient_of(critic.model)


def test_a_value_is_that_of_the_state_before_its_token() -> None:
    critic = critic_of()
    sequences = two_answers()
    for sequence, found in zip(sequences, critic.values(sequences), strict=True):
        assert found.dtype == np.float32
        for position, value in zip(sequence.trained, found, strict=True):
            before = torch.from_numpy(sequence.token_ids[:position])[None]
            state = critic.model.trunk(before).last_hidden_state[0, -1]
            assert value == pytest.approx(critic.model.head(state).item(), abs=1e-6)


def test_the_first_values_are_0() -> None:
    for found in critic_of(fresh=True).values(two_answers()):
        assert not found.any()


@several
@given(
    forests_of_rollouts(), st.sampled_from(MODES), st.randoms(use_true_random=False), st.integers(1, 3),
    st.integers(6, 40),
)  # fmt: skip
def test_rows_their_order_and_micro_batches_change_nothing(
    rollouts: list[forest.Forest], mode: str, order: random.Random, micro_rows: int, micro_tokens: int
) -> None:
    metrics, gradient = learned(ready(merged(rollouts)), loss_agg_mode=mode)
    shuffled = ready(merged(rollouts))
    order.shuffle(shuffled)
    for sequences, changes in (
        (ready(per_call(rollouts)), {}),
        (shuffled, {}),
        (ready(merged(rollouts)), {"micro_batch_rows": micro_rows}),
        (ready(merged(rollouts)), {"micro_batch_tokens": micro_tokens}),
    ):
        other_metrics, other_gradient = learned(sequences, loss_agg_mode=mode, **changes)
        assert other_metrics == pytest.approx(metrics, abs=1e-5)
        torch.testing.assert_close(other_gradient, gradient, atol=1e-5, rtol=1e-5)


@several
@given(forests_of_rollouts(), st.sampled_from(MODES), st.lists(st.integers(0, 2), min_size=16, max_size=16))
def test_workers_that_share_a_mini_batch_add_up_to_it(
    rollouts: list[forest.Forest], mode: str, parts: list[int]
) -> None:
    sequences = ready(merged(rollouts))
    metrics, gradient = learned(sequences, loss_agg_mode=mode)
    critic = critic_of(loss_agg_mode=mode)
    [mini] = critic.plan(sequences, rollouts=1)
    loss = 0.0
    for worker in range(3):
        own = [sequence for sequence, part in zip(sequences, parts, strict=False) if part == worker]
        loss += critic.accumulate(MiniBatch(own, mini.weights)).get("critic/vf_loss", 0.0)
    assert loss == pytest.approx(metrics["critic/vf_loss"], abs=1e-5)
    torch.testing.assert_close(gradient_of(critic.model), gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_with_one_row_per_rollout_the_loss_is_verls(mode: str) -> None:
    sequences = two_answers()
    for sequence, own in zip(sequences, critic_of().values(sequences), strict=True):
        sequence.values = own + np.resize(
            np.float32([-0.3, 0.3]), len(own)
        )  # below: held back on the way to the return
        sequence.returns = own + 1
    metrics, _ = learned(sequences, loss_agg_mode=mode, cliprange_value=0.05)
    of_rows, clipped, tokens = [], 0, [len(s.trained) for s in sequences]
    for sequence, new in zip(sequences, critic_of().values(sequences), strict=True):
        assert sequence.values is not None
        assert sequence.returns is not None
        bound = np.clip(new, sequence.values - 0.05, sequence.values + 0.05)
        free, held = (new - sequence.returns) ** 2, (bound - sequence.returns) ** 2
        of_rows.append(0.5 * np.maximum(free, held))
        clipped += int((held > free).sum())
    sums = np.array([row.sum() for row in of_rows])
    expected = {
        "token-mean": sums.sum() / sum(tokens),
        "token-sum": sums.sum(),
        "seq-mean-token-sum": sums.mean(),
        "seq-mean-token-sum-norm": sums.mean() / 8.0,
        "seq-mean-token-mean": (sums / tokens).mean(),
    }
    assert metrics["critic/vf_loss"] == pytest.approx(expected[mode], abs=1e-6)
    assert metrics["critic/vf_clipfrac"] == pytest.approx(clipped / sum(tokens))
    assert clipped == 4


def test_a_mini_batch_of_verls() -> None:
    """Its example: new values .8 above the old ones, returns .3 above, clip .5: each token loses .5 x .5^2."""
    sequences = ready(two_answers())
    for sequence in sequences:
        assert sequence.values is not None
        sequence.returns = sequence.values + np.float32(0.3)
    new = torch.from_numpy(np.concatenate([s.values for s in sequences])) + 0.8  # type: ignore[arg-type]
    [mini] = critic_of().plan(sequences, rollouts=2)
    loss, metrics = weighted_value_loss(new, sequences, mini, clip=0.5)
    assert loss.item() == metrics["critic/vf_loss"].item() == pytest.approx(0.125)
    assert metrics["critic/vpred_mean"].item() == pytest.approx(new.mean().item())


def test_updates_bring_values_to_their_returns() -> None:
    critic = critic_of(fresh=True, cliprange_value=10.0, ppo_epochs=2, optim=optim(training_steps=30))
    sequences = ready(two_answers())
    losses = []
    for _ in range(30):
        for sequence, own in zip(sequences, critic.values(sequences), strict=True):
            sequence.values = own
        metrics = critic.update(critic.plan(sequences, rollouts=2))
        losses.append(metrics["critic/vf_loss"])
    assert losses[-1] < 0.05 * losses[0]
    assert set(metrics) == {f"critic/{n}" for n in ("vf_loss", "vf_clipfrac", "vpred_mean", "grad_norm", "lr")}
    assert critic.optimizer.steps == 60
    assert not critic.model.training


def test_nothing_to_learn_from_is_no_update() -> None:
    critic = critic_of()
    assert critic.update(critic.plan([], rollouts=2)) == {}
    assert critic.values([]) == []


def test_it_goes_on_from_what_was_saved() -> None:
    sequences = ready(two_answers())

    def go_on(critic: Critic, steps: int) -> list[dict[str, float]]:
        return [critic.update(critic.plan(sequences, rollouts=2)) for _ in range(steps)]

    schedule = optim(lr_scheduler_type="linear")
    expected = go_on(critic_of(optim=schedule), 4)
    assert [step["critic/lr"] for step in expected] == pytest.approx([1e-2, 0.9e-2, 0.8e-2, 0.7e-2])
    first = critic_of(optim=schedule)
    go_on(first, 2)
    other = critic_of(fresh=True, optim=schedule)
    other.load_state_dict(first.state_dict())
    assert go_on(other, 2) == expected[2:]


@pytest.mark.parametrize("change", ["lacks", "has more"])
def test_what_was_saved_of_another_model_is_refused_by_the_names_that_differ(change: str) -> None:
    state = critic_of().state_dict()
    if change == "lacks":
        del state["model"]["head.bias"]
    else:
        state["model"]["head.scale"] = state["model"]["head.bias"]
    name = "head.bias" if change == "lacks" else "head.scale"
    with pytest.raises(ValueError, match=f"the saved critic is another model: {name} of 1 names are not in both"):
        critic_of().load_state_dict(state)


@pytest.mark.parametrize("name", ["values", "returns"])
def test_an_update_needs_old_values_and_returns(name: str) -> None:
    sequences = ready(two_answers())
    setattr(sequences[1], name, None)
    with pytest.raises(ValueError, match=f"rollout 1 of the batch has no {name}"):
        learned(sequences)


def test_a_value_that_is_no_number_names_its_rollouts() -> None:
    sequences = ready(two_answers())
    assert sequences[1].returns is not None
    sequences[1].returns[0] = np.nan
    with pytest.raises(FloatingPointError, match=r"critic/vf_loss is nan for the rollouts \[1\] of the batch"):
        learned(sequences, micro_batch_rows=1)


def tiny_qwen3() -> Any:
    torch.manual_seed(1)
    shape = Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    return Qwen3ForCausalLM(shape).eval()


def test_it_is_loaded_from_the_folder_of_a_policy(tmp_path: Path) -> None:
    policy = tiny_qwen3()
    policy.save_pretrained(tmp_path)
    found = ValueModel.load(tmp_path)
    sequences = two_answers()
    own, theirs = (Forward(model, 0).hidden(sequences) for model in (found.trunk, policy))
    torch.testing.assert_close(own, theirs)
    assert found.head.in_features == 16


def test_it_begins_with_a_copy_of_the_policys_weights_even_of_one_that_only_its_adapter_trains() -> None:
    policy = tiny_qwen3()
    policy.requires_grad_(False)
    model = ValueModel.like(policy)
    before = [parameter.clone() for parameter in policy.parameters()]
    critic = Critic(model, config(ppo_epochs=3), pad_id=0)
    critic.update(critic.plan(ready(two_answers()), rollouts=2))
    assert all(map(torch.equal, before, policy.parameters()))
    changed = zip(model.trunk.parameters(), policy.base_model.parameters(), strict=True)
    assert any(not torch.equal(own, theirs) for own, theirs in changed)


def test_an_adapted_policy_can_lend_its_states() -> None:
    policy: Any = adapted(tiny_qwen3(), rank=2, alpha=4, targets="all-linear")
    head = value_head(policy)
    assert values_of(Forward(policy, 0).hidden(two_answers()), head).shape == (7,)


def test_values_are_of_float32_at_least() -> None:
    assert value_head(tiny_qwen3().to(torch.bfloat16)).weight.dtype == torch.float32
    critic = Critic(ValueModel.like(tiny_qwen3(), torch.bfloat16), config(), pad_id=0)
    assert critic.model.head.weight.dtype == torch.float32
    metrics = critic.update(critic.plan(ready(two_answers()), rollouts=2))
    assert np.isfinite(list(metrics.values())).all()
    assert {parameter.dtype for parameter in critic.model.trunk.parameters()} == {torch.bfloat16}


class Elsewhere(nn.Module):
    """A model on another device than the CPU, which takes note of where it is put."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, device="meta"))
        self.went: list[str] = []

    def to(self, device: Any) -> "Elsewhere":  # type: ignore[override]
        self.went.append(str(device))
        return self


def test_a_model_waits_in_main_memory_between_its_uses() -> None:
    model = Elsewhere()
    place = Offload(model, enabled=True)
    assert model.went == ["cpu"]
    with pytest.raises(KeyError), place.in_use():
        raise KeyError
    assert model.went == ["cpu", "meta", "cpu"]


def test_on_a_cpu_it_stays_where_it_is_and_unless_asked_anywhere() -> None:
    model = Elsewhere()
    with Offload(model, enabled=False).in_use():
        assert not model.went
    critic = critic_of(param_offload=True, optimizer_offload=True)
    sequences = ready(two_answers())
    plain = critic_of()
    expected = plain.update(plain.plan(sequences, rollouts=2))
    assert critic.update(critic.plan(sequences, rollouts=2)) == expected
    assert [found.tolist() for found in critic.values(sequences)] == [v.tolist() for v in plain.values(sequences)]
