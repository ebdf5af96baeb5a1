"""Makes the model that the game begins with: the tutorial's, shown for some seconds that words are answered with words.

Invariant: every word is shown as the answer to every word equally often, so no code is better known than another.
"""

import shutil
from pathlib import Path

import torch
from transformers import Qwen2ForCausalLM

from examples.calculator.warm_start import TUTORIAL, Conversation, encode, says
from lightning_rl_proxy.rendering.load import load_renderer

from .agent import WHEEL

STEPS, LEARNING_RATE = 60, 1e-3


def make_model(out: Path) -> Path:
    """The model at `out`, made where it is missing."""
    if out.exists():
        return out
    torch.manual_seed(0)
    renderer = load_renderer(TUTORIAL, "auto", "")
    model = Qwen2ForCausalLM.from_pretrained(TUTORIAL, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    shown = [encode(renderer, Conversation([{"role": "user", "content": a}, says(b)])) for a in WHEEL for b in WHEEL]
    for _ in range(STEPS):
        losses = []
        for ids, mask in shown:
            logits_TV = model(torch.tensor([ids])).logits[0, :-1]
            written = torch.tensor(mask[1:]).bool()
            losses.append(torch.nn.functional.cross_entropy(logits_TV[written], torch.tensor(ids[1:])[written]))
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    partial = out.with_name(f"{out.name}.partial")
    shutil.copytree(TUTORIAL, partial, dirs_exist_ok=True)
    model.save_pretrained(partial)
    partial.rename(out)
    return out
