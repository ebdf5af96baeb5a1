"""Makes `checkpoint/`: a tiny Qwen2 that does a word problem as its teacher does.

    python -m examples.gsm8k.warm_start

The teacher does the right steps, but often says a number without any, or takes a step's result for the answer. What is
left to learn is to go on until the end. Tokenizer and model are made as the tutorial's are, only smaller.

Invariant: the teacher's conversations have the tools that the config names, as the loop will send them.
"""

import argparse
import functools
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from examples.calculator.warm_start import TUTORIAL, Conversation, batches, calls, encode, fit, result, says
from examples.sql_agent.agent import Message
from examples.sql_agent.warm_start import END, PAD, make_model, train_tokenizer
from lightning_rl.config import compose
from lightning_rl.config.schema import Config
from lightning_rl.tools.base_tool import schema_of
from lightning_rl.tools.config import load_tools
from lightning_rl_proxy.rendering.base import Renderer
from lightning_rl_proxy.rendering.load import load_renderer

from .problems import problem

FOLDER = Path(__file__).parent
SEED = 1
WORDS, CONVERSATIONS = 400, 4000  # conversations that the tokenizer, and the model, is made from
STEPS, BATCH, LEARNING_RATE = 1000, 32, 3e-3
SIZE = {"width": 96, "layers": 3, "inner": 256}
GUESSES = 0.3  # how often the teacher does without any tool
STOPS = 0.35  # how often, after each step but the last, it takes the result for the answer


@functools.cache
def tools() -> list[dict[str, Any]]:
    """The tools of the config, as requests have them. Its paths are those of the current folder."""
    multi_turn = compose(file=FOLDER / "config.yaml", schema=Config).actor_rollout_ref.rollout.multi_turn
    return [schema_of(tool).request_form() for tool in load_tools(multi_turn)]


def teach(rng: random.Random) -> Conversation:
    """One conversation of the teacher."""
    made = problem(rng)
    said = [{"role": "user", "content": made.question}]
    answer = next(word for word in made.question.split() if word.isdigit())
    if rng.random() >= GUESSES:
        for step in made.steps:
            answer = str(step.result)
            said += [calls(step.tool, **step.arguments), result(answer)]
            if rng.random() < STOPS:
                break
    return Conversation([*said, says(f"#### {answer}")], tools())


def texts(renderer: Renderer, conversation: Conversation) -> list[Message]:
    """What a model reads and writes in a conversation, from which the tokenizer learns its words."""
    text = renderer.tokenizer.decode(encode(renderer, conversation).ids).replace(END, "")
    turns = [turn.split("\n", 1) for turn in text.split("<|im_start|>") if turn]
    return [{"role": role, "content": content} for role, content in turns]


def make(folder: Path, steps: int) -> None:
    """Make tokenizer and model in `folder`."""
    rng = random.Random(SEED)
    tutorial = load_renderer(TUTORIAL, "auto", "")
    train_tokenizer([texts(tutorial, teach(rng)) for _ in range(WORDS)], folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end, pad = (tokenizer.convert_tokens_to_ids(token) for token in (END, PAD))
    model = make_model(len(tokenizer), end, pad, **SIZE)
    renderer = load_renderer(folder, "auto", "")
    examples = [encode(renderer, teach(rng)) for _ in range(CONVERSATIONS)]
    longest = max(len(example.ids) for example in examples)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens; conversations of at most {longest}")
    fit(model, batches(examples, rng, BATCH), steps=steps, rate=LEARNING_RATE, rises=30)
    model.to(torch.bfloat16).save_pretrained(folder)


def main(out: Path, steps: int) -> None:
    """Make everything in a temporary folder, then put it in place of `out` at once."""
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".checkpoint-") as name:
        new = Path(name) / "checkpoint"
        new.mkdir()
        make(new, steps)
        shutil.rmtree(out, ignore_errors=True)
        os.replace(new, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the checkpoint that training starts from.")
    parser.add_argument("--out", type=Path, default=FOLDER / "checkpoint")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    main(arguments.out, arguments.steps)
