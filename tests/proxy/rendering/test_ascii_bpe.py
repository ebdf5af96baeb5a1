"""Another library tokenises ASCII texts: the ids are the same, or it is not used."""

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from lightning_rl_proxy.rendering import ascii_bpe, cached_texts
from lightning_rl_proxy.rendering.cached_texts import CachedTexts
from lightning_rl_proxy.rendering.long_texts import LongTexts
from tests.proxy.conftest import TOKENIZER
from tests.random_examples import examples

ALPHABET = pre_tokenizers.ByteLevel.alphabet()
LETTERS = "abeilnorst' .,_-(){}=\"\n\r\t019XY<|>"


def byte_level(split: str | None) -> Any:
    if split is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    behind = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), behind])


def trained(split: str | None, size: int = 3000) -> Tokenizer:
    """Trained on Python's own source and tests."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = byte_level(split)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=ALPHABET, show_progress=False)
    made.train([str(path) for path in (Path(json.__file__).parent).glob("*.py")], trainer)
    return made


TOKENIZERS = {
    "the tutorial's": Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")),
    "digits alone": trained(ascii_bpe._SPLITS[0]),
    "digits by three": trained(ascii_bpe._SPLITS[1]),
    "GPT-2": trained(None),
}


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return found


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_ids_are_those_of_tokenizers(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    encode = ascii_bpe.of(tokenizer)
    assert encode is not None
    for pair in itertools.product(map(chr, range(128)), repeat=2):
        assert encode("".join(pair)) == ids(tokenizer, "".join(pair))
    for text in ("", " " * 5000, "ab" * 3000, Path(__file__).read_text().encode("ascii", "ignore").decode()):
        assert encode(text) == ids(tokenizer, text)

    @settings(max_examples=examples(300), deadline=None)
    @given(
        st.one_of(st.text(st.sampled_from(LETTERS), max_size=80), st.text(st.characters(codec="ascii"), max_size=40))
    )
    def check(text: str) -> None:
        assert encode(text) == ids(tokenizer, text)

    check()


def changed(**model: Any) -> Tokenizer:
    """A byte-level tokenizer of three merges, in which something is changed."""
    vocab = {letter: number for number, letter in enumerate(sorted(ALPHABET))}
    merges = model.pop("merges", [("b", "c"), ("a", "bc"), ("d", "d")])
    for letter in model.pop("more", []):
        vocab[letter] = len(vocab)
    for first, second in merges:
        vocab.setdefault(first + second, len(vocab))
    made = Tokenizer(models.BPE(vocab, merges, **model))
    made.pre_tokenizer = byte_level(ascii_bpe._SPLITS[0])
    return made


def test_whatever_may_be_merged_in_another_way_is_left_alone() -> None:
    assert ascii_bpe.of(changed()) is not None
    two_pairs = changed(merges=[("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")])
    assert ascii_bpe.of(two_pairs) is None
    never_reached = changed(merges=[("b", "c"), ("a", "b"), ("ab", "c")])  # b and c are together before
    assert ids(never_reached, "abc") != [never_reached.token_to_id("abc")]
    assert ascii_bpe.of(never_reached) is None
    no_bytes = changed(merges=[("b", "c"), ("▁", "a")], more=["▁"])
    assert ascii_bpe.of(no_bytes) is None
    assert ascii_bpe.of(changed(dropout=0.1)) is None
    assert ascii_bpe.of(changed(ignore_merges=True)) is None
    other_split = changed()
    other_split.pre_tokenizer = byte_level(r"\s+|\S+")
    assert ascii_bpe.of(other_split) is None
    lower = changed()
    lower.normalizer = normalizers.Lowercase()
    assert ascii_bpe.of(lower) is None
    assert ascii_bpe.of(Tokenizer(models.Unigram([("a", -1.0)]))) is None


def known_texts(tokenizer: Tokenizer) -> CachedTexts:
    tokenizer.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    return CachedTexts(tokenizer, LongTexts(tokenizer))


def test_many_unknown_texts_are_tokenised_by_it_and_texts_of_other_letters_are_not() -> None:
    tokenizer = changed()
    texts = known_texts(tokenizer)
    for number in range(cached_texts._MANY):
        texts.encode(f"abc {number}<|end|>")
    for thread in threading.enumerate():
        if thread.name == "a faster tokenizer":
            thread.join(60)
    asked: list[str] = []
    encode = texts._of_ascii
    assert encode is not None
    texts._of_ascii = lambda text: asked.append(text) or encode(text)  # type: ignore[func-returns-value]
    for text in ("abc ddd<|end|>aabc", "ä abc", "abc" * 3000):
        assert texts.encode(text) == ids(tokenizer, text)
    assert asked == ["abc ddd", "aabc", "abc" * 3000]


def test_other_ids_than_those_that_are_known_are_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    texts = known_texts(changed())
    texts.encode("abc")
    monkeypatch.setattr(ascii_bpe, "of", lambda tokenizer: lambda text: [1])
    texts._hasten()
    assert texts._of_ascii is None
    assert "other ids than tokenizers" in caplog.text
