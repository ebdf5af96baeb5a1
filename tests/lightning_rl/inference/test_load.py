from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lightning_rl.inference.load import load_model, model_folder
from lightning_rl.training.critic import ValueModel

from .models import make


def test_a_saved_model_comes_back_ready_to_sample(tmp_path):
    model = make("qwen2")
    model.train().save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert not loaded.training
    assert loaded.config._attn_implementation == "sdpa"
    inputs = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        assert torch.equal(loaded(input_ids=inputs).logits, model.eval()(input_ids=inputs).logits)
    assert load_model(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_weights_begin_in_memory_where_torch_would_put_them(tmp_path: Path) -> None:
    """Of some products the last bits depend on it."""
    folder, name = tmp_path, "model.safetensors"
    make("qwen2").save_pretrained(folder)
    weights = load_file(folder / name)
    found = set()
    for spaces in range(0, 64, 8):
        save_file(weights, folder / name, {"format": "pt", "spaces": " " * spaces})
        mapped = AutoModelForCausalLM.from_pretrained(folder)
        found |= {weight.data_ptr() % 64 for weight in mapped.parameters()}
        for model in (load_model(folder), ValueModel.load(folder)):
            assert all(weight.data_ptr() % 64 == 0 for weight in model.parameters())
    assert found != {0}


def test_what_is_neither_a_folder_nor_an_id_is_named(tmp_path: Path) -> None:
    assert model_folder(str(tmp_path)) == tmp_path
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").touch()
    with pytest.raises(FileNotFoundError, match=r"is the folder of a run: its model is in .*run/model'"):
        model_folder(str(tmp_path / "run"))
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(FileNotFoundError, match=r"is an adapter .* and no whole model: name the model that it was"):
        model_folder(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="'/nope/model' is neither a folder nor a model id"):
        model_folder("/nope/model")


def test_an_id_is_taken_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name: asked.append(name) or str(tmp_path))
    assert model_folder("Qwen/Qwen3-0.6B") == tmp_path
    assert asked == ["Qwen/Qwen3-0.6B"]


def test_a_folder_that_is_mistyped_as_an_id_would_be_is_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(_: str) -> str:
        raise OSError("check your connection")

    monkeypatch.setattr("huggingface_hub.snapshot_download", nothing)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sft1" / "model").mkdir(parents=True)
    for path, hint in (("sft1/modle", "; did you mean 'sft1/model'?"), ("sft2/model", "")):
        with pytest.raises(OSError, match="check your connection") as raised:
            model_folder(path)
        [note] = raised.value.__notes__
        assert note == f"model {path!r} is no folder here, and could not be taken from the hub{hint}"
