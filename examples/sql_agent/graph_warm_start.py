"""Makes `graph_checkpoint/`: the quickstart's model, shown what a teacher answers to the graph's three prompts.

    python -m examples.sql_agent.graph_warm_start

Invariant: the conversations are those of the graph itself, since the teacher plays its model, and their ids are those
that the gateway makes of them.
"""

import argparse
import os
import random
import shutil
import tempfile
from pathlib import Path

import torch
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from transformers import AutoTokenizer, Qwen2ForCausalLM

from .agent import MAX_TOKENS, Message
from .data import make, write_set
from .graph import sql_graph
from .graph_teacher import Teacher
from .queries import same_answer
from .warm_start import PAD, encode, make_renderer, train

START = Path(__file__).parent / "checkpoint"
OUT = Path(__file__).parent / "graph_checkpoint"
SEED = 0
DEMONSTRATIONS = (4_000_000, 1000, 18)  # first seed, databases, questions of each; no other set has these
STEPS, LEARNING_RATE = 900, 1.5e-3


def demonstrate(folder: Path, rng: random.Random) -> tuple[float, list[list[Message]]]:
    """The share of questions that the teacher gets right in the graph, and all that it was asked and answered."""
    right, conversations = 0, []
    tasks = write_set(folder, "demonstrations", *DEMONSTRATIONS)
    for task in tasks:
        teacher = Teacher(gold=task["gold"], rng=rng)
        state = sql_graph(teacher).invoke(task)
        right += same_answer(task["database"], state["query"], task["gold"])
        # A write, a check, a rewrite, a check, ...: rewrites are rare and the hardest to learn, so each is seen twice.
        conversations += teacher.said + teacher.said[2::2]
    return right / len(tasks), conversations


class Saved(BaseChatModel):
    """A saved model, asked without an engine: sampled at temperature 1, one call at a time."""

    model: Qwen2ForCausalLM
    tokenizer: object

    @property
    def _llm_type(self) -> str:
        return "saved"

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: object = None, **kwargs: object
    ) -> ChatResult:
        renderer = make_renderer(self.tokenizer)
        asked = [{"role": "user", "content": messages[0].text}]
        prompt = torch.tensor([renderer.render_ids(asked, add_generation_prompt=True)])
        ids = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=MAX_TOKENS, do_sample=True, top_k=0
        )
        text = self.tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)  # type: ignore[attr-defined]
        return ChatResult(generations=[ChatGeneration(message=AIMessage(str(text)))])


def accuracy(folder: Path, tasks: list[dict[str, str]]) -> float:
    """How many of `tasks` the graph gets right with the saved model."""
    torch.manual_seed(SEED)
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    graph = sql_graph(Saved.model_construct(model=model, tokenizer=AutoTokenizer.from_pretrained(folder)))
    return sum(same_answer(t["database"], graph.invoke(t)["query"], t["gold"]) for t in tasks) / len(tasks)


def main(out: Path, steps: int) -> None:
    """Build everything in a temporary folder, then put it in place of `out` at once."""
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".checkpoint-") as name:
        work = Path(name)
        new = work / "checkpoint"
        right, conversations = demonstrate(work, random.Random(SEED))
        tokenizer = AutoTokenizer.from_pretrained(START)
        renderer = make_renderer(tokenizer)
        examples = [encode(renderer, tokenizer, messages) for messages in conversations]
        longest = max(len(ids) for ids, _ in examples)
        print(f"teacher: {right:.3f} right, {len(examples)} conversations of at most {longest} tokens", flush=True)
        model = Qwen2ForCausalLM.from_pretrained(START, dtype=torch.float32)
        train(model, examples, tokenizer.convert_tokens_to_ids(PAD), steps, LEARNING_RATE)
        shutil.copytree(START, new)
        model.to(torch.bfloat16).save_pretrained(new)
        print(f"tuning set, sampled: {accuracy(new, make(work)['tuning']):.3f}", flush=True)
        shutil.rmtree(out, ignore_errors=True)
        os.replace(new, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the checkpoint that the graph's training starts from.")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    main(arguments.out, arguments.steps)
