"""Makes `checkpoint/`: a tiny Qwen2 that writes SQL as its teacher does, right about half the time.

    python -m examples.sql_agent.warm_start

It has three parts: a tokenizer trained on the teacher's conversations, those conversations as token
ids, and supervised training on the tokens that the teacher wrote.

Invariant: the token ids trained on are those that the gateway would make of the same conversation,
since the same renderer makes them: the first turn rendered, each later turn bridged to it.
"""

import argparse
import json
import math
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from renderers import Qwen3RendererConfig, create_renderer
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from .agent import MAX_TOKENS, Message, solve
from .data import make, write_set
from .teacher import suspicious, teacher

SEED = 0
DEMONSTRATIONS = (3_000_000, 2500, 18)  # first seed, databases, questions of each
STEPS, BATCH, LEARNING_RATE = 1800, 64, 3e-3

END, PAD = "<|im_end|>", "<|endoftext|>"
SPECIAL = [PAD, "<|im_start|>", END]
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
MARKUP += ["<think>", "</think>"]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def demonstrate(folder: Path, rng: random.Random) -> list[tuple[float, list[Message]]]:
    """The teacher's rewards and conversations, in databases that no other set has."""
    tasks = write_set(folder, "demonstrations", *DEMONSTRATIONS)
    return [solve(task, teacher(rng, task["gold"])) for task in tasks]


def train_tokenizer(conversations: list[list[Message]], folder: Path) -> None:
    """Train a byte-level BPE of 1,024 tokens on the rendered conversations; save it.

    It cuts text into words as Qwen2's tokenizer does: `AutoTokenizer` gives a Qwen2 model that
    class, whatever the file says.
    """
    qwen2 = Qwen2Tokenizer().backend_tokenizer
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = qwen2.normalizer
    tokenizer.pre_tokenizer = qwen2.pre_tokenizer
    tokenizer.decoder = qwen2.decoder
    trainer = trainers.BpeTrainer(
        vocab_size=1024 - len(SPECIAL) - len(MARKUP),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [f"{m['role']}\n{m['content']}" for messages in conversations for m in messages]
    tokenizer.train_from_iterator(["system\n" * len(texts), *texts], trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in MARKUP])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        "renderer": "qwen3",  # which the gateway's `auto` looks for
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def make_renderer(tokenizer: Any) -> Any:
    """The renderer that the gateway uses for this model: Qwen3's markup, earlier turns kept."""
    return create_renderer(tokenizer, Qwen3RendererConfig(thinking_retention="all"))


def encode(renderer: Any, tokenizer: Any, messages: list[Message]) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and a mask that is 1 on the tokens of its assistant."""
    end = tokenizer.convert_tokens_to_ids(END)
    prompt = renderer.render_ids(messages[:1], add_generation_prompt=True)
    mask = [0] * len(prompt)
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        answer = [*tokenizer.encode(message["content"], add_special_tokens=False), end]
        mask += [1] * len(answer)
        following = messages[place + 1 : place + 2]
        if place + 2 >= len(messages):
            return prompt + answer, mask
        prompt = renderer.bridge_to_next_turn(prompt, answer, following).token_ids
        mask += [0] * (len(prompt) - len(mask))
    raise ValueError("a conversation ends with an answer, or with the result of its last answer")


def make_model(
    vocabulary: int, end: int, pad: int, *, width: int = 128, layers: int = 4, inner: int = 384
) -> Qwen2ForCausalLM:
    """By default about 0.92 M parameters, float32, of a fixed seed."""
    torch.manual_seed(SEED)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=inner,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=pad,
        )
    )


Example = tuple[list[int], list[int]]


def batches(examples: list[Example], rng: random.Random) -> Iterator[list[Example]]:
    """Batches for ever, of examples of about the same length: padding is work for nothing."""
    while True:
        shuffled = rng.sample(examples, len(examples))
        chunks = [shuffled[i : i + 32 * BATCH] for i in range(0, len(shuffled), 32 * BATCH)]
        for chunk in chunks:
            chunk.sort(key=lambda example: len(example[0]))
            cut = [chunk[i : i + BATCH] for i in range(0, len(chunk), BATCH)]
            yield from rng.sample(cut, len(cut))


def train(model: Qwen2ForCausalLM, examples: list[Example], pad: int, steps: int, rate: float = LEARNING_RATE) -> None:
    """AdamW on the loss of the masked tokens; the rate rises to `rate` for 50 steps, then falls.

    The loss is divided by one number for all batches. Divided by its own batch's tokens, a token of a long
    conversation would count less, since batches are of one length, and second answers are in the long ones.
    """
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    feed = batches(examples, random.Random(SEED))
    per_batch = BATCH * sum(sum(mask) for _, mask in examples) / len(examples)
    for step in range(steps):
        warm, rest = min(1.0, (step + 1) / 50), 0.5 + 0.5 * math.cos(math.pi * step / steps)
        for group in optimizer.param_groups:
            group["lr"] = rate * warm * max(rest, 0.02)
        batch = next(feed)
        length = max(len(ids) for ids, _ in batch)
        ids_BT = torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in batch])
        mask_BT = torch.tensor([mask + [0] * (length - len(mask)) for _, mask in batch])
        logits_BTV = model(ids_BT).logits[:, :-1]  # padding is on the right: no token sees it
        chosen = mask_BT[:, 1:].bool()
        loss = torch.nn.functional.cross_entropy(logits_BTV[chosen], ids_BT[:, 1:][chosen], reduction="sum") / per_batch
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)


def accuracy(folder: Path, tasks: list[dict[str, str]], *, sample: bool) -> float:
    """Mean reward of the saved model on `tasks`, sampled at temperature 1 or greedy."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    renderer = make_renderer(tokenizer)
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(SEED)

    def chat(messages: list[Message]) -> str:
        prompt = torch.tensor([renderer.render_ids(messages, add_generation_prompt=True)])
        ids = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=MAX_TOKENS,
            do_sample=sample,
            top_k=0 if sample else None,
        )
        return str(tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True))

    return sum(solve(task, chat)[0] for task in tasks) / len(tasks)


def main(out: Path, steps: int) -> None:
    """Build everything in a temporary folder, then put it in place of `out` at once."""
    rng = random.Random(SEED)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".checkpoint-") as name:
        work = Path(name)
        new = work / "checkpoint"
        new.mkdir()
        demonstrations = demonstrate(work, rng)
        right = sum(reward for reward, _ in demonstrations) / len(demonstrations)
        conversations = [messages for _, messages in demonstrations]
        # Second looks are rare and the hardest to learn, so each is seen twice as often as the rest.
        conversations += [messages for messages in conversations if suspicious(messages[2]["content"])]
        train_tokenizer(conversations[:5000], new)
        tokenizer = AutoTokenizer.from_pretrained(new)
        renderer = make_renderer(tokenizer)
        examples = [encode(renderer, tokenizer, messages) for messages in conversations]
        mean = sum(len(ids) for ids, _ in examples) / len(examples)
        print(f"teacher: {right:.3f} right, {len(examples)} conversations of {mean:.1f} tokens")

        end, pad = (tokenizer.convert_tokens_to_ids(token) for token in (END, PAD))
        model = make_model(len(tokenizer), end, pad)
        print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
        train(model, examples, pad, steps)
        model.to(torch.bfloat16).save_pretrained(new)

        tuning = make(work)["tuning"]
        for sample in (False, True):
            how = "sampled" if sample else "greedy"
            print(f"tuning set, {how}: {accuracy(new, tuning, sample=sample):.3f}", flush=True)
        shutil.rmtree(out, ignore_errors=True)
        os.replace(new, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the checkpoint that training starts from.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "checkpoint")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    main(arguments.out, arguments.steps)
