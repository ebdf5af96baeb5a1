"""Law 7: loss and gradient depend on rollouts alone, not on rows, their order, or micro-batches. In float64."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import Gemma3Config, GPT2Config, PreTrainedConfig, Qwen2Config, Qwen2ForCausalLM

from lightning_rl.rl.aggregation import MODES
from lightning_rl.training.actor import Actor, ActorConfig
from lightning_rl.training.batch import TrainingSequence, micro_batches, sequence_of
from lightning_rl.training.forward import Forward
from lightning_rl.training.model_traits import has_dropout
from lightning_rl.training.optimizer import OptimizerConfig
from lightning_rl_adapters import forest, rows
from lightning_rl_adapters.call import Call, VersionRange
from lightning_rl_adapters.rows import Row
from lightning_rl_adapters.triplet import prompt_ids
from tests.random_examples import examples

VOCABULARY = 32


def tiny_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).double().eval()


def optim(**changes: object) -> OptimizerConfig:
    values: dict[str, object] = {
        "lr": 1e-2, "lr_warmup_steps": 0, "lr_scheduler_type": "constant", "min_lr_ratio": 0.0, "training_steps": 10,
        "betas": (0.9, 0.95), "weight_decay": 0.0, "grad_clip": 1e9,
    }  # fmt: skip
    return OptimizerConfig(**(values | changes))  # type: ignore[arg-type]


def config(**changes: object) -> ActorConfig:
    values: dict[str, object] = {
        "mini_batch_rollouts": 100, "micro_batch_rows": None, "micro_batch_tokens": None, "ppo_epochs": 1,
        "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0, "loss_agg_mode": "token-mean",
        "loss_scale_factor": 8.0, "entropy_coeff": 0.01, "optim": optim(),
    }  # fmt: skip
    return ActorConfig(**(values | changes))  # type: ignore[arg-type]


@st.composite
def forests_of_rollouts(draw: st.DrawFn) -> list[forest.Forest]:
    """A few rollouts, each a small forest of calls with random tokens."""
    tokens = st.integers(1, VOCABULARY - 1)
    found = []
    for r in range(draw(st.integers(1, 4))):
        calls: list[Call] = []
        for number in range(draw(st.integers(1, 4))):
            parent = draw(st.sampled_from([None, *(c.call_id for c in calls)]))
            response = draw(st.lists(tokens, min_size=1, max_size=4))
            calls.append(
                Call(
                    call_id=f"{r}-{number}",
                    rollout_id=str(r),
                    attempt_id="a",
                    number=number,
                    parent_id=parent,
                    model="m",
                    prompt_ids=draw(st.lists(tokens, min_size=1, max_size=4)),
                    response_ids=response,
                    logprobs=[-1.0 - draw(st.floats(0, 4)) for _ in response],
                    temperature=1.0,
                    finish_reason="stop",
                    versions=[VersionRange(0, 0, len(response))],
                )
            )
        found.append(forest.build(calls))
    return found


def merged(rollouts: list[forest.Forest]) -> list[TrainingSequence]:
    """The rows that training uses: one per leaf."""
    return _sequences([(i, row) for i, f in enumerate(rollouts) for row in rows.cut(f, {})])


def per_call(rollouts: list[forest.Forest]) -> list[TrainingSequence]:
    """The other extreme: every call a row of its own, with its whole prompt."""
    cut = []
    for i, f in enumerate(rollouts):
        for node in f.nodes.values():
            whole = forest.build(
                [
                    Call(
                        call_id=node.call.call_id,
                        rollout_id=node.call.rollout_id,
                        attempt_id="a",
                        number=0,
                        model="m",
                        prompt_ids=prompt_ids(node),
                        response_ids=node.call.response_ids,
                        logprobs=node.call.logprobs,
                        versions=node.call.versions,
                        temperature=1.0,
                        finish_reason="stop",
                    )
                ]
            )
            cut += [(i, row) for row in rows.cut(whole, {})]
    return _sequences(cut)


def _sequences(cut: list[tuple[int, Row]]) -> list[TrainingSequence]:
    made = []
    for rollout, row in cut:
        advantage = {c: (-1.0) ** rollout * (rollout + 0.5) for c in row.call_ids if c is not None}
        sequence = sequence_of(row, rollout, advantage)
        sequence.old_log_probs = sequence.rollout_log_probs
        made.append(sequence)
    return made


def loss_entropy_and_gradient(
    sequences: list[TrainingSequence], **changes: object
) -> tuple[float, float, torch.Tensor]:
    actor = Actor(tiny_model(), config(**changes), pad_id=0)
    [mini] = actor.plan(sequences, rollouts=1)
    found = actor.accumulate(mini)
    return (
        found["actor/pg_loss"],
        found["actor/entropy"],
        torch.cat([p.grad.flatten() for p in actor.model.parameters() if p.grad is not None]),
    )


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(forests_of_rollouts(), st.sampled_from(MODES), st.randoms(), st.integers(1, 3), st.integers(6, 40))
def test_rows_order_and_micro_batches_change_nothing(
    rollouts: list[forest.Forest], mode: str, order: random.Random, micro_rows: int, micro_tokens: int
) -> None:
    loss, entropy, gradient = loss_entropy_and_gradient(merged(rollouts), loss_agg_mode=mode)
    shuffled = merged(rollouts)
    order.shuffle(shuffled)
    for sequences, changes in (
        (per_call(rollouts), {}),
        (shuffled, {}),
        (merged(rollouts), {"micro_batch_rows": micro_rows}),
        (merged(rollouts), {"micro_batch_tokens": micro_tokens}),
    ):
        other_loss, other_entropy, other_gradient = loss_entropy_and_gradient(sequences, loss_agg_mode=mode, **changes)
        assert (other_loss, other_entropy) == pytest.approx((loss, entropy), abs=1e-5)
        torch.testing.assert_close(other_gradient, gradient, atol=1e-5, rtol=1e-5)


@settings(max_examples=examples(25), deadline=None)
@given(forests_of_rollouts())
def test_padding_and_company_do_not_change_log_probs(rollouts: list[forest.Forest]) -> None:
    sequences = merged(rollouts)
    actor = Actor(tiny_model(), config(), pad_id=0)
    together = actor.log_probs(sequences)
    for sequence, found in zip(sequences, together, strict=True):
        logits = actor.model(torch.from_numpy(sequence.token_ids)[None]).logits[0]
        expected = logits.log_softmax(-1)[sequence.trained - 1, sequence.token_ids[sequence.trained]]
        assert found == pytest.approx(expected.detach().numpy(), abs=1e-6)


def test_temperature_divides_the_logits() -> None:
    call = Call(
        call_id="c", rollout_id="r", attempt_id="a", number=0, model="m", prompt_ids=[3, 4], response_ids=[5],
        logprobs=[-1.0], versions=[VersionRange(0, 0, 1)], temperature=0.5, finish_reason="stop",
    )  # fmt: skip
    [sequence] = _sequences([(0, row) for row in rows.cut(forest.build([call]), {})])
    actor = Actor(tiny_model(), config(), pad_id=0)
    logits = actor.model(torch.tensor([[3, 4]])).logits[0, -1]
    assert actor.log_probs([sequence])[0][0] == pytest.approx((logits / 0.5).log_softmax(-1)[5].item(), abs=1e-6)


def test_an_update_makes_the_rewarded_answer_likelier() -> None:
    def sequence(rollout: int, token: int, advantage: float) -> TrainingSequence:
        call = Call(
            call_id=str(rollout), rollout_id=str(rollout), attempt_id="a", number=0, model="m", prompt_ids=[3, 4],
            response_ids=[token], logprobs=[-3.0], versions=[], temperature=1.0, finish_reason="stop",
        )  # fmt: skip
        [row] = rows.cut(forest.build([call]), {})
        return sequence_of(row, rollout, {str(rollout): advantage})

    actor = Actor(tiny_model(), config(), pad_id=0)
    batch = [sequence(0, 7, 1.0), sequence(1, 9, -1.0)]
    before = actor.log_probs(batch)
    for made, own in zip(batch, before, strict=True):
        made.old_log_probs = own
    actor.update(actor.plan(batch, rollouts=2))
    after = actor.log_probs(batch)
    assert after[0][0] > before[0][0]
    assert after[1][0] < before[1][0]


@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(forests_of_rollouts(), st.integers(1, 3), st.integers(1, 2))
def test_of_one_mini_batch_the_update_finds_the_old_log_probs_that_a_pass_before_it_would(
    rollouts: list[forest.Forest], micro_rows: int, epochs: int
) -> None:
    ends = []
    for known in (True, False):
        actor = Actor(tiny_model().float(), config(micro_batch_rows=micro_rows, ppo_epochs=epochs), pad_id=0)
        batch = merged(rollouts)
        own = actor.log_probs(batch)
        for sequence, log_probs in zip(batch, own, strict=True):
            sequence.old_log_probs = log_probs if known else None
        metrics = actor.update(actor.plan(batch, rollouts=len(rollouts)))
        ends.append((metrics, [parameter.detach().clone() for parameter in actor.model.parameters()]))
        for sequence, log_probs in zip(batch, own, strict=True):
            assert np.array_equal(sequence.old_log_probs, log_probs)
    assert ends[0][0] == ends[1][0]
    assert all(map(torch.equal, *(weights for _, weights in ends)))


def test_of_several_mini_batches_old_log_probs_must_be_known() -> None:
    batch = many_answers()
    for sequence in batch:
        sequence.old_log_probs = None
    actor = Actor(tiny_model(), config(mini_batch_rollouts=4), 0)
    with pytest.raises(ValueError, match="old_log_probs are not set, and only of one mini-batch"):
        actor.update(actor.plan(batch, rollouts=8))


def test_old_log_probs_that_some_sequences_of_a_mini_batch_have_are_kept_and_the_others_asked_for() -> None:
    batch = two_answers()
    batch[0].old_log_probs = None
    actor = Actor(tiny_model(), config(), 0)
    with pytest.raises(ValueError, match="old_log_probs are not set; compute them before the update"):
        actor.update(actor.plan(batch, rollouts=2))
    assert batch[1].old_log_probs is batch[1].rollout_log_probs


@pytest.mark.parametrize(
    ("settings", "drops"),
    [
        (Qwen2Config(), False),
        (Qwen2Config(attention_dropout=0.1), True),
        (GPT2Config(), True),
        (Gemma3Config(), False),
        (Gemma3Config(vision_config={"attention_dropout": 0.1}), True),
    ],
    ids=["none", "of attention", "by another name", "none that sees images", "of what sees images"],
)
def test_dropout_is_found_in_a_models_config(settings: PreTrainedConfig, drops: bool) -> None:
    model = nn.Module()
    model.config = settings
    assert has_dropout(model) is drops


@given(st.lists(st.integers(2, 30), min_size=1, max_size=30), st.integers(1, 5), st.integers(30, 90))
def test_micro_batches_keep_every_row_within_the_bounds(lengths: list[int], max_rows: int, max_tokens: int) -> None:
    call = Call(
        call_id="c", rollout_id="r", attempt_id="a", number=0, model="m", prompt_ids=[1], response_ids=[2],
        logprobs=None, versions=[], temperature=1.0, finish_reason="stop",
    )  # fmt: skip
    [row] = rows.cut(forest.build([call]), {})
    sequences = [sequence_of(row, i, {"c": 0.0}) for i in range(len(lengths))]
    for sequence, length in zip(sequences, lengths, strict=True):
        sequence.token_ids = sequence.token_ids.repeat(length)[:length]
    cut = list(micro_batches(sequences, rows=max_rows, tokens=max_tokens))
    assert sorted(s.rollout for m in cut for s in m) == list(range(len(lengths)))
    for micro in cut:
        assert len(micro) <= max_rows
        assert len(micro) * max(map(len, micro)) <= max_tokens


def two_answers() -> list[TrainingSequence]:
    """Two rollouts of one call each: the first is rewarded, the second is not."""
    made = []
    for rollout, answer in enumerate([[7, 8, 9, 10], [11, 12, 13]]):
        call = Call(
            call_id=str(rollout), rollout_id=str(rollout), attempt_id="a", number=0, model="m", prompt_ids=[3, 4],
            response_ids=answer, logprobs=[-3.0] * len(answer), versions=[], temperature=1.0, finish_reason="stop",
        )  # fmt: skip
        [row] = rows.cut(forest.build([call]), {})
        sequence = sequence_of(row, rollout, {str(rollout): 1.0 - 2 * rollout})
        sequence.old_log_probs = sequence.rollout_log_probs
        made.append(sequence)
    return made


def gradient_and_update(dtype: torch.dtype, autocast: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Of two answers: the gradient, and how the weights move in three passes."""
    model = tiny_model().to(dtype)
    actor = Actor(model, config(ppo_epochs=3), 0, Forward(model, 0, autocast=autocast))
    before = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    batch = two_answers()
    for sequence, own in zip(batch, actor.log_probs(batch), strict=True):
        sequence.old_log_probs = own
        assert own.dtype == "float32"
    plan = actor.plan(batch, rollouts=2)
    actor.accumulate(plan[0])
    gradient = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])
    metrics = actor.update(plan)
    assert all(math.isfinite(value) for value in metrics.values())
    assert {p.dtype for p in model.parameters()} == {dtype}
    return gradient, torch.cat([p.detach().double().flatten() for p in model.parameters()]) - before


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.bfloat16, None), (torch.float32, torch.bfloat16)], ids=["held", "autocast"]
)
def test_bfloat16_trains_in_the_direction_of_float32(dtype: torch.dtype, autocast: torch.dtype | None) -> None:
    gradient, update = gradient_and_update(torch.float32, None)
    other_gradient, other_update = gradient_and_update(dtype, autocast)
    assert torch.cosine_similarity(gradient, other_gradient, dim=0) > 0.99
    assert torch.cosine_similarity(update, other_update, dim=0) > 0.9


def test_autocast_multiplies_in_bfloat16_and_keeps_weights_and_losses_in_float32() -> None:
    model = tiny_model().float()
    exact = Actor(model, config(), 0).log_probs(two_answers())
    rough = Actor(model, config(), 0, Forward(model, 0, autocast=torch.bfloat16)).log_probs(two_answers())
    distance = max(abs(one - other).max() for one, other in zip(exact, rough, strict=True))
    assert 1e-5 < distance < 0.05


def test_a_small_step_is_lost_in_the_rounding_of_weights_that_are_held_in_bfloat16() -> None:
    def moved(dtype: torch.dtype, autocast: torch.dtype | None) -> float:
        model = tiny_model().to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)  # of the size that norms have
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        actor = Actor(model, config(optim=optim(lr=1e-4)), 0, Forward(model, 0, autocast=autocast))
        actor.update(actor.plan(two_answers(), rollouts=2))
        return (torch.cat([p.detach().flatten() for p in model.parameters()]) != before).float().mean().item()

    assert moved(torch.bfloat16, None) < 0.01
    assert moved(torch.float32, torch.bfloat16) > 0.5


def order_of(actor: Actor, passes: int) -> list[list[int]]:
    """The rollouts of each optimizer step, pass by pass."""
    plan = Actor(tiny_model(), config(mini_batch_rollouts=1), 0).plan(many_answers(), rollouts=8)
    found = []
    for _ in range(passes):
        order = actor._order(plan)
        actor.optimizer.steps += len(order)
        found.append([mini.sequences[0].rollout for mini in order])
    return found


def many_answers() -> list[TrainingSequence]:
    made = []
    for rollout in range(8):
        [sequence, _] = two_answers()
        sequence.rollout = rollout
        made.append(sequence)
    return made


def test_with_shuffle_mini_batches_come_in_another_order_in_every_pass_and_after_resuming_in_the_same() -> None:
    assert order_of(Actor(tiny_model(), config(), 0), 2) == [list(range(8))] * 2
    straight = order_of(Actor(tiny_model(), config(shuffle=True), 0), 4)
    assert all(sorted(order) == list(range(8)) for order in straight)
    assert len({tuple(order) for order in straight}) == 4
    first = Actor(tiny_model(), config(shuffle=True), 0)
    assert order_of(first, 2) == straight[:2]
    second = Actor(tiny_model(), config(shuffle=True), 0)
    second.load_state_dict(first.state_dict())
    assert order_of(second, 2) == straight[2:]


def test_every_pass_trains_every_mini_batch() -> None:
    actor = Actor(tiny_model(), config(shuffle=True, ppo_epochs=3, mini_batch_rollouts=1), 0)
    actor.update(actor.plan(many_answers(), rollouts=8))
    assert actor.optimizer.steps == 24


def test_the_schedule_goes_on_once_per_training_step() -> None:
    linear = optim(lr=0.01, lr_scheduler_type="linear", training_steps=4)
    actor = Actor(tiny_model(), config(optim=linear, ppo_epochs=3, mini_batch_rollouts=1), 0)
    rates = [actor.update(actor.plan(two_answers(), rollouts=2))["actor/lr"] for _ in range(3)]
    assert rates == pytest.approx([0.01, 0.0075, 0.005])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_waited_in_main_memory_trains_as_what_did_not(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")

    def trained(**changes: object) -> list[torch.Tensor]:
        model = tiny_model().to(device)
        actor = Actor(model, config(**changes), 0)
        for _ in range(3):
            actor.log_probs(two_answers())
            actor.update(actor.plan(two_answers(), rollouts=2))
            actor.offload()
            waits = bool(changes) or device == "cpu"
            assert next(model.parameters()).device.type == ("cpu" if waits else device)
        return [parameter.detach().cpu() for parameter in model.parameters()]

    straight, offloaded = trained(), trained(param_offload=True, optimizer_offload=True)
    assert all(torch.equal(one, other) for one, other in zip(straight, offloaded, strict=True))
