"""Special tokens in text: what users, tools and systems say is text, even where it spells `<|im_end|>`.

A chat format writes its special tokens as text too, and a tokenizer cannot tell the two apart. So the spellings in what
is said are guarded, written in noncharacters, before the format sees them; when the format's text is encoded, its own
special tokens are found first, and then what was guarded is put back and encoded as the letters that it is.
"""

import json
import re
import secrets
from collections.abc import Iterable
from typing import Any

import msgspec
from tokenizers import Tokenizer

from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.rendering.long_texts import LongTexts

# Marks around the results of tools, which some tokenizers do not call special; others (`<think>`) forge nothing.
_RESULTS = frozenset({"<tool_response>", "</tool_response>"})
_OPEN, _CLOSE, _OWN = "\ufdd0", "\ufdd1", "\ufdd2"


class Controls:
    """The special tokens of a tokenizer. Nobody outside of this process can write what it guards with."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        ids_by_text = {
            token.content: token_id
            for token_id, token in added.items()
            if (token.special or token.content in _RESULTS) and token.content and not token.single_word
        }
        self.texts = tuple(ids_by_text)
        self._salt = secrets.token_hex(8)
        self._numbers = {text: number for number, text in enumerate(self.texts)}
        self._ids = frozenset(ids_by_text.values())
        self._spelled = re.compile(longest_of(self.texts)) if self.texts else None
        self._heads = tuple({text[0] for text in self.texts})
        self._written_heads = tuple({msgspec.json.encode(text[:2])[1:-1] for text in self.texts})
        # JSON that a format writes may hold the guards escaped.
        self._guards = re.compile(rf"(?:{_OPEN}|\\ufdd0){self._salt}(\d+)(?:{_CLOSE}|\\ufdd1)")
        renamed = json.loads(tokenizer.to_str()) | {"post_processor": None, "truncation": None, "padding": None}
        for token in renamed["added_tokens"]:
            token["content"] = self._own(token["content"]) if token["content"] in ids_by_text else token["content"]
        self._tokenizer = Tokenizer.from_str(json.dumps(renamed))
        names = {token.content: token_id for token_id, token in added.items()}
        names = {self._own(text) if text in ids_by_text else text: token_id for text, token_id in names.items()}
        self._real = {self._tokenizer.token_to_id(text): token_id for text, token_id in names.items()}

    def guarded(self, value: Any, spared: frozenset[str] = frozenset()) -> Any:
        """A JSON value whose texts, names of fields included, spell no special token but the `spared`."""
        if isinstance(value, str):
            return self._guarded(value, spared)
        if isinstance(value, dict):
            return {self._guarded(name, spared): self.guarded(inner, spared) for name, inner in value.items()}
        if not isinstance(value, list) or not self._may_spell(value):
            return value
        return [self.guarded(inner, spared) for inner in value]

    def guards(self, text: str) -> bool:
        """Whether something in a text is guarded."""
        return self._salt in text

    def encode(self, text: str, long_texts: LongTexts) -> list[int]:
        """The ids of a text in which the special tokens are the format's own, and what is guarded is letters.

        Raises PromptTooLong; GatewayError(400) where the tokenizer has no other way to write the letters.
        """
        spelled = self._spelled
        assert spelled is not None, "without special tokens nothing is guarded"
        own, count = spelled.subn(lambda match: self._own(match[0]), text)
        letters = self._guards.sub(lambda match: self.texts[int(match[1])], own)
        ids = [self._real.get(token, token) for token in long_texts.encode(self._tokenizer, letters)]
        if sum(token in self._ids for token in ids) != count:
            raise GatewayError(
                400,
                "a message spells a special token, which this model's tokenizer cannot write as text; leave it out, or "
                "set gateway.special_tokens_in_text=control (`serve --special-tokens-in-text control`)",
                param="messages",
            )
        return ids

    def _may_spell(self, value: list[Any]) -> bool:
        """Whether a text in there may: most tools spell none, and agents send many texts of them with every call."""
        try:
            written = msgspec.json.encode(value)
        except (TypeError, ValueError):  # no JSON
            return True
        return any(head in written for head in self._written_heads)

    def _guarded(self, text: str, spared: frozenset[str]) -> str:
        if self._spelled is None or not any(head in text for head in self._heads):
            return text
        return self._spelled.sub(lambda match: match[0] if match[0] in spared else self._guard(match[0]), text)

    def _guard(self, text: str) -> str:
        return f"{_OPEN}{self._salt}{self._numbers[text]}{_CLOSE}"

    def _own(self, text: str) -> str:
        return f"{_OWN}{self._salt}{self._numbers[text]}{_CLOSE}"


def longest_of(words: Iterable[str]) -> str:
    """A regular expression for the longest of the words; it looks at each character once."""
    tails: dict[str, list[str]] = {}
    for word in words:
        tails.setdefault(word[:1], []).append(word[1:])
    branches = [re.escape(head) + longest_of(rest) for head, rest in tails.items() if head]
    if "" not in tails:
        return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{'|'.join(branches)})?" if branches else ""
