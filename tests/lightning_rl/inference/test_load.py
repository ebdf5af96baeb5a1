import torch

from lightning_rl.inference.load import load_model

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
