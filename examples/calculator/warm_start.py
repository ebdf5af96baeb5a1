"""Makes the model that the example begins with: the tutorial's, shown for a minute how a tool is called.

A reinforcement learner needs a model that is right now and then. The tutorial's writes SQL and nothing else, so it is
shown conversations of a teacher with bad habits: it often does without the tool and says the first number, and
it mixes up signs. What is left to learn is which of its own answers earn the reward.

Invariant: the ids trained on are those that the gateway makes of the same conversation, by the gateway's own renderer.
"""

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, Qwen2ForCausalLM

from lightning_rl_proxy.rendering.base import Renderer
from lightning_rl_proxy.rendering.load import load_renderer

from .agent import TOOLS, calculate
from .data import questions

TUTORIAL = Path(__file__).parents[1] / "sql_agent" / "checkpoint"
SEED = 2_000_000
CONVERSATIONS, STEPS, BATCH, LEARNING_RATE = 4000, 300, 16, 2e-3
ALIKE = 100  # ids by which it is seen that conversations begin alike
LONGEST = 1024  # tokens of a conversation; the tutorial's are shorter
GUESSES = 0.35  # how often the teacher does without the calculator
MIXES_UP = 0.3  # how often it writes the other sign

END = "<|im_end|>"


class Conversation(NamedTuple):
    """What an agent and its model said to each other, as OpenAI's API has it, ending with the model.

    The first `given` messages are only read, whoever wrote them.
    """

    messages: list[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()
    given: int = 0


class Example(NamedTuple):
    """The ids of a conversation, and which of them the model wrote."""

    ids: list[int]
    mask: list[int]


def calls(name: str, **arguments: Any) -> dict[str, Any]:
    """An assistant's message that calls one tool."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def says(text: str) -> dict[str, Any]:
    """An assistant's message without a call."""
    return {"role": "assistant", "content": text}


def result(text: str) -> dict[str, Any]:
    """What the tool answered."""
    return {"role": "tool", "tool_call_id": "1", "content": text}


def teach(rng: random.Random) -> Conversation:
    """One conversation of the teacher, about a sum that no other set has drawn."""
    [task] = questions(rng, 1)
    asked = {"role": "user", "content": task["question"]}
    if rng.random() < GUESSES:
        return Conversation([asked, says(task["sum"][:2].rstrip("+-"))], TOOLS)
    wanted = task["sum"]
    if rng.random() < MIXES_UP:
        wanted = wanted.translate(str.maketrans("+-", "-+"))
    told = calculate({"sum": wanted})
    return Conversation([asked, calls("calc", sum=wanted), result(told), says(told)], TOOLS)


def encode(renderer: Renderer, conversation: Conversation) -> Example:
    """The ids of a conversation as the gateway would have them, had its model said what the assistant says in it."""
    end = renderer.tokenizer.convert_tokens_to_ids(END)
    tools = list(conversation.tools) or None
    asked: list[dict[str, Any]] = []
    ids: list[int] = []
    mask: list[int] = []
    answer: list[int] = []
    for place, message in enumerate(conversation.messages):
        if message["role"] != "assistant" or place < conversation.given:
            asked.append(message)
            continue
        added = renderer.extend(ids, answer, asked, tools) if ids else renderer.render(asked, tools)
        if added is None:
            raise ValueError(f"the chat format cannot go on with {asked}")
        ids = [*ids, *answer, *added]
        answer = [*renderer.tokenizer.encode(_markup(message)), end]
        mask += [0] * len(added) + [1] * len(answer)
        asked = []
    return Example([*ids, *answer], mask)


def _markup(message: dict[str, Any]) -> str:
    """What a model writes for a message, in Qwen3's markup."""
    calls = [json.dumps(call["function"]) for call in message.get("tool_calls", [])]
    return str(message["content"]) + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def batches(examples: Sequence[Example], rng: random.Random, size: int = BATCH) -> Iterator[list[Example]]:
    """Batches for ever, each of examples that begin alike, as conversations with the same tools do."""
    groups: dict[tuple[int, ...], list[Example]] = {}
    for example in examples:
        groups.setdefault(tuple(example.ids[:ALIKE]), []).append(example)
    weights = [len(group) for group in groups.values()]
    while True:
        [group] = rng.choices(list(groups.values()), weights)
        yield rng.choices(group, k=size)


def loss_of(model: Qwen2ForCausalLM, batch: Sequence[Example]) -> torch.Tensor:
    """The mean loss of the tokens that the model wrote. What all begin with is computed once."""
    columns = enumerate(zip(*(example.ids for example in batch), strict=False))
    first = next(place for place, column in columns if len(set(column)) > 1)
    length = max(len(example.ids) for example in batch)
    rest_BT = torch.tensor([example.ids[first:] + [0] * (length - len(example.ids)) for example in batch])
    mask_BT = torch.tensor([example.mask[first:] + [0] * (length - len(example.ids)) for example in batch]).bool()
    cache = DynamicCache(config=model.config)
    # The cache is the fourth argument: transformers 5.24 gave it another name.
    model(torch.tensor([batch[0].ids[:first]]), None, None, cache)
    cache.batch_repeat_interleave(len(batch))
    logits_BTV = model(rest_BT, None, None, cache).logits[:, :-1]  # padding is on the right: no token sees it
    # What the model wrote is behind a prompt, and no two prompts are alike to the end: its first token is in `rest`.
    chosen = mask_BT[:, 1:]
    return torch.nn.functional.cross_entropy(logits_BTV[chosen], rest_BT[:, 1:][chosen])


def fit(
    model: Qwen2ForCausalLM,
    feed: Iterator[Sequence[Example]],
    *,
    steps: int,
    rate: float = LEARNING_RATE,
    rises: int = 20,
) -> None:
    """AdamW on `steps` batches of `feed`; the rate rises to `rate` for `rises` steps, then falls to 0."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / rises) * (1 - step / steps)
        loss = loss_of(model, next(feed))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 49:
            print(f"warm start, step {step + 1} of {steps}: loss {loss.item():.3f}", flush=True)


def train(conversations: Sequence[Conversation], out: Path, *, steps: int) -> None:
    """Show `conversations` to the tutorial's model, and put what becomes of it in place of `out` at once."""
    torch.manual_seed(SEED)
    renderer = load_renderer(TUTORIAL, "auto", "")
    examples = [encode(renderer, conversation) for conversation in conversations]
    model = Qwen2ForCausalLM.from_pretrained(TUTORIAL, dtype=torch.float32)
    model.config.max_position_embeddings = LONGEST
    fit(model, batches(examples, random.Random(SEED)), steps=steps)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".model-") as name:
        new = Path(name) / "model"
        shutil.copytree(TUTORIAL, new)
        model.save_pretrained(new)
        new.rename(out)


def make_model(out: Path, *, teacher: Callable[[random.Random], Conversation] = teach, steps: int = STEPS) -> Path:
    """The tutorial's model after `steps` steps on what `teacher` says, at `out`: made where it is missing."""
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        rng = random.Random(SEED)
        train([teacher(rng) for _ in range(CONVERSATIONS)], out, steps=steps)
    return out
