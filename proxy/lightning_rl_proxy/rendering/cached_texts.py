"""Texts that come again are tokenised once: system prompts, tools, the prompt of a group, what a rollout says again.

A text is cut at its special tokens, as a tokenizer does first, which looks at what is between them alone; so the long
beginning that prompts share is found again though they end differently. Invariant: the ids are those of the whole text.
Whether a tokenizer is of that kind is read from its file, and tried; of another, whole texts are kept.

Who has met many unknown texts will meet more: then they are tokenised in the fastest way that gives the same ids
(`ascii_bpe`), which is made in a thread of its own and compared on what is known.
"""

import logging
import re
import sys
import threading
from array import array
from collections import OrderedDict
from typing import NamedTuple

from tokenizers import Tokenizer

from lightning_rl_proxy.rendering import ascii_bpe
from lightning_rl_proxy.rendering.long_texts import LongTexts
from lightning_rl_proxy.rendering.special_tokens import longest_of

_BYTES = 32 * 2**20  # of all texts that are kept, with their ids
_LARGEST = _BYTES // 16  # of one text
_ENTRY = 380  # bytes of an entry besides
_OF_THE_BEGINNING = ("Metaspace", "Prepend", "add_prefix_space=True")  # treat where a whole text begins in another way
_MANY = 64  # unknown texts
_TRIED = 16  # special tokens; some tokenizers have thousands
_log = logging.getLogger(__name__)
_PROBES = ("how many?\n", " a b", "\n\nx", "Ωé ", "1234")


class _KnownText(NamedTuple):
    """The ids of a text, and the bytes that both take."""

    ids: "array[int]"
    size: int


class CachedTexts:
    """The ids of texts by one tokenizer. Threads may share it.

    Args:
        tokenizer: without added special tokens.
        long_texts: tokenises what is not known, and bounds prompts.
        size: bytes of all texts that are kept, with their ids; those that were not asked for longest go first.
    """

    def __init__(self, tokenizer: Tokenizer, long_texts: LongTexts, size: int = _BYTES) -> None:
        self._tokenizer, self._long_texts, self._most = tokenizer, long_texts, size
        self._ids_of_texts: OrderedDict[str, _KnownText] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()
        self._special = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
        self._cuts = re.compile(f"({longest_of(self._special)})") if _cuts_first(tokenizer) else None
        self._unknown = 0  # texts that were met
        self._of_ascii: ascii_bpe.Encode | None = None

    @property
    def cuts(self) -> bool:
        """Whether texts are cut at special tokens."""
        return self._cuts is not None

    def encode(self, text: str) -> list[int]:
        """The ids of a text. Raises PromptTooLong."""
        if self._cuts is None:
            return self._ids(text).tolist()
        parts = self._cuts.split(text)
        if len(parts) == 1:
            return self._ids(text).tolist()
        ids: list[int] = []
        for number, part in enumerate(parts):
            if number % 2:
                ids.append(self._special[part])
            elif part:
                ids += self._ids(part)
        self._long_texts.count(len(parts) // 2)  # the special tokens
        return ids

    def _ids(self, text: str) -> "array[int]":
        with self._lock:
            entry = self._ids_of_texts.get(text)
            if entry is not None:
                self._ids_of_texts.move_to_end(text)
        if entry is not None:
            self._long_texts.count(len(entry.ids))
            return entry.ids
        by = self._of_ascii if text.isascii() else None
        ids = array("I", self._long_texts.encode(self._tokenizer, text, by=by))
        self._unknown += 1
        if self._unknown == _MANY and self._cuts is not None:  # what is between special tokens has none
            threading.Thread(target=self._hasten, name="a faster tokenizer", daemon=True).start()
        self._keep(text, ids)
        return ids

    def _hasten(self) -> None:
        """Find a faster way for ASCII texts, and take it if it gives the ids that are known."""
        encode = ascii_bpe.of(self._tokenizer)
        if encode is None:
            return
        with self._lock:
            entries = [(text, entry.ids.tolist()) for text, entry in self._ids_of_texts.items() if text.isascii()]
        if wrong := [text for text, ids in entries if encode(text) != ids]:
            _log.error(
                "tiktoken gives %d of %d texts other ids than tokenizers, and is not used", len(wrong), len(entries)
            )
            return
        self._of_ascii = encode

    def _keep(self, text: str, ids: "array[int]") -> None:
        as_utf8 = 0 if text.isascii() else len(text)  # at least; a text that a tokenizer has read keeps it
        entry = _KnownText(ids, sys.getsizeof(text) + as_utf8 + ids.itemsize * len(ids) + _ENTRY)
        if entry.size > _LARGEST:
            return
        with self._lock:
            if text in self._ids_of_texts:
                return
            self._ids_of_texts[text] = entry
            self._size += entry.size
            while self._size > self._most:
                self._size -= self._ids_of_texts.popitem(last=False)[1].size


def _cuts_first(tokenizer: Tokenizer) -> bool:
    """Whether the ids of a text are those of its special tokens and of what is between them, one behind the other."""
    added = tokenizer.get_added_tokens_decoder()
    plain = all(
        token.content and not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        for token in added.values()
    )
    treats = f"{tokenizer.normalizer!r} {tokenizer.pre_tokenizer!r}"
    if not added or not plain or any(name in treats for name in _OF_THE_BEGINNING):
        return False
    for number in sorted(added)[:: max(1, len(added) // _TRIED)]:
        for before, behind in zip(_PROBES, reversed(_PROBES), strict=True):
            parts = [*_encoded(tokenizer, before), number, *_encoded(tokenizer, behind)]
            if _encoded(tokenizer, before + added[number].content + behind) != parts:
                return False
    return True


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids
