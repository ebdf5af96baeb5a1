"""Texts that come again are tokenised once, and their ids are those of the whole text, whatever the tokenizer."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from lightning_rl_proxy.errors import PromptTooLong
from lightning_rl_proxy.rendering.cached_texts import CachedTexts
from lightning_rl_proxy.rendering.long_texts import LongTexts
from tests.proxy.conftest import TOKENIZER
from tests.random_examples import examples

SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|endoftext|>"]
WORDS = [*SPECIAL, "<|im_", "<|im_end|", " ", "  \n", "\n\n", "system\n", "how many?", "é", "e\u0301", "🌲", "12", "\t"]


def plain() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))


def overlapping() -> Tokenizer:
    """Special tokens that begin alike, or stand in each other."""
    tokenizer = plain()
    tokenizer.add_special_tokens(["<|im", "<|im_start|>system", "im_end", "  \n"])
    return tokenizer


def stripping() -> Tokenizer:
    """One takes the spaces before it along."""
    tokenizer = plain()
    tokenizer.add_special_tokens([AddedToken("<take>", lstrip=True, normalized=False)])
    return tokenizer


def normalized() -> Tokenizer:
    """One is looked for behind the normalizer."""
    tokenizer = plain()
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_tokens([AddedToken("how many?", normalized=True)])
    return tokenizer


def prefixed() -> Tokenizer:
    """A text begins with a space."""
    tokenizer = plain()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def sentences() -> Tokenizer:
    """The beginning of a text is another word than in its middle."""
    tokenizer = plain()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return tokenizer


KINDS = {made.__name__: made() for made in (plain, overlapping, stripping, normalized, prefixed, sentences)}
CUT = {
    "plain": True,
    "overlapping": True,
    "stripping": False,
    "normalized": False,
    "prefixed": False,
    "sentences": False,
}


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def cached(tokenizer: Tokenizer, **options: Any) -> CachedTexts:
    return CachedTexts(tokenizer, LongTexts(tokenizer), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_tokenizer_that_cuts_first_has_its_texts_cut(kind: str) -> None:
    assert (cached(KINDS[kind])._cuts is not None) == CUT[kind]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(60))
@given(texts=st.lists(st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=10).map("".join), max_size=6))
def test_the_ids_are_those_of_the_whole_text(kind: str, texts: list[str]) -> None:
    tokenizer = KINDS[kind]
    known = cached(tokenizer, size=1_500)  # so that some are forgotten
    for text in [*texts, *texts]:
        assert known.encode(text) == ids_of(tokenizer, text)
    assert known._size == sum(entry.size for entry in known._ids_of_texts.values()) <= 1_500


class Counted(LongTexts):
    """Notes what is tokenised."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.texts: list[str] = []

    def encode(self, tokenizer: Tokenizer, text: str, **how: Any) -> list[int]:
        self.texts.append(text)
        return super().encode(tokenizer, text, **how)


def test_what_prompts_share_is_tokenised_once() -> None:
    counted = Counted(KINDS["plain"])
    known = CachedTexts(KINDS["plain"], counted)
    system = "<|im_start|>system\nYou know SQL.<|im_end|>\n"
    for question in ("one", "two", "one"):
        text = f"{system}<|im_start|>user\n{question}<|im_end|>\n"
        assert known.encode(text) == ids_of(KINDS["plain"], text)
    assert counted.texts == ["system\nYou know SQL.", "\n", "user\none", "user\ntwo"]


def test_a_long_text_with_a_letter_that_is_not_ascii_is_kept_too() -> None:
    counted = Counted(KINDS["plain"])
    known = CachedTexts(KINDS["plain"], counted)
    document = "it\u2019s " + "one and other " * 22_000
    assert known.encode(document) == known.encode(document)
    assert len(counted.texts) == 1


def test_a_caller_may_change_what_it_was_given() -> None:
    known = cached(KINDS["plain"])
    text = "a text without special tokens"
    known.encode(text).append(7)
    assert known.encode(text) == ids_of(KINDS["plain"], text)


def test_a_prompt_of_known_texts_is_bounded_like_any_other() -> None:
    texts = LongTexts(KINDS["plain"])
    known = CachedTexts(KINDS["plain"], texts)
    text = "how many schools? " * 10
    texts.context = len(known.encode(text))
    for _ in range(2):
        with texts.of_one_prompt():
            known.encode(text)
            known.encode(text)
            with pytest.raises(PromptTooLong):
                known.encode(text)
    with texts.of_one_prompt(), pytest.raises(PromptTooLong):
        known.encode("<|im_end|>" * (2 * texts.context + 1))


def test_threads_share_it() -> None:
    known = cached(KINDS["plain"], size=50_000)
    texts = [f"question {n % 37} of <|im_end|> many {n % 11}" * 3 for n in range(400)]
    barrier = threading.Barrier(4)

    def some(number: int) -> None:
        barrier.wait()
        for text in texts[number:] + texts[:number]:
            assert known.encode(text) == ids_of(KINDS["plain"], text)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(some, range(4)))
    assert known._size == sum(entry.size for entry in known._ids_of_texts.values()) <= 50_000
