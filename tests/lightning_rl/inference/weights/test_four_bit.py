"""Weights in 4 bits: what is computed with is what leaves, and the rest of the model stays as it is."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rl import tutorial
from lightning_rl.inference.load import load_model
from lightning_rl.inference.weights import four_bit
from lightning_rl.training import lora


@pytest.fixture(autouse=True)
def _bitsandbytes() -> None:
    pytest.importorskip("bitsandbytes")


TOKENS = torch.arange(1, 31).reshape(2, 15)


def in_4_bits(dtype: torch.dtype = torch.float32) -> Any:
    return load_model(tutorial.checkpoint(), dtype, load_in_4bit=True)


@torch.no_grad()
def log_probs(model: nn.Module) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=TOKENS).logits.float().log_softmax(-1)
    return found


def stirred(model: nn.Module) -> nn.Module:
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def test_linear_layers_but_the_output_are_held_in_4_bits_and_a_few_more() -> None:
    plain, held = load_model(tutorial.checkpoint()), in_4_bits()
    quantized = four_bit.quantized_layers(held)
    linear = {name for name, module in plain.named_modules() if isinstance(module, nn.Linear)}
    assert quantized.keys() == linear - {"lm_head"}
    numbers = sum(plain.get_submodule(name).weight.numel() for name in quantized)  # type: ignore[operator, union-attr]
    took = sum(
        each.numel() * each.element_size()
        for name in quantized
        for key, each in held.state_dict().items()
        if key.startswith(f"{name}.weight") and "quant_map" not in key and "quant_state" not in key
    )
    assert 4.0 <= took * 8 / numbers < 4.2
    assert four_bit.count(held) == sum(each.numel() for each in plain.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_weights_compute_what_those_in_4_bits_do(dtype: torch.dtype) -> None:
    held = in_4_bits(dtype)
    whole = four_bit.plain_copy(held)
    assert not four_bit.quantized_layers(whole)
    assert {each.dtype for each in whole.parameters()} == {dtype}
    torch.testing.assert_close(log_probs(whole), log_probs(held), atol=1e-4 if dtype == torch.float32 else 0.1, rtol=0)
    apart = (log_probs(held) - log_probs(load_model(tutorial.checkpoint(), dtype))).abs().max()
    assert apart > 0.05  # it is no copy of the original


def test_without_the_library_its_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(four_bit.NoBitsAndBytes, match=r"pip install 'lightning-rl\[bitsandbytes\]'"):
        in_4_bits()


def test_gradients_of_an_adapter_are_those_over_the_whole_weights_also_after_scoring() -> None:
    held = in_4_bits()
    found = []
    for model in (held, four_bit.plain_copy(held)):
        adapted = stirred(lora.adapted(model, rank=4, alpha=8, targets="all-linear", seed=3))
        log_probs(adapted)  # a pass without gradients before: nothing of the weights may change in it
        adapted(input_ids=TOKENS).logits.log_softmax(-1)[..., 7].sum().backward()
        found.append({name: each.grad for name, each in adapted.named_parameters() if each.requires_grad})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        assert gradient is not None
        torch.testing.assert_close(gradient, found[1][name], atol=1e-3, rtol=1e-3)


def test_what_leaves_with_an_adapter_is_whole_and_computes_the_same(tmp_path: Path) -> None:
    held = in_4_bits()
    whole = four_bit.plain_copy(held)
    adapted = stirred(lora.adapted(held, rank=4, alpha=8, targets=["q_proj", "down_proj"], seed=3))
    told = log_probs(adapted)
    for stream in (lora.merged(adapted), lora.changed(adapted)):
        taken: Any = copy.deepcopy(whole)
        tensors = dict(stream)
        assert {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()} == {
            name: (each.dtype, each.shape) for name, each in stream.described.items()
        }
        assert not taken.load_state_dict(tensors, strict=False).unexpected_keys
        torch.testing.assert_close(log_probs(taken), told, atol=1e-4, rtol=0)
    adapted.get_base_model().save_pretrained(tmp_path, state_dict={})  # type: ignore[operator]
    assert "quantization" not in (tmp_path / "config.json").read_text()
