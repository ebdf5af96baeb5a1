"""Law 7: loss and gradient depend on rollouts alone, not on rows, their order, or micro-batches. In float64."""

import random
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from lightning_rl.rl.aggregation import MODES
from lightning_rl.training import checkpoint
from lightning_rl.training.actor import Actor, ActorConfig
from lightning_rl.training.batch import TrainingSequence, collate, micro_batches, sequence_of
from lightning_rl_adapters import forest, rows
from lightning_rl_adapters.call import Call, VersionRange
from lightning_rl_adapters.rows import Row
from lightning_rl_adapters.triplet import prompt_ids

VOCABULARY = 32


def tiny_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).double().eval()


def config(**changes: object) -> ActorConfig:
    values: dict[str, object] = {
        "mini_batch_rollouts": 100, "micro_batch_rows": None, "micro_batch_tokens": None, "ppo_epochs": 1,
        "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0, "loss_agg_mode": "token-mean",
        "loss_scale_factor": 8.0, "entropy_coeff": 0.01, "grad_clip": 1e9, "lr": 1e-2, "lr_warmup_steps": 0,
        "lr_scheduler_type": "constant", "min_lr_ratio": 0.0, "training_steps": 10,
        "betas": (0.9, 0.95), "weight_decay": 0.0,
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


def loss_and_gradient(sequences: list[TrainingSequence], **changes: object) -> tuple[float, torch.Tensor]:
    actor = Actor(tiny_model(), config(**changes), pad_id=0)
    [mini] = actor.plan(sequences, rollouts=1)
    loss = actor.accumulate(mini)["actor/pg_loss"]
    return loss, torch.cat([p.grad.flatten() for p in actor.model.parameters() if p.grad is not None])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(forests_of_rollouts(), st.sampled_from(MODES), st.randoms(), st.integers(1, 3), st.integers(6, 40))
def test_rows_order_and_micro_batches_change_nothing(
    rollouts: list[forest.Forest], mode: str, order: random.Random, micro_rows: int, micro_tokens: int
) -> None:
    loss, gradient = loss_and_gradient(merged(rollouts), loss_agg_mode=mode)
    shuffled = merged(rollouts)
    order.shuffle(shuffled)
    for sequences, changes in (
        (per_call(rollouts), {}),
        (shuffled, {}),
        (merged(rollouts), {"micro_batch_rows": micro_rows}),
        (merged(rollouts), {"micro_batch_tokens": micro_tokens}),
    ):
        other_loss, other_gradient = loss_and_gradient(sequences, loss_agg_mode=mode, **changes)
        assert other_loss == pytest.approx(loss, abs=1e-5)
        torch.testing.assert_close(other_gradient, gradient, atol=1e-5, rtol=1e-5)


@settings(max_examples=25, deadline=None)
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
        padded = collate(micro, 0, torch.device("cpu")).token_ids
        assert padded.numel() <= max_tokens


def test_a_checkpoint_is_a_hugging_face_folder(tmp_path: Path) -> None:
    model = tiny_model()
    folder = checkpoint.save(model, tmp_path, tmp_path / "step-1", {})
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    inputs = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(loaded(inputs).logits, model(inputs).logits)
    checkpoint.save(model, tmp_path, folder, {})  # over an older one
    assert not list(tmp_path.glob("*.partial"))


def test_the_learning_rate_warms_up_and_falls() -> None:
    from lightning_rl.training.actor import lr_factor

    cosine = config(lr_warmup_steps=4, lr_scheduler_type="cosine", min_lr_ratio=0.1, training_steps=24)
    assert [lr_factor(step, cosine) for step in (0, 3, 4, 14, 24, 99)] == pytest.approx([0.2, 0.8, 1, 0.55, 0.1, 0.1])
    with pytest.raises(ValueError, match="'linear' is unknown"):
        lr_factor(5, config(lr_scheduler_type="linear"))
