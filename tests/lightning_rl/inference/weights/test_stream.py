"""Weights that come one after another: the files that are made of them, their names, an engine that takes them."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from lightning_rl.inference.engine import EmbeddedEngine
from lightning_rl.inference.load import load_model, skeleton
from lightning_rl.inference.sequence import GenerationRequest, GenerationSampling
from lightning_rl.inference.weights.stream import (
    WeightStream,
    as_saved,
    buckets,
    export_model,
    stream_of,
    stream_of_files,
    write,
)

CHECKPOINT = Path(__file__).parents[4] / "examples" / "sql_agent" / "checkpoint"
WEIGHTS = {
    "a": torch.arange(6.0).reshape(2, 3).T,
    "b": torch.tensor([1.5, -2.0]).bfloat16(),
    "n": torch.tensor([7]),
    "yes": torch.tensor(True),
    "none": torch.empty(0, 3),
}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_a_file_is_what_safetensors_reads(tmp_path: Path) -> None:
    write(stream_of(WEIGHTS), tmp_path / "file")
    assert_equal(load_file(tmp_path / "file"), WEIGHTS)


def test_a_stream_that_does_not_keep_to_what_it_said_is_refused(tmp_path: Path) -> None:
    said = stream_of(WEIGHTS).described
    for other in (WEIGHTS | {"a": torch.zeros(2, 3)}, {"a": WEIGHTS["a"]}):
        with pytest.raises(ValueError, match="came for"):
            write(WeightStream(said, lambda other=other: iter(other.items())), tmp_path / "file")  # type: ignore[misc]


def test_buckets_have_their_size_or_one_tensor() -> None:
    tensors = [(str(n), torch.zeros(size, dtype=torch.uint8)) for n, size in enumerate([3, 3, 9, 1, 1, 1])]
    assert [list(bucket) for bucket in buckets(tensors, 6)] == [["0", "1"], ["2"], ["3", "4", "5"]]


@pytest.mark.parametrize("size", [10**9, 300_000])
def test_an_export_is_loaded_by_transformers(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_rl.inference.weights.stream.FILE_BYTES", size)
    model: Any = load_model(CHECKPOINT)
    export_model(skeleton(CHECKPOINT), as_saved(model, stream_of(model)), tmp_path)
    assert (len(list(tmp_path.glob("*.safetensors"))) == 1) == (size == 10**9)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_equal(again.state_dict(), model.state_dict())
    assert again.config.to_dict() == model.config.to_dict() | {"_name_or_path": str(tmp_path)}
    assert again.generation_config.eos_token_id == model.generation_config.eos_token_id
    files = stream_of_files(tmp_path, skeleton(tmp_path))
    assert files is not None
    assert_equal(dict(files), dict(stream_of(model)))


def test_experts_that_are_held_together_leave_as_the_checkpoint_has_them(tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    found = as_saved(model, stream_of(model))
    assert_equal(dict(found), load_file(tmp_path / "model.safetensors"))
    assert any(".experts.1." in name for name in found.described)
    assert not found.described.keys() & {name for name in model.state_dict() if "experts" in name}


def broken(stream: WeightStream) -> WeightStream:
    def tensors() -> Iterator[tuple[str, Tensor]]:
        yield from list(stream)[:3]
        raise ConnectionError("a worker is gone")

    return WeightStream(stream.described, tensors)


def test_an_engine_samples_nothing_from_weights_that_broke_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_rl.inference.engine.BUCKET_BYTES", 1)
    begun = load_model(CHECKPOINT)
    trained = copy.deepcopy(begun)
    for parameter in trained.parameters():
        parameter.data *= 1.1

    def request(engine: EmbeddedEngine, name: str) -> Any:
        sampling = GenerationSampling(max_tokens=4, temperature=0.0)
        return engine.submit(GenerationRequest(request_id=name, token_ids=[5, 6, 7], sampling=sampling))

    with EmbeddedEngine(copy.deepcopy(begun)) as engine:
        with pytest.raises(ConnectionError):
            engine.update_weights(broken(stream_of(trained)), 1)
        waits = request(engine, "waits")
        with pytest.raises(ValueError, match="broke off: give all"):
            engine.update_weights(stream_of(dict(list(stream_of(trained))[:1])), 1, partial=True)
        with pytest.raises(ValueError, match="weights missing"):
            engine.update_weights(stream_of({}), 1)
        assert not waits.done()
        engine.update_weights(stream_of(trained), 2)
        found = waits.result(60)
    with EmbeddedEngine(trained) as engine:
        expected = request(engine, "own").result(60)
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
    assert {span.version for span in found.versions} == {2}
