"""The checkpoint that training starts from: its files, its tokenizer, its token ids."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.sql_agent import warm_start
from examples.sql_agent.agent import Message, solve
from examples.sql_agent.data import write_set
from examples.sql_agent.teacher import teacher

FOLDER = Path(warm_start.__file__).parent / "checkpoint"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> list[list[Message]]:
    tasks = write_set(tmp_path_factory.mktemp("demonstrations"), "few", 4_000_000, 5, 18)
    rng = random.Random(0)
    return [solve(task, teacher(rng, task["gold"]))[1] for task in tasks]


def test_it_is_small_and_says_nothing_of_where_it_was_made() -> None:
    files = [path for path in FOLDER.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 3_000_000
    assert {path.name for path in files} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    for path in files:
        if path.suffix == ".json":
            assert "/tmp" not in path.read_text()
            assert "_name_or_path" not in json.loads(path.read_text())


def test_it_loads_in_float32_with_tied_embeddings(tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    assert model.config.model_type == "qwen2"
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert 0.8e6 < model.num_parameters() < 1.0e6
    assert model.config.vocab_size == len(tokenizer) <= 1024
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.pad_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>")


def test_both_tokenizer_classes_give_the_same_ids(tokenizer: Any, conversations: list[list[Message]]) -> None:
    plain = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    texts = [message["content"] for messages in conversations for message in messages]
    for text in [*texts, "<|im_start|>user\nxyz<|im_end|>\n", "Ünï ¼ 日本 \n\n  tab\t9.5", "<tool_call>"]:
        ids = plain.encode(text, add_special_tokens=False).ids
        assert ids == tokenizer.encode(text, add_special_tokens=False)
        assert plain.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids)


def test_the_chat_template_and_the_renderer_agree(tokenizer: Any, conversations: list[list[Message]]) -> None:
    renderer = warm_start.make_renderer(tokenizer)
    for messages in conversations:
        for end in range(1, len(messages) + 1, 2):
            by_template = tokenizer.apply_chat_template(messages[:end], add_generation_prompt=True, return_dict=False)
            assert renderer.render_ids(messages[:end], add_generation_prompt=True) == by_template


def test_what_is_trained_on_is_what_a_rollout_would_have_made(
    tokenizer: Any, conversations: list[list[Message]]
) -> None:
    renderer = warm_start.make_renderer(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for messages in conversations:
        ids, mask = warm_start.encode(renderer, tokenizer, messages)
        assert len(ids) == len(mask)
        at = 0  # walk the ids turn by turn, as the gateway does
        for place in range(0, len(messages) - 1, 2):
            prompt = renderer.render_ids(messages[: place + 1], add_generation_prompt=True)
            answer = tokenizer.encode(messages[place + 1]["content"], add_special_tokens=False)
            assert ids[: len(prompt)] == prompt
            assert ids[len(prompt) : len(prompt) + len(answer) + 1] == [*answer, end]
            assert mask[at : len(prompt)] == [0] * (len(prompt) - at)
            at = len(prompt) + len(answer) + 1
            assert mask[len(prompt) : at] == [1] * (len(answer) + 1)
        assert at == len(ids)
        assert renderer.parse_response(ids[len(prompt) :]).content == messages[-1 - (len(messages) % 2)]["content"]


def test_answers_fit_in_what_the_agent_asks_for(tokenizer: Any, conversations: list[list[Message]]) -> None:
    answers = [m["content"] for messages in conversations for m in messages if m["role"] == "assistant"]
    assert max(len(tokenizer.encode(answer)) for answer in answers) + 1 <= warm_start.MAX_TOKENS
