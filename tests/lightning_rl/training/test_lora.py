"""An adapter changes nothing at first, is alone trained, and leaves as weights that compute what it computes."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig

from lightning_rl import tutorial
from lightning_rl.inference.adapters import B
from lightning_rl.inference.engine import EmbeddedEngine
from lightning_rl.inference.load import load_model
from lightning_rl.inference.sequence import GenerationRequest, GenerationSampling
from lightning_rl.inference.weights.stream import as_saved, export_model
from lightning_rl.training import lora
from lightning_rl.training.actor import Actor
from lightning_rl.training.batch import TrainingSequence
from tests.lightning_rl.inference.models import make, true_logprobs

from .test_actor import config, optim

TOKENS = torch.arange(1, 31).reshape(2, 15)
EVERYTHING = "all-linear"


def adapted(model: nn.Module, targets: Any = EVERYTHING, **changes: Any) -> nn.Module:
    return lora.adapted(model, **({"rank": 4, "alpha": 8, "targets": targets, "seed": 3} | changes))


def stirred(model: nn.Module, size: float = 0.1) -> nn.Module:
    """The same with an adapter that does something."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn_like(parameter))
    return model


@torch.no_grad()
def log_probs(model: nn.Module) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=TOKENS).logits.log_softmax(-1)
    return found


@pytest.mark.parametrize(
    ("targets", "ends"),
    [(EVERYTHING, False), (["q_proj"], False), (["q_proj", "embed_tokens"], True), (r".*(o_proj|lm_head)", True)],
)
def test_whether_embedding_or_output_layer_are_adapted_is_known(targets: Any, ends: bool) -> None:
    assert lora.adapts_ends(adapted(make("llama-biased"), targets)) == ends


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama-biased", "phi"])
def test_a_fresh_adapter_changes_nothing_and_is_alone_trained(architecture: str) -> None:
    model = adapted(make(architecture))
    assert torch.equal(log_probs(model), log_probs(make(architecture)))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    assert not model.training


def test_the_seed_decides_a_fresh_adapter_and_the_common_generator_stays() -> None:
    def first_a(seed: int) -> torch.Tensor:
        model = adapted(make("qwen2"), seed=seed)
        return next(p for name, p in model.named_parameters() if "lora_A" in name)

    assert torch.equal(first_a(3), first_a(3))
    assert not torch.equal(first_a(3), first_a(4))
    model = make("qwen2")
    before = torch.get_rng_state()
    adapted(model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama-biased", "phi"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_merged_weights_compute_what_the_adapter_does(architecture: str, dtype: torch.dtype, tolerance: float) -> None:
    plain = make(architecture).to(dtype)
    model = stirred(adapted(copy.deepcopy(plain)))
    whole = copy.deepcopy(plain)
    before = log_probs(model)
    assert whole.load_state_dict(dict(lora.merged(model)), strict=False).missing_keys == tied(whole)
    torch.testing.assert_close(log_probs(whole), before, atol=tolerance, rtol=0)
    assert (before - log_probs(plain)).abs().max() > 0.1
    assert torch.equal(log_probs(model), before)  # merging changed nothing
    old = plain.state_dict()
    moved = {name for name, tensor in lora.merged(model) if not torch.equal(tensor, old[name])}
    assert moved == lora.changed(model).described.keys()


def tied(model: torch.nn.Module) -> list[str]:
    """Names under which a weight is there a second time, which no stream has."""
    return ["lm_head.weight"] if model.config.tie_word_embeddings else []


def test_transposed_weights_and_embeddings_are_merged_too() -> None:
    torch.manual_seed(0)
    gpt = GPT2LMHeadModel(
        GPT2Config(vocab_size=48, n_embd=16, n_layer=1, n_head=2, n_positions=32, tie_word_embeddings=False)
    ).eval()
    model = stirred(adapted(copy.deepcopy(gpt), ["c_attn", "c_fc", "wte", "lm_head"]))
    before = log_probs(model)
    gpt.load_state_dict(dict(lora.merged(model)))
    torch.testing.assert_close(log_probs(gpt), before, atol=1e-5, rtol=0)


def test_adapters_of_bf16_weights_are_float32_and_leave_with_all_their_digits() -> None:
    model = stirred(adapted(make("qwen2").bfloat16()), 1e-3)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {tensor.dtype for _, tensor in lora.changed(model)} == {torch.float32}
    assert {tensor.dtype for _, tensor in lora.merged(model)} == {torch.bfloat16}


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens", "q_proj"]])
def test_one_of_two_tied_modules_cannot_have_an_adapter(targets: list[str]) -> None:
    with (
        pytest.raises(ValueError, match=r"embed_tokens\.weight and lm_head\.weight are one weight: leave .* out"),
        pytest.warns(UserWarning, match="tied"),
    ):
        adapted(make("qwen2"), targets)


def test_experts_get_no_adapter_and_the_other_modules_are_named() -> None:
    experts = Qwen3MoeConfig(
        hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, vocab_size=48, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"takes in experts or routers.*\[k_proj, o_proj, q_proj, v_proj\]"):
        adapted(AutoModelForCausalLM.from_config(experts))
    model = stirred(adapted(AutoModelForCausalLM.from_config(experts).eval(), ["q_proj", "v_proj"]))
    assert [name.rpartition(".q_proj")[2] for name in lora.changed(model).described if "q_proj" in name] == [".weight"]


def test_targets_are_names_or_a_regex_and_an_unknown_one_is_named() -> None:
    assert len(dict(lora.changed(adapted(make("qwen2"), ["q_proj", "v_proj"])))) == 4
    assert list(lora.changed(adapted(make("qwen2"), r".*\.0\..*q_proj")).described) == [
        "model.layers.0.self_attn.q_proj.weight"
    ]
    with pytest.raises(ValueError, match=r"no adapter for target_modules=.*qq_proj"):
        adapted(make("qwen2"), ["qq_proj"])
    whole = "model.layers.0.self_attn.q_proj"
    assert list(lora.changed(adapted(make("qwen2"), whole)).described) == [f"{whole}.weight"]
    with pytest.raises(ValueError, match=r"exclude_modules='self_atn' leaves nothing out: .*down_proj"):
        adapted(make("qwen2"), exclude="self_atn")


@pytest.mark.parametrize(
    ("excluded", "part"),
    [(["down_proj"], "down_proj"), (r".*down_proj", "down_proj"), ("down_proj", "down_proj"), ("self_attn", "attn")],
)
def test_what_is_excluded_gets_no_adapter(excluded: Any, part: str) -> None:
    all_of_them, others = (
        lora.changed(adapted(make("qwen2"), exclude=out)).described.keys() for out in (None, excluded)
    )
    assert others == {name for name in all_of_them if part not in name} != all_of_them


def test_an_alpha_that_is_no_whole_number_counts_with_its_fraction() -> None:
    fraction, whole = (
        dict(lora.low_rank(stirred(adapted(make("qwen2"), ["q_proj"], alpha=alpha)))) for alpha in (1.5, 1)
    )
    for name, matrix in whole.items():
        torch.testing.assert_close(fraction[name], 1.5 * matrix if name.endswith(B) else matrix)


def test_a_saved_adapter_on_the_embedding_holds_no_weight_of_the_model(tmp_path: Path) -> None:
    lora.save(adapted(make("llama-biased"), ["q_proj", "embed_tokens"]), tmp_path)
    assert all("lora_" in name for name in load_file(tmp_path / "adapter_model.safetensors"))


def test_a_saved_adapter_goes_on_where_it_was(tmp_path: Path) -> None:
    model = stirred(adapted(make("qwen2")))
    lora.save(model, tmp_path)
    again = adapted(make("qwen2"), adapter_path=tmp_path)
    assert torch.equal(log_probs(again), log_probs(model))
    assert [n for n, p in again.named_parameters() if p.requires_grad] == [
        n for n, p in model.named_parameters() if p.requires_grad
    ]
    theirs = PeftModel.from_pretrained(make("qwen2"), str(tmp_path))  # type: ignore[arg-type]
    assert torch.equal(log_probs(theirs), log_probs(model))


def test_another_tools_adapter_is_gone_on_with_without_its_dropout(tmp_path: Path) -> None:
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], lora_dropout=0.5, init_lora_weights=False)
    theirs = get_peft_model(make("qwen2"), settings)  # type: ignore[arg-type]
    theirs.save_pretrained(str(tmp_path))
    model = adapted(make("qwen2"), adapter_path=tmp_path)
    assert torch.equal(log_probs(model.train()), log_probs(theirs.eval()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 2}, "has rank 2 and alpha 8, but lora_rank is 4 and lora_alpha 8: set them to the adapter's"),
        ({"lora_alpha": 16}, "has rank 4 and alpha 16, but lora_rank is 4 and lora_alpha 8: set them to the adapter's"),
        ({"rank_pattern": {"q_proj": 2}}, r"is not of this model: 4 of its tensors are missing, unknown or of another"),
        ({"use_dora": True}, "not plain LoRA, the only kind that is trained: use_dora"),
        ({"bias": "all"}, "not plain LoRA.*: bias"),
        ({"modules_to_save": ["norm"]}, "not plain LoRA.*: modules_to_save"),
        ({"init_lora_weights": "pissa"}, "not plain LoRA.*: init_lora_weights"),
        ({"target_modules": ["k_proj"]}, r"is not of this model: 8 of its tensors are missing, unknown or of another"),
        ({"peft_type": "IA3"}, "holds a .*IA3 adapter, not LoRA"),
    ],
)
def test_an_adapter_that_cannot_go_on_says_why(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    lora.save(adapted(make("qwen2"), ["q_proj"]), tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        adapted(make("qwen2"), adapter_path=tmp_path)
    with pytest.raises(ValueError, match=r"is no peft folder: it has no adapter_config\.json"):
        adapted(make("qwen2"), adapter_path=tmp_path / "nowhere")


def test_the_final_model_is_whole_or_the_adapter_alone(tmp_path: Path) -> None:
    model = stirred(adapted(make("qwen2")))
    base: Any = model.get_base_model()
    export_model(base, as_saved(base, lora.merged(model)), tmp_path / "whole")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    torch.testing.assert_close(log_probs(whole), log_probs(model), atol=1e-5, rtol=0)
    assert whole.config.tie_word_embeddings
    lora.save(model, tmp_path / "small")
    assert (tmp_path / "small" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "small" / "model.safetensors").exists()


def batch() -> list[TrainingSequence]:
    return [sequence(rollout, advantage) for rollout, advantage in enumerate([1.0, -1.0])]


def sequence(rollout: int, advantage: float) -> TrainingSequence:
    tokens = TOKENS[rollout].numpy()
    trained = np.arange(5, len(tokens))
    ones = np.ones(len(trained), np.float32)
    return TrainingSequence(
        rollout=rollout, token_ids=tokens, trained=trained, rollout_log_probs=-ones, advantages=advantage * ones,
        temperature=ones,
    )  # fmt: skip


def updated(model: nn.Module, **changes: Any) -> Actor:
    actor = Actor(model, config(entropy_coeff=0.0, optim=optim(grad_clip=1.0), **changes), pad_id=0)
    sequences = batch()
    for one, old in zip(sequences, actor.log_probs(sequences), strict=True):
        one.old_log_probs = old
    actor.update(actor.plan(sequences, rollouts=2))
    return actor


def test_an_update_trains_the_adapter_alone_and_the_rewarded_answer_gets_likelier() -> None:
    model = adapted(make("qwen2"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    earlier = Actor(model, config(), pad_id=0).log_probs(batch())
    later = updated(model, ppo_epochs=3).log_probs(batch())
    assert later[0].sum() > earlier[0].sum()
    assert later[1].sum() < earlier[1].sum()
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if ".lora_" in name}


@pytest.mark.parametrize("first", ["checkpointing", "adapter"])
def test_gradients_are_the_same_with_gradient_checkpointing(first: str) -> None:
    def gradient(checkpointing: bool) -> torch.Tensor:
        model: Any = make("qwen2").double()
        if checkpointing and first == "checkpointing":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model = stirred(adapted(model))
        if checkpointing and first == "adapter":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        actor = Actor(model.train(), config(), pad_id=0)
        sequences = batch()
        for one in sequences:
            one.old_log_probs = one.rollout_log_probs
        actor.accumulate(actor.plan(sequences, rollouts=2)[0])
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])

    torch.testing.assert_close(gradient(True), gradient(False), atol=1e-12, rtol=1e-12)


@pytest.mark.long
def test_the_engine_samples_what_the_adapter_says_after_an_update_of_the_changed_weights() -> None:
    model: Any = load_model(tutorial.checkpoint())
    prompt = list(range(20, 60))

    def answer(engine: EmbeddedEngine) -> tuple[list[int], list[float]]:
        request = GenerationRequest(
            request_id="r", token_ids=prompt, sampling=GenerationSampling(max_tokens=20, ignore_eos=True, seed=1)
        )
        output = engine.submit(request).result(60)
        return list(output.token_ids), list(output.logprobs)

    with EmbeddedEngine(copy.deepcopy(model), max_num_seqs=4) as engine:
        _, at_first = answer(engine)  # and its prompt is kept
        model = stirred(adapted(model), 0.02)
        engine.update_weights(lora.changed(model), 1, partial=True)
        tokens, found = answer(engine)
    assert found == pytest.approx(true_logprobs(model, prompt, tokens), abs=1e-4)
    assert max(abs(a - b) for a, b in zip(found, at_first, strict=True)) > 0.1


def test_adapters_over_one_base_hold_its_weights_once() -> None:
    first, second = stirred(adapted(make("qwen2"))), stirred(adapted(make("qwen2"), rank=2), size=0.2)
    before = log_probs(second)
    lora.share_base(second, first)
    assert torch.equal(log_probs(second), before)
    where = {parameter.data_ptr() for parameter in first.parameters()}
    shared = {name: parameter.data_ptr() in where for name, parameter in second.named_parameters()}
    assert {".lora_" in name for name, same in shared.items() if not same} == {True}
    assert {".lora_" in name for name, same in shared.items() if same} == {False}


def test_a_base_of_other_weights_is_not_shared() -> None:
    other = make("qwen2")
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    changed = adapted(other)
    before = log_probs(changed)
    lora.share_base(changed, adapted(make("qwen2")))
    assert torch.equal(log_probs(changed), before)


def test_a_base_whose_weights_are_elsewhere_is_left_alone() -> None:
    with torch.device("meta"):
        hollow = make("qwen2")
    lora.share_base(adapted(hollow), adapted(make("qwen2")))
    assert next(hollow.parameters()).is_meta
