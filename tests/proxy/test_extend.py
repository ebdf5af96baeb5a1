"""What a message adds behind a context does not depend on how much of the context the library is shown.

Every renderer of the library that can be made over the quickstart's tokenizer, which is given the special tokens that
it asks for, is compared with itself: `extend`, which shows it the last turn alone, and the library's own call with all.
"""

import random
import re
from functools import cache
from typing import Any

import pytest
import renderers
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers.base import MODEL_RENDERER_MAP
from renderers.configs import config_from_name
from tokenizers import AddedToken

from lightning_rl_proxy.rendering.renderers import LibraryRenderer
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from tests.proxy.conftest import TOKENIZER
from tests.random_examples import examples

Message = dict[str, Any]
NEEDS_A_DOWNLOAD = {"gpt-oss"}
NAMES = sorted(set(MODEL_RENDERER_MAP.values()) - NEEDS_A_DOWNLOAD)
TOOLS = [{"type": "function", "function": {"name": "run", "description": "", "parameters": {"type": "object"}}}]


class AnyTokenizer(FastTokenizer):
    """A tokenizer with every special token that is asked for by name, or encoded alone and written as DeepSeek's."""

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        if re.fullmatch("<?\uff5c[^\uff5c]+\uff5c>?", text):
            self._tokenizer.add_special_tokens([AddedToken(text, special=True)])
        return super().encode(text)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str) and self.token_id(tokens) is None:
            self._tokenizer.add_special_tokens([AddedToken(tokens, special=True)])
        return super().convert_tokens_to_ids(tokens)


@cache
def made(name: str) -> tuple[Any, LibraryRenderer, AnyTokenizer]:
    config = config_from_name(name)
    if hasattr(config, "thinking_retention"):
        config = config.model_copy(update={"thinking_retention": "all"})
    tokenizer = AnyTokenizer(TOKENIZER)
    renderer = renderers.create_renderer(tokenizer, config)
    return renderer, LibraryRenderer(renderer, tokenizer), tokenizer


def an_answer(renderer: Any, tokenizer: AnyTokenizer, dice: random.Random) -> list[int]:
    """Text, perhaps with reasoning opened or closed in it, perhaps cut, perhaps with a stop token in the middle."""
    stops, markers = renderer.get_stop_token_ids(), [*map(tokenizer.convert_tokens_to_ids, ["<think>", "</think>"])]
    ids = [dice.choice([*range(300, 310), *markers, stops[-1]]) for _ in range(dice.randint(0, 3))]
    opening = dice.choice([[], [markers[0]], [markers[1]], markers])
    return [*opening, *ids, *([dice.choice(stops)] if dice.random() < 0.8 else [])]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(25), deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_last_turn_is_all_that_a_continuation_needs(name: str, dice: random.Random) -> None:
    renderer, ours, tokenizer = made(name)
    texts = ["hi", "", "<think>", "a\nb", "done </think> so"]
    ids: list[int] = renderer.render_ids(
        [{"role": "system", "content": "Work."}, {"role": "user", "content": dice.choice(texts)}],
        add_generation_prompt=True,
    )
    for _ in range(5):
        response = an_answer(renderer, tokenizer, dice)
        role = dice.choice(["user", "user", "tool", "system"])
        messages: list[Message] = [{"role": role, "content": dice.choice(texts)} for _ in range(dice.randint(1, 2))]
        whole = renderer.bridge_to_next_turn(ids, response, messages, tools=TOOLS)
        context = ids + response
        expected = None
        if whole is not None and whole.token_ids[: len(context)] == context:
            expected = whole.token_ids[len(context) :]
        assert ours.extend(ids, response, messages, TOOLS) == expected
        ids = context + (expected if expected is not None else tokenizer.encode("again"))


@pytest.mark.parametrize("name", ["qwen3", "llama-3", "kimi-k2", "hy3", "deepseek-v3"])
def test_answers_that_end_well_are_continued(name: str) -> None:
    renderer, ours, _ = made(name)
    ids: list[int] = renderer.render_ids([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    for _ in range(3):
        response = [300, 301, renderer.get_stop_token_ids()[0]]
        added = ours.extend(ids, response, [{"role": "user", "content": "more"}], None)
        assert added
        ids += response + added
