"""One engine, several adapters over its model: whoever asks gets what the model with that adapter alone would give."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_rl.inference.adapters import Adapters, linear_names, shareable
from lightning_rl.inference.embedded import EmbeddedPolicy
from lightning_rl.inference.engine import EmbeddedEngine
from lightning_rl.inference.load import ModelSource
from lightning_rl.inference.sequence import GenerationRequest, GenerationSampling
from lightning_rl.training import lora
from tests.random_examples import examples

from .models import CONFIGS, VOCAB, make, true_logprobs
from .test_engine import TIMEOUT, hold_after

RANKS = {1: 3, 2: 5}


def adapted(architecture: str, adapter: int, seed: int = 0, targets: Any = "all-linear") -> nn.Module:
    """The model with an adapter whose matrices are all random."""
    model = lora.adapted(make(architecture), rank=RANKS[adapter], alpha=7, targets=targets, seed=adapter)
    torch.manual_seed(10 * adapter + seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    return model


def with_adapters(
    architecture: str, models: dict[int, nn.Module], dtype: torch.dtype = torch.float32, **options: Any
) -> EmbeddedEngine:
    engine = EmbeddedEngine(make(architecture).to(dtype), **options)
    for adapter, model in models.items():
        assert engine.add_adapter() == adapter
        engine.update_adapter(adapter, lora.low_rank(model), version=adapter)
    return engine


def ask(
    engine: EmbeddedEngine, prompt: list[int], name: str, adapter: int, on_token: Any = None, **sampling: Any
) -> Any:
    asked = GenerationRequest(
        request_id=name, token_ids=prompt, sampling=GenerationSampling(**sampling), adapter=adapter
    )
    return engine.submit(asked, on_token)


jobs = st.lists(
    st.tuples(
        st.lists(st.integers(0, 3), min_size=1, max_size=40),  # few words: many prompts begin alike
        st.integers(1, 20),
        st.sampled_from([0, 1, 2]),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama-biased", "mistral"])  # the last by hooks
def test_in_bfloat16_logprobs_are_those_of_the_adapters_model_to_its_rounding(architecture: str) -> None:
    models = {1: adapted(architecture, 1), 2: adapted(architecture, 2)}
    with with_adapters(architecture, models, torch.bfloat16) as engine:
        outputs = {adapter: ask(engine, [1, 2, 3], f"{adapter}", adapter, max_tokens=30) for adapter in (0, 1, 2)}
        for adapter, model in {0: make(architecture), **models}.items():
            output = outputs[adapter].result(TIMEOUT)
            off = np.abs(np.subtract(output.logprobs, true_logprobs(model, [1, 2, 3], output.token_ids)))
            assert off.mean() < 0.05
            assert off.max() < 0.5


@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_logprob_is_that_of_the_model_with_its_adapter_alone(architecture: str) -> None:
    models = {0: make(architecture), 1: adapted(architecture, 1), 2: adapted(architecture, 2)}
    with with_adapters(architecture, {1: models[1], 2: models[2]}, max_num_seqs=4) as engine:

        @settings(max_examples=examples(12), deadline=None)
        @given(jobs)
        def mixed(jobs: Any) -> None:
            futures = [
                ask(engine, prompt, f"{i}", adapter, max_tokens=most, seed=i)
                for i, (prompt, most, adapter) in enumerate(jobs)
            ]
            for future, (prompt, _, adapter) in zip(futures, jobs, strict=True):
                output = future.result(TIMEOUT)
                expected = true_logprobs(models[adapter], prompt, output.token_ids)
                assert output.logprobs == pytest.approx(expected, abs=2e-5)
                assert [span.version for span in output.versions] == [adapter]

        mixed()


@pytest.mark.parametrize("architecture", ["qwen3", "mistral"])
def test_an_adapter_of_the_embedding_and_of_the_output_layer(architecture: str) -> None:
    model = adapted(architecture, 1, targets=["embed_tokens", "lm_head", "v_proj", "down_proj"])
    with with_adapters(architecture, {1: model}) as engine:
        prompt = [1, 2, 3, 4, 5]
        for future in [ask(engine, prompt, f"{i}", 1, max_tokens=20, seed=i) for i in range(3)]:
            output = future.result(TIMEOUT)
            assert output.logprobs == pytest.approx(true_logprobs(model, prompt, output.token_ids), abs=2e-5)


@pytest.mark.parametrize("architecture", ["qwen2", "mistral"])
def test_an_update_of_one_adapter_leaves_answers_of_the_others_as_they_are(architecture: str) -> None:
    """Both have read the same prompt before, which only the one may not read from the cache again."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    old, other, new = adapted(architecture, 1), adapted(architecture, 2), adapted(architecture, 1, seed=1)
    with with_adapters(architecture, {1: old, 2: other}) as engine:
        on_token, reached, go, _ = hold_after(engine, 10)
        one = ask(engine, prompt, "one", 1, max_tokens=30, seed=1)
        two = ask(engine, prompt, "two", 2, on_token, max_tokens=30, seed=2)
        assert reached.wait(TIMEOUT)
        update = threading.Thread(target=lambda: engine.update_adapter(1, lora.low_rank(new), version=5))
        update.start()
        while not engine._threads.orders:  # it is asked for between two steps
            pass
        go.set()
        update.join()
        [first, last] = one.result(TIMEOUT).versions
        assert (first.version, last.version) == (1, 5)
        assert [(span.version, span.start, span.end) for span in two.result(TIMEOUT).versions] == [(2, 0, 30)]
        again = [ask(engine, prompt, f"again-{adapter}", adapter, max_tokens=20) for adapter in (1, 2)]
        for output, model in (
            (two.result(TIMEOUT), other),
            *zip([each.result(TIMEOUT) for each in again], (new, other), strict=True),
        ):
            assert output.logprobs == pytest.approx(true_logprobs(model, prompt, output.token_ids), abs=2e-5)


def test_while_one_adapter_is_paused_the_others_answer() -> None:
    models = {1: adapted("qwen2", 1), 2: adapted("qwen2", 2)}
    prompts = {1: [1, 2, 3], 2: [4, 5, 6, 7]}
    with with_adapters("qwen2", models) as engine:
        on_token, reached, go, seen = hold_after(engine, 5)
        frozen = ask(engine, prompts[1], "frozen", 1, on_token, max_tokens=40, seed=3)
        assert reached.wait(TIMEOUT)
        pause = threading.Thread(target=engine.pause, args=("keep", 1))
        pause.start()
        while not engine._threads.orders:
            pass
        go.set()
        pause.join()
        assert (engine.paused(1), engine.paused(2), engine.paused()) == (True, False, False)
        held = ask(engine, prompts[1], "held", 1, max_tokens=5)
        for i in range(3):
            output = ask(engine, prompts[2], f"goes-{i}", 2, max_tokens=30).result(TIMEOUT)
            assert output.logprobs == pytest.approx(true_logprobs(models[2], prompts[2], output.token_ids), abs=2e-5)
        assert not frozen.done()
        assert not held.done()
        assert len(seen) == 5
        engine.pause("wait", 2)  # nothing of it runs
        assert engine.paused(2)
        engine.resume(1)
        output = frozen.result(TIMEOUT)
        assert len(output.token_ids) == 40
        assert output.logprobs == pytest.approx(true_logprobs(models[1], prompts[1], output.token_ids), abs=2e-5)
        assert len(held.result(TIMEOUT).token_ids) == 5
        waits = ask(engine, prompts[2], "waits", 2, max_tokens=5)
        engine.pause("abort", 2)
        assert waits.result(TIMEOUT).finish_reason == "abort"


def test_what_is_no_adapter_of_the_model_is_refused_and_changes_nothing() -> None:
    model = adapted("qwen2", 1)
    given_ = dict(lora.low_rank(model))
    first, second = list(given_)[:2]  # the two matrices of one module
    with with_adapters("qwen2", {1: model}) as engine:
        for wrong in (
            {name: tensor for name, tensor in given_.items() if name != first},
            {name: tensor for name, tensor in given_.items() if name != second},
            given_ | {first: given_[first][:, 1:]},
            {f"other.{name}": tensor for name, tensor in given_.items()},
        ):
            with pytest.raises(ValueError, match="no module of the engine's model, or of other sizes"):
                engine.update_adapter(1, wrong, version=9)
        assert engine.version(1) == 1
        output = ask(engine, [1, 2, 3], "r", 1, max_tokens=10).result(TIMEOUT)
        assert output.logprobs == pytest.approx(true_logprobs(model, [1, 2, 3], output.token_ids), abs=2e-5)
        with pytest.raises(ValueError, match="there is no adapter 2"):
            ask(engine, [1], "s", 2)


def test_policies_over_the_same_weights_have_one_engine_and_addresses_of_their_own() -> None:
    first = EmbeddedPolicy(ModelSource(device="cpu"), trained=True, threads=1, beside=[])
    second = EmbeddedPolicy(ModelSource(device="cpu"), trained=True, threads=1, beside=[first])
    alone = EmbeddedPolicy(ModelSource(device="cpu"), trained=True, threads=1)
    assert second.engine is first.engine
    assert (first.adapter, second.adapter, alone.adapter) == (1, 2, 0)
    try:
        first.start()
        second.start()
        assert first.url != second.url
        second.update_weights({}, 4)
        assert [each.registrations()[0]["policy_version"] for each in (first, second)] == [0, 4]
    finally:
        first.close()
        second.close()
        alone.close()


def test_experts_of_their_own_are_not_given_every_token() -> None:
    model = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(VOCAB, VOCAB)])})
    assert not shareable(model)
    assert shareable(nn.ModuleDict({"layer": nn.Linear(VOCAB, VOCAB)}))


@pytest.mark.parametrize("architecture", ["qwen2", "llama-biased", "phi"])
def test_the_linear_layers_are_those_that_peft_adapts(architecture: str) -> None:
    model: Any = adapted(architecture, 1)
    names = {name.removesuffix(".lora_A.weight") for name, _ in lora.low_rank(model) if ".lora_A." in name}
    assert {name.rpartition(".")[2] for name in names} == set(linear_names(make(architecture)))


def test_a_module_whose_matrix_is_turned_round_has_its_adapter_too() -> None:
    """GPT-2's; of three rows with two columns each the last has no adapter."""
    model = nn.ModuleDict({"layer": Conv1D(5, 3)})
    adapters = Adapters(model)
    a, b = torch.randn(2, 3), torch.randn(5, 2)
    adapters.put(1, {"layer.lora_A.weight": a, "layer.lora_B.weight": b})
    adapters.put(2, {"layer.lora_A.weight": 2 * a, "layer.lora_B.weight": b})
    adapters.hook()
    adapters.begin(np.array([2, 1, 0]), 2)
    inputs = torch.randn(3, 2, 3)
    layer = model["layer"]
    bare = inputs @ layer.weight + layer.bias
    factors = torch.tensor([2.0, 1.0, 0.0])[:, None, None]
    assert torch.allclose(layer(inputs), bare + factors * (inputs @ (b @ a).T), atol=1e-5)
    adapters.put(2, {})
    adapters.hook()
    factors[0] = 0
    assert torch.allclose(layer(inputs), bare + factors * (inputs @ (b @ a).T), atol=1e-5)


def test_an_adapter_stays_as_it_was_put_while_its_trainer_goes_on() -> None:
    model = nn.ModuleDict({"layer": nn.Linear(3, 5)})
    adapters, layer, inputs = Adapters(model), model["layer"], torch.randn(1, 1, 3)
    a, b = torch.randn(2, 3), torch.randn(5, 2)
    adapters.put(1, {"layer.lora_A.weight": a, "layer.lora_B.weight": b})
    expected = layer(inputs) + inputs @ (b @ a).T
    a.zero_()
    adapters.hook()
    adapters.begin(np.array([1]), 1)
    assert torch.allclose(layer(inputs), expected, atol=1e-5)
