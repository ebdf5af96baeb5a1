"""A policy's model and its engine may have different number formats, and are two models where one is trained."""

import pytest
import torch

from lightning_rl.inference.embedded import EmbeddedPolicy
from lightning_rl.inference.load import ModelSource


@pytest.mark.parametrize(
    ("trained", "dtype", "held", "sampled"),
    [
        (True, None, torch.float32, torch.float32),
        (True, torch.float32, torch.bfloat16, torch.float32),
        (True, torch.bfloat16, torch.float32, torch.bfloat16),
        (False, None, torch.bfloat16, torch.bfloat16),
    ],
)
def test_model_and_engine_have_the_number_formats_that_were_asked_for(
    trained: bool, dtype: torch.dtype | None, held: torch.dtype, sampled: torch.dtype
) -> None:
    policy = EmbeddedPolicy(ModelSource(device="cpu", dtype=held), trained=trained, dtype=dtype, max_num_seqs=2)
    engines = policy.engine._policy.model
    assert (policy.model.dtype, engines.dtype) == (held, sampled)
    assert (engines is policy.model) is not trained
    places = {parameter.data_ptr() for parameter in policy.model.parameters()}
    assert trained is not any(parameter.data_ptr() in places for parameter in engines.parameters())
    policy.engine.stop()
