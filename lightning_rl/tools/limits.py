"""How much of a tool's text the model gets to read, and how many calls run at once.

Invariant: nothing is cut in silence: verl's marker stands where text is missing, and the number of characters or
tokens that went is told.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

Side = Literal["left", "right", "middle"]


class Encoding(Protocol):
    """A text's tokens."""

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """Where each token stands in the text, in characters."""


class Tokenizer(Protocol):
    """What is needed of a `tokenizers.Tokenizer`."""

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Encoding:
        """The text's tokens."""


@dataclass(frozen=True)
class ResultLimits:
    """Limits of a trajectory's tool results.

    Args:
        max_parallel_calls: calls of one answer that run at once; the others run after them.
        max_length: characters of a result's text, or tokens where there is a tokenizer; None: all. The marker is not
            counted.
        side: which part is cut.
        tokenizer: the model's, to count in tokens.
    """

    max_parallel_calls: int = 1
    max_length: int | None = 256
    side: Side = "middle"
    tokenizer: Tokenizer | None = None

    def cut(self, text: str) -> tuple[str, int]:
        """The text as the model reads it, and how much of it went: characters, or tokens."""
        if self.max_length is None or (self.tokenizer is None and len(text) <= self.max_length):
            return text, 0
        ends = self._ends(text)
        limit = self.max_length
        excess = len(ends) - limit
        if excess <= 0:
            return text, 0
        if self.side == "left":
            return "(truncated)..." + text[ends[excess - 1] :], excess
        if self.side == "right":
            return (text[: ends[limit - 1]] if limit else "") + "...(truncated)", excess
        half = limit // 2
        head = text[: ends[half - 1]] if half else ""
        tail = text[ends[len(ends) - half - 1] :] if half else ""
        return f"{head}...(truncated)...{tail}", len(ends) - 2 * half

    def _ends(self, text: str) -> range | list[int]:
        """Where each character or token of the text ends."""
        if self.tokenizer is None:
            return range(1, len(text) + 1)
        return [end for _, end in self.tokenizer.encode(text, add_special_tokens=False).offsets]
