"""Tokenising long texts: without Python's lock, and no further than a prompt may be long.

A thread that tokenises lets the event loop run. What cannot fit is refused early: before it is tokenised where its
bytes are more than the longest tokens of the context hold, else once twice the context has been counted. The engine
still has the last word on what just fits.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tokenizers import Tokenizer

from lightning_rl_proxy.errors import PromptTooLong
from lightning_rl_proxy.rendering import ascii_bpe

_LONG = 4096  # characters; shorter texts are tokenised faster than a batch begins
_PART = 64 * 2**10  # characters, in which a text is counted
_SHRINKS = 3  # a normalizer may write so many bytes as one, at most


class LongTexts:
    """The long texts of one tokenizer. `context`: how many tokens a prompt may have; None where nobody says.

    `context` may be set while others tokenise.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.context: int | None = None
        self._longest = _longest_bytes(tokenizer)
        self._prompt = threading.local()

    @contextmanager
    def of_one_prompt(self) -> Iterator[None]:
        """What this thread tokenises within the block is of one prompt, and is bounded together."""
        self._prompt.tokens = 0
        try:
            yield
        finally:
            self._prompt.tokens = None

    @contextmanager
    def of_any_length(self) -> Iterator[None]:
        """What this thread tokenises within the block is counted, and may be longer than any prompt."""
        self._prompt.any_length = True
        try:
            yield
        finally:
            self._prompt.any_length = False

    def encode(
        self, tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False, by: ascii_bpe.Encode | None = None
    ) -> list[int]:
        """The ids of a text, `by` what gives it the same ids sooner. Raises PromptTooLong."""
        if len(text) >= _LONG:
            self._check(tokenizer, text)
        ids: list[int]
        if by is not None:
            ids = by(text)
        elif len(text) < _LONG:
            ids = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            ids = _without_lock(tokenizer, text, add_special_tokens)
        self.count(len(ids))
        return ids

    def count(self, tokens: int) -> None:
        """So many more are of the prompt that this thread tokenises. Raises PromptTooLong."""
        counted, context = getattr(self._prompt, "tokens", None), self._bounding()
        if counted is not None and context is not None:
            self._prompt.tokens = counted + tokens
            self._bound(self._prompt.tokens, context)

    def _check(self, tokenizer: Tokenizer, text: str) -> None:
        """Raises PromptTooLong for a text that cannot fit."""
        context = self._bounding()
        if context is None or len(text) <= 2 * context:
            return
        if self._longest and len(text) > context * self._longest:
            raise PromptTooLong(len(text) // self._longest, context, at_least=True)
        counted = 0
        for begin in range(0, len(text), _PART):
            counted += len(_without_lock(tokenizer, text[begin : begin + _PART], False))
            self._bound(counted, context)

    def _bounding(self) -> int | None:
        """The context that what this thread tokenises must fit."""
        return None if getattr(self._prompt, "any_length", False) else self.context

    @staticmethod
    def _bound(tokens: int, context: int) -> None:
        # Twice: parts may have more tokens than the whole, and a format may tokenise a text more than once.
        if tokens > 2 * context:
            raise PromptTooLong(tokens, context, at_least=True)


def _without_lock(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def _longest_bytes(tokenizer: Tokenizer) -> int | None:
    """How many bytes of text a token stands for at most; None where a token may stand for any number, as an unknown
    word's does."""
    by_bytes = "ByteLevel" in repr(tokenizer.decoder) or getattr(tokenizer.model, "byte_fallback", False)
    if not by_bytes:
        return None
    longest = max(len(token.encode()) for token in tokenizer.get_vocab())
    return longest * (1 if tokenizer.normalizer is None else _SHRINKS)
