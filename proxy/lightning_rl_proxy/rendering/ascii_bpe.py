"""Byte-level BPE of ASCII texts by `tiktoken`, where its ids are those of `tokenizers`, in a sixth of the time.

Both begin with bytes and merge the adjacent pair that comes first in the tokenizer's list. `tiktoken` merges any two
tokens whose bytes together are a token; `tokenizers` only the pairs of its list. That is the same where every merged
token has one pair, and its bytes alone become that token: when two neighbours could be merged, nothing has crossed
the borders of their bytes yet, so these were merged as they are alone, and the pair is the one of the list. All of it
is read from the tokenizer, and tried (`of`). What splits a text is one of few expressions, which mean the same to
both libraries in ASCII; other texts are left to `tokenizers`, and so are texts with special tokens.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

Encode = Callable[[str], list[int]]

_GPT2: Final = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: Final = (_WORDS % r"\p{N}", _WORDS % r"\p{N}{1,3}")  # of Qwen 2 and 3; of many since GPT-4


class _Part(msgspec.Struct):
    type: str
    pattern: dict[str, str] = {}
    behavior: str = ""
    invert: bool = False
    add_prefix_space: bool = True
    use_regex: bool = True
    pretokenizers: "list[_Part]" = []


class _Model(msgspec.Struct):
    type: str = ""
    vocab: Any = None
    merges: Any = None
    dropout: float | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    byte_fallback: bool = False
    ignore_merges: bool = False


class _File(msgspec.Struct):
    model: _Model
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: _Part | None = None


def of(tokenizer: Tokenizer) -> Encode | None:
    """What encodes ASCII texts without special tokens as `tokenizer` does; None where that is not known to be the same.

    It takes a second for 150,000 tokens.
    """
    file = msgspec.json.decode(tokenizer.to_str(), type=_File)
    split, model = _split(file), file.model
    plain = not (model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix or model.byte_fallback)
    if split is None or model.type != "BPE" or not plain or model.ignore_merges:
        return None
    made = _tokens(model, tokenizer)
    if made is None:
        return None
    ranks, ids = made
    import tiktoken  # where no text is ever tokenised it is not needed

    encoding = tiktoken.Encoding("ascii", pat_str=split, mergeable_ranks=ranks, special_tokens={})
    encode, of_rank = encoding.encode_ordinary, ids.__getitem__
    return lambda text: list(map(of_rank, encode(text)))


def _split(file: _File) -> str | None:
    """The expression of the parts in which a text is merged; None for another way."""
    before = file.pre_tokenizer
    if before is None or (
        file.normalizer is not None and file.normalizer.get("type") != "NFC"
    ):  # ASCII is in that form
        return None
    if before.type == "ByteLevel" and before.use_regex and not before.add_prefix_space:
        return _GPT2
    if before.type != "Sequence" or [part.type for part in before.pretokenizers] != ["Split", "ByteLevel"]:
        return None
    split, byte_level = before.pretokenizers
    pattern = split.pattern.get("Regex")
    is_supported = pattern in _SPLITS and split.behavior == "Isolated" and not split.invert
    return pattern if is_supported and not (byte_level.use_regex or byte_level.add_prefix_space) else None


def _tokens(model: _Model, tokenizer: Tokenizer) -> tuple[dict[bytes, int], list[int]] | None:
    """The tokens that merging can give, by their bytes, in the order of the merges; and their ids in that order. None
    where a token is not merged by one pair alone, or not what its own bytes become."""
    byte_of, vocab = _bytes_by_letter(), model.vocab
    if not all(letter in vocab for letter in byte_of):
        return None
    ranks = {bytes([byte]): rank for rank, byte in enumerate(byte_of.values())}
    ids = [vocab[letter] for letter in byte_of]
    merged = tokenizer.model
    for pair in model.merges:
        first, second = pair if isinstance(pair, list) else pair.split(" ")
        letters = first + second
        if not byte_of.keys() >= set(letters):
            return None
        token = bytes(map(byte_of.__getitem__, letters))
        if token in ranks or [piece.id for piece in merged.tokenize(letters)] != [vocab[letters]]:
            return None
        ranks[token] = len(ids)
        ids.append(vocab[letters])
    return ranks, ids


def _bytes_by_letter() -> dict[str, int]:
    """The byte for which each letter stands in byte-level vocabularies: printable ones for themselves, others for a
    letter from 256 on (GPT-2's `bytes_to_unicode`)."""
    own: Iterable[int] = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(own)]
    return {chr(byte): byte for byte in own} | {chr(256 + n): byte for n, byte in enumerate(others)}
