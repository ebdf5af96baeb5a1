"""What is checked on a GPU, as functions of a device, so that a CPU plays them too (`tests/test_gpu_report.py`)."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lightning_rl.config import compose
from lightning_rl.inference.load import load_model
from lightning_rl.ppo import local_workers
from lightning_rl.ppo.local_workers import LocalWorkers, roles_of
from lightning_rl.training.forward import additive_mask
from lightning_rl.training.layers import flex
from lightning_rl.training.layers.attention import Segment, TreeMask
from tests.lightning_rl.training.distributed.stories import rows

CHECKPOINT = Path(__file__).parents[2] / "examples" / "sql_agent" / "checkpoint"
PROMPT, ANSWERS, ANSWER = 300, 3, 200  # no multiple of a block


def differences_of_attention(device: str, dtype: torch.dtype, heads: int, keys: int, width: int) -> dict[str, float]:
    """Attention of a prompt with some answers by `flex_attention`, against a whole mask in float32: of the result and
    each gradient the norm of the difference, over its own."""
    torch.manual_seed(0)
    length = PROMPT + ANSWERS * ANSWER
    ends = [length] * PROMPT + [PROMPT + (n + 1) * ANSWER for n in range(ANSWERS) for _ in range(ANSWER)]
    end, before = np.array([ends]), np.arange(PROMPT)
    segments = [Segment(0, PROMPT, before[:0])]
    segments += [Segment(PROMPT + n * ANSWER, ANSWER, before) for n in range(ANSWERS)]
    place = torch.device(device)
    blocks = flex.block_mask(end, place)
    mask = TreeMask((1, length), segments, dtype, place, lambda: torch.empty(0), blocks=blocks)
    whole = additive_mask(torch.from_numpy(end).to(place), torch.float32)
    given = [torch.randn(1, of, length, width, device=place).to(dtype) for of in (heads, keys, keys)]
    found = _with_gradients(given, mask)
    expected = _with_gradients([one.float() for one in given], whole)
    names = ("result", "of queries", "of keys", "of values")
    return {name: float((a.float() - b).norm() / b.norm()) for name, a, b in zip(names, found, expected, strict=True)}


def _with_gradients(given: list[Tensor], mask: Tensor) -> list[Tensor]:
    leaves = [one.detach().requires_grad_() for one in given]
    grouped = leaves[0].shape[1] != leaves[1].shape[1]
    out = scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=grouped)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).sin()
    return [out.detach(), *torch.autograd.grad((out.float() * weights).sum(), leaves)]


def trained(device: str, *words: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log probabilities before an update of the tutorial's model, and its weights after two."""
    config = compose(command_line=["actor_rollout_ref.actor.optim.lr=1e-3", *words])
    in_4_bits = config.actor_rollout_ref.model.load_in_4bit
    policy: Any = load_model(CHECKPOINT, torch.float32, device, load_in_4bit=in_4_bits)
    made = LocalWorkers(config, policy, roles_of(config, with_critic=False))
    made.train(CHECKPOINT, 10)
    assert made.actor is not None
    first: list[Tensor] = []
    for seed in (0, 1):
        batch = rows(seed)
        own = made.actor.log_probs(batch)
        first = first or [torch.from_numpy(np.asarray(each)) for each in own]
        for sequence, each in zip(batch, own, strict=True):
            sequence.old_log_probs = each
        made.actor.update(made.actor.plan(batch, 4))
    return first, {name: weight.detach().float().cpu() for name, weight in local_workers.trained(policy).items()}
