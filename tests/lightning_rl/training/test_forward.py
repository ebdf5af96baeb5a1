"""Packed or plain, narrow head or whole: the same numbers and the same gradient; and who cannot is not asked to."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lightning_rl.training import forward as forward_module
from lightning_rl.training import lora
from lightning_rl.training.batch import TrainingSequence
from lightning_rl.training.forward import Forward
from lightning_rl.training.layers import attention, flex, output_layer
from lightning_rl.training.layers.attention import TreeMask
from tests.lightning_rl.training.layers.blocks import by_blocks
from tests.random_examples import examples

VOCABULARY = 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
}  # fmt: skip


def made(kind: type[Any], config: type[Any], **changes: Any) -> Any:
    torch.manual_seed(0)
    return exact(kind(config(**SIZES | changes)).double())


def exact(model: nn.Module) -> nn.Module:
    """The model in float64 throughout: the norms of transformers compute in float32, whatever they are given."""
    for parent in list(model.modules()):
        for name, part in parent.named_children():
            if type(part).__name__ in {"LlamaRMSNorm", "Qwen3RMSNorm", "MistralRMSNorm"}:
                norm = nn.RMSNorm(part.weight.shape, part.variance_epsilon, dtype=part.weight.dtype)
                norm.weight = part.weight
                setattr(parent, name, norm)
    return model


def llama(kind: type[Any] = LlamaForCausalLM) -> Any:
    return made(kind, LlamaConfig)


def qwen3(**changes: Any) -> Any:
    return made(Qwen3ForCausalLM, Qwen3Config, tie_word_embeddings=True, **changes)


def sequence(token_ids: list[int], trained: list[int], temperature: float = 1.0) -> TrainingSequence:
    each = np.ones(len(trained), np.float32)
    at = np.asarray(trained, dtype=np.int64)
    return TrainingSequence(0, np.asarray(token_ids, dtype=np.int64), at, -each, each, each * temperature)


def group(of: int, *, prompt: int = 12, response: int = 4, rows: int = 5) -> list[TrainingSequence]:
    """Rows with one prompt."""
    ids = np.random.default_rng(of).integers(1, VOCABULARY, (rows, prompt + response))
    ids[:, :prompt] = ids[0, :prompt]
    return [sequence(row.tolist(), list(range(prompt, prompt + response))) for row in ids]


@st.composite
def forests_of_rows(draw: st.DrawFn) -> list[TrainingSequence]:
    """Groups that share a prompt, some rows forking off others, some equal, some prefixes of others."""
    tokens = st.integers(1, VOCABULARY - 1)
    rows: list[list[int]] = []
    for _ in range(draw(st.integers(1, 3))):
        prompt = draw(st.lists(tokens, min_size=1, max_size=16))
        members = [prompt]
        for _ in range(draw(st.integers(1, 6))):
            begin = draw(st.sampled_from(members))
            kept = begin[: draw(st.integers(min(len(prompt), len(begin)), len(begin)))]
            members.append([*kept, *draw(st.lists(tokens, min_size=0 if len(kept) > 1 else 1, max_size=5))])
        rows += members[1:]
    found = []
    for row in draw(st.permutations(rows)):
        trained = draw(st.sets(st.integers(1, len(row) - 1), min_size=1))
        found.append(sequence(row, sorted(trained), draw(st.sampled_from([0.7, 1.0, 1.5]))))
    return found


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    model.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def values(forward: Forward, rows: list[TrainingSequence]) -> tuple[Tensor, Tensor]:
    """Log probabilities, entropies and hidden states of all, and the gradient of a weighted sum of them."""
    log_probs, entropies = forward.log_probs(rows, with_entropy=True)
    states = forward.hidden(rows)
    found = torch.cat([log_probs, entropies, states.flatten()])
    weights = torch.linspace(-1, 1, len(found), dtype=found.dtype).sin()
    return found.detach(), gradient(forward.model, (weights * found).sum())


def by_hand(model: Any, rows: list[TrainingSequence]) -> Tensor:
    """Log probabilities from the model's own logits, row by row."""
    found = []
    for row in rows:
        logits = model(input_ids=torch.from_numpy(row.token_ids)[None]).logits[0]
        at = logits[row.trained - 1] / torch.from_numpy(row.temperature)[:, None]
        found.append(at.log_softmax(-1).gather(-1, torch.from_numpy(row.token_ids[row.trained])[:, None])[:, 0])
    return torch.cat(found)


def assert_close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@contextmanager
def attending(by_segments: bool) -> Iterator[None]:
    """Segments cost nothing extra, so that few tokens are enough to choose them; or so much that none are chosen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "PER_PLACE", 0)
        patch.setitem(attention.PER_CALL, "cpu", 0 if by_segments else 10**9)
        yield


def masks_given_to(model: nn.Module) -> list[Tensor | None]:
    """The masks of the calls to come."""
    masks: list[Tensor | None] = []
    model.register_forward_pre_hook(lambda _, __, given: masks.append(given.get("attention_mask")), with_kwargs=True)
    return masks


MODELS = {"llama": llama(), "qwen3": qwen3()}
MICRO = {packed: Forward(MODELS["llama"], 0, packed=packed) for packed in (True, False)}


@contextmanager
def on_a_gpu() -> Iterator[None]:
    """As where flex_attention computes, with blocks of four places."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "usable", lambda device, dtype: True)
        patch.setattr(flex, "attend", by_blocks)
        patch.setattr(flex, "BLOCK", 4)
        yield


@pytest.mark.parametrize("name", MODELS)
@given(rows=forests_of_rows())
@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_by_blocks_of_a_gpu_rows_have_the_numbers_and_the_gradient_of_rows_alone(
    name: str, rows: list[TrainingSequence]
) -> None:
    plain = values(Forward(MODELS[name], 0), rows)
    with on_a_gpu():
        packed = Forward(MODELS[name], 0, packed=True)
        assert packed.by_flex
        for found, expected in zip(values(packed, rows), plain, strict=True):
            assert_close(found, expected)


def test_on_a_gpu_packed_rows_are_never_behind_a_mask_of_numbers() -> None:
    model = llama()
    with on_a_gpu(), pytest.MonkeyPatch.context() as patch:
        forward = Forward(model, 0, packed=True)
        patch.setattr(forward_module, "additive_mask", None)
        masks = masks_given_to(model)
        for rows in (group(0), group(0, prompt=40, rows=2), group(0, prompt=30, response=40, rows=16)):
            forward.log_probs(rows)
    assert [mask.used for mask in masks if isinstance(mask, TreeMask)] == [2, 2, 2]


def test_where_flex_attention_does_not_work_attention_goes_by_segments(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> Tensor:
        raise RuntimeError("no Triton here")

    with on_a_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "attend", broken)
        forward = Forward(MODELS["llama"], 0, packed=True)
    assert (forward.packed, forward.by_flex, forward.by_segments) == (True, False, True)
    assert "attention goes by segments" in caplog.text


@pytest.mark.parametrize("by_segments", [True, False])
@pytest.mark.parametrize("name", MODELS)
@given(rows=forests_of_rows())
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_packed_rows_have_the_numbers_and_the_gradient_of_rows_alone(
    name: str, by_segments: bool, rows: list[TrainingSequence]
) -> None:
    packed, plain = Forward(MODELS[name], 0, packed=True), Forward(MODELS[name], 0)
    assert packed.packed
    assert packed.by_segments
    with attending(by_segments):
        for found, expected in zip(values(packed, rows), values(plain, rows), strict=True):
            assert_close(found, expected)
    assert_close(plain.log_probs(rows)[0], by_hand(MODELS[name], rows))


def test_a_prompt_that_rows_share_is_computed_once() -> None:
    rows = group(0)
    sizes = Forward(llama(), 0, packed=True).sizes(rows)
    assert (sizes.rows, sizes.distinct, sizes.computed) == (80, 32, 32)
    assert Forward(llama(), 0).sizes(rows) == (80, 80, 80)


def test_rows_that_share_nothing_go_the_plain_way() -> None:
    model = llama()
    forward = Forward(model, 0, packed=True)
    masks = masks_given_to(model)
    forward.log_probs([sequence([n + 1] * 9, [5]) for n in range(6)])
    forward.log_probs(group(0))
    assert [mask is None for mask in masks] == [True, False]


def test_a_line_that_is_not_worth_packing_is_cut_where_its_rows_are_too_many() -> None:
    barely = [sequence([1, 2] + [n] * 18, [19]) for n in (3, 4)]  # one line of 38 tokens, but 40 are faster
    parts = list(MICRO[True].micro_batches([*barely, *group(0)], rows=None, tokens=39))
    assert [MICRO[True].computed(part) for part in parts] == [20, 20, 32]


@given(rows=forests_of_rows(), most=st.integers(1, 6) | st.none(), tokens=st.integers(8, 120) | st.none())
@settings(max_examples=examples(150), deadline=None)
@pytest.mark.parametrize("packed", [True, False])
def test_micro_batches_hold_every_row_once_within_their_bounds(
    packed: bool, rows: list[TrainingSequence], most: int | None, tokens: int | None
) -> None:
    forward = MICRO[packed]
    parts = list(forward.micro_batches(rows, rows=most, tokens=tokens))
    assert sorted(id(row) for part in parts for row in part) == sorted(map(id, rows))
    for part in parts:
        assert most is None or len(part) <= most
        assert tokens is None or len(part) == 1 or forward.computed(part) <= tokens


def test_the_rows_of_a_group_stay_in_one_micro_batch() -> None:
    rows = [row for of in range(4) for row in group(of)]
    mixed = [rows[n] for n in np.random.default_rng(0).permutation(len(rows))]
    parts = list(MICRO[True].micro_batches(mixed, rows=None, tokens=70))
    assert [len(part) for part in parts] == [10, 10]
    assert sum(MICRO[True].computed(part) for part in parts) == 4 * 32


def test_the_head_computes_the_places_that_are_needed_alone() -> None:
    model, rows = llama(), group(0)
    shapes = []
    forward = Forward(model, 0)
    model.lm_head.register_forward_hook(lambda _, __, logits: shapes.append(logits.shape[:-1].numel()))
    forward.log_probs(rows)
    forward.hidden(rows)
    assert shapes == [20, 1]


def test_caps_and_scales_behind_the_head_are_the_models_own() -> None:
    model = made(Gemma2ForCausalLM, Gemma2Config, final_logit_softcapping=0.5, query_pre_attn_scalar=16)
    rows = group(0)
    for packed in (True, False):
        torch.testing.assert_close(
            Forward(model, 0, packed=packed).log_probs(rows)[0], by_hand(model, rows), rtol=0, atol=1e-6
        )


@contextmanager
def by_chunks(rows: int = 3) -> Iterator[None]:
    """Logits of so many places are there at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_layer, "ROWS_CHUNK", rows * VOCABULARY)
        yield


HEADS = {
    "a layer of its own": llama,
    "tied to the embedding": qwen3,
    "capped": lambda: made(Gemma2ForCausalLM, Gemma2Config, final_logit_softcapping=0.5, query_pre_attn_scalar=16),
    "divided": lambda: made(GraniteForCausalLM, GraniteConfig, logits_scaling=4.0),
    "multiplied": lambda: made(CohereForCausalLM, CohereConfig, logit_scale=0.25),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("packed", [True, False])
def test_logits_by_chunks_have_the_numbers_and_the_gradient_of_whole_ones(head: str, packed: bool) -> None:
    model: Any = HEADS[head]()
    forward, rows = Forward(model, 0, packed=packed), group(0)
    assert forward.whole_logits_because is None
    expected = values(forward, rows)
    tops = forward.top_log_probs(rows, 5, VOCABULARY - 2)
    seen: list[Any] = []
    hook = model.register_forward_hook(lambda _, __, out: seen.append(out.logits.shape))
    with by_chunks():
        for found, known in zip(values(forward, rows), expected, strict=True):
            assert_close(found, known)
        with torch.no_grad():
            for part, own in zip(forward.top_log_probs(rows, 5, VOCABULARY - 2), tops, strict=True):
                assert_close(part, own)
        candidates = tops[1]
        out = forward.outputs(rows, candidates=candidates, with_hidden=True)
        assert out.candidates is not None
        assert out.hidden is not None
        assert_close(out.candidates, tops[2])
        assert_close(out.hidden, forward.hidden(rows))
        found_gradient = gradient(model, (out.candidates.sin() * 0.1).sum() + out.hidden.sum())
    hook.remove()
    assert all(shape[-1] != VOCABULARY or shape[:-1].numel() == 1 for shape in seen)
    whole = forward.outputs(rows, candidates=candidates, with_hidden=True)
    assert whole.candidates is not None
    assert whole.hidden is not None
    assert_close(found_gradient, gradient(model, (whole.candidates.sin() * 0.1).sum() + whole.hidden.sum()))


def test_few_logits_are_computed_at_once() -> None:
    """So that nothing of small models is computed in another order."""
    model = llama()
    shapes: list[int] = []
    forward = Forward(model, 0)
    model.register_forward_hook(lambda _, __, out: shapes.append(out.logits.shape[-1]))
    forward.log_probs(group(0))
    assert shapes == [VOCABULARY]


def test_chunks_in_bfloat16_are_as_near_as_bfloat16_is() -> None:
    model = made(LlamaForCausalLM, LlamaConfig).float()
    forward, rows = Forward(model, 0, autocast=torch.bfloat16), group(0)
    assert forward.whole_logits_because is None
    expected = forward.log_probs(rows)[0]
    whole = gradient(model, expected.sum())
    with by_chunks():
        found = forward.log_probs(rows)[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        own = gradient(model, found.sum())
    assert torch.nn.functional.cosine_similarity(own, whole, dim=0) > 0.999


class Shifted(LlamaForCausalLM):
    """Does something with its logits that nobody knows of."""

    def forward(self, **inputs: Any) -> Any:
        outputs = super().forward(**inputs)
        outputs.logits = outputs.logits - outputs.logits.amax(-1, keepdim=True) / 2
        return outputs


def with_adapter_on_the_head() -> Any:
    return lora.adapted(llama(), rank=2, alpha=4, targets=["lm_head", "q_proj"])


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: llama(Shifted), "does something with its logits that is not known here"),
        (lambda: llama(LooksAround), "needs all places"),
        (with_adapter_on_the_head, "is a Linear of peft, and no nn.Linear alone"),
    ],
    ids=["unknown logits", "looks around", "adapter on the head"],
)
def test_logits_are_whole_where_chunks_would_not_be_right(model: Any, reason: str) -> None:
    forward, rows = Forward(model(), 0), group(0)
    assert reason in str(forward.whole_logits_because)
    expected = forward.log_probs(rows)[0]
    with by_chunks():
        assert torch.equal(forward.log_probs(rows)[0], expected)


def test_an_adapter_elsewhere_leaves_the_chunks_and_a_frozen_layer_without_gradient() -> None:
    model = lora.adapted(llama(), rank=2, alpha=4, targets="all-linear")
    forward, rows = Forward(model, 0), group(0)
    expected = gradient(model, forward.log_probs(rows)[0].sum())
    with by_chunks():
        assert_close(gradient(model, forward.log_probs(rows)[0].sum()), expected)
    assert model.get_output_embeddings().weight.grad is None


class LooksAround(LlamaForCausalLM):
    """Its logits depend on those before: a head on some places alone would give others."""

    def forward(self, **inputs: Any) -> Any:
        outputs = super().forward(**inputs)
        outputs.logits = outputs.logits + outputs.logits.cumsum(1)
        return outputs


def test_a_model_whose_head_needs_all_places_gets_them() -> None:
    model, rows = llama(LooksAround), group(0)
    forward = Forward(model, 0)
    assert_close(forward.log_probs(rows)[0], by_hand(model, rows))
    assert_close(forward.hidden(rows), Forward(llama(), 0).hidden(rows))


class CountsItself(LlamaForCausalLM):
    """Takes positions, and does not use them."""

    def forward(self, *, position_ids: Tensor | None = None, **inputs: Any) -> Any:
        return super().forward(**inputs)


class TakesNoMask(LlamaForCausalLM):
    def forward(self, *, input_ids: Tensor, use_cache: bool) -> Any:
        return super().forward(input_ids=input_ids, use_cache=use_cache)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (llama(CountsItself), "other hidden states"),
        (llama(TakesNoMask), "takes no mask and positions of ours: TypeError"),
        (MambaForCausalLM(MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1)), "no attention over tokens"),
        (made(MistralForCausalLM, MistralConfig, sliding_window=6), "reaches back 6 tokens"),
    ],
)
def test_a_model_that_cannot_pack_goes_the_plain_way(model: Any, reason: str) -> None:
    forward = Forward(model, 0, packed=True)
    assert not forward.packed
    assert reason in str(forward.unpacked_because)
    assert forward.sizes(group(0)) == (80, 80, 80)


def test_not_asked_for_is_a_reason_too() -> None:
    assert Forward(llama(), 0).unpacked_because == "it was not asked for"


def test_rows_beyond_a_sliding_window_go_the_plain_way() -> None:
    model = made(MistralForCausalLM, MistralConfig, sliding_window=16)
    packed, plain = Forward(model, 0, packed=True), Forward(model, 0)
    short, long = group(0), group(1, prompt=13)
    assert packed.computed(short) < plain.computed(short)
    assert packed.computed(long) == plain.computed(long)
    for rows in (short, long):
        assert_close(packed.log_probs(rows)[0], plain.log_probs(rows)[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_can_be_computed_again_instead_of_kept(reentrant: bool) -> None:
    rows = group(0)
    model = llama()
    expected = values(Forward(model, 0), rows)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    masks = masks_given_to(model)
    for packed, by_segments in [(True, True), (True, False), (False, False)]:
        forward = Forward(model, 0, packed=packed)
        masks.clear()
        with attending(by_segments):
            for found, known in zip(values(forward, rows), expected, strict=True):
                assert_close(found, known)
        assert [isinstance(mask, TreeMask) for mask in masks] == [by_segments] * 2
        if by_segments:
            assert [mask.used for mask in masks if isinstance(mask, TreeMask)] == [4, 4]  # two layers, each twice


def test_segments_are_chosen_where_they_cost_less_than_the_mask() -> None:
    model, rows = qwen3(), [row for of in range(4) for row in group(of, prompt=40, response=32, rows=8)]
    forward = Forward(model, 0, packed=True)
    masks = masks_given_to(model)
    forward.log_probs(rows)
    forward.log_probs(group(0))
    assert [isinstance(mask, TreeMask) for mask in masks] == [True, False]


def test_rows_that_a_mask_would_keep_apart_are_joined_by_segments() -> None:
    rows = group(0, prompt=30, response=40, rows=16)
    forward = Forward(llama(), 0, packed=True)
    assert forward.computed(rows) <= 30 + 16 * 40
    forward.by_segments = False
    assert forward.computed(rows) > 30 + 16 * 40


def test_attention_that_computes_its_own_scores_keeps_the_mask() -> None:
    model = qwen3(attn_implementation="eager")
    forward = Forward(model, 0, packed=True)
    assert forward.packed
    assert not forward.by_segments
    masks = masks_given_to(model)
    with attending(by_segments=True):
        forward.log_probs(group(0))
    assert [type(mask) for mask in masks] == [Tensor]


def test_a_model_set_to_another_attention_later_has_the_same_results() -> None:
    model, rows = llama(), group(0)
    packed, plain = Forward(model, 0, packed=True), Forward(model, 0)
    expected = values(plain, rows)
    model.set_attn_implementation("eager")
    with attending(by_segments=True):
        for found, known in zip(values(packed, rows), expected, strict=True):
            torch.testing.assert_close(found, known, rtol=0, atol=1e-5)  # eager computes its softmax in float32


def test_a_bare_trunk_gives_hidden_states() -> None:
    model, rows = qwen3(), group(0)
    expected = model(input_ids=torch.from_numpy(np.stack([row.token_ids for row in rows])), output_hidden_states=True)
    states = expected.hidden_states[-1][:, 11:15].flatten(0, 1)
    for packed in (True, False):
        assert_close(Forward(model.model, 0, packed=packed).hidden(rows), states)
        assert_close(Forward(model, 0, packed=packed).hidden(rows), states)


def test_an_adapter_is_part_of_the_model() -> None:
    peft = pytest.importorskip("peft")
    rows = group(0)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(llama(), config).double()
    packed, plain = Forward(model, 0, packed=True), Forward(model, 0)
    assert packed.packed
    for found, known in zip(values(packed, rows), values(plain, rows), strict=True):
        assert_close(found, known)
    assert_close(plain.log_probs(rows)[0], by_hand(model, rows))


def test_trying_leaves_the_models_modes_and_the_random_numbers_as_they_were() -> None:
    model = llama().train()
    model.model.layers[0].eval()
    state = torch.get_rng_state()
    Forward(model, 0, packed=True)
    assert model.training
    assert not model.model.layers[0].training
    assert model.model.layers[1].mlp.training
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_both_kinds_of_attention_and_mixed_precision(attention: str) -> None:
    model = qwen3(attn_implementation=attention).float()
    rows: list[TrainingSequence] = group(0)
    exact = Forward(model, 0).log_probs(rows)[0]
    packed = Forward(model, 0, packed=True, autocast=torch.bfloat16)
    assert packed.packed
    with attending(by_segments=True):
        torch.testing.assert_close(packed.log_probs(rows)[0], exact, rtol=0, atol=0.05)


def test_a_token_that_is_trained_in_several_rows_is_trained_in_each() -> None:
    rows = [sequence([1, 2, 3], [1, 2]), sequence([1, 2, 3], [2]), sequence([1, 2, 3, 4], [1, 3])] * 3
    weights: NDArray[np.float64] = np.arange(15) + 1.0
    found = []
    for packed in (True, False):
        log_probs, _ = Forward(MODELS["llama"], 0, packed=packed).log_probs(rows)
        found.append(gradient(MODELS["llama"], (torch.from_numpy(weights) * log_probs).sum()))
    assert_close(*found)
