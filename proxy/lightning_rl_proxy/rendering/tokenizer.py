"""A `tokenizer.json`, read without transformers: text to token ids and back."""

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from lightning_rl_proxy.rendering.cached_texts import CachedTexts
from lightning_rl_proxy.rendering.long_texts import LongTexts
from lightning_rl_proxy.rendering.special_tokens import Controls

_SHORT = 32  # characters; chat formats write the same few of such texts between messages
_SHORT_TEXTS = 1024
# Where an assistant's message holds its answer, and the marks in there that are the format's.
_ANSWERED = ("content", "reasoning_content", "reasoning", "thinking")
_SPARED = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})
SpecialTokens = Literal["text", "control"]


class FastTokenizer:
    """A `tokenizer.json` with the few methods that `renderers` asks of a tokenizer; loads no transformers.

    `special_tokens`: what such a token is where a message spells it, its letters or the token itself.
    """

    def __init__(self, path: Path, special_tokens: SpecialTokens = "control") -> None:
        self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self._tokenizer.no_truncation()  # a file may ask for it: no prompt is cut here, nor filled up
        self._tokenizer.no_padding()
        config_file = path / "tokenizer_config.json"
        self.config: dict[str, Any] = (
            json.loads(config_file.read_text(encoding="utf-8")) if config_file.exists() else {}
        )
        self.name_or_path = str(path)
        self.renderer: str | None = self.config.get("renderer")
        self.unk_token_id = self._special(self.config.get("unk_token"))
        self.eos_token_id = self._special(self.config.get("eos_token"))
        added = self._tokenizer.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._controls = Controls(self._tokenizer) if special_tokens == "text" else None
        self.long_texts = LongTexts(self._tokenizer)
        self._texts = CachedTexts(self._tokenizer, self.long_texts)
        self._encode_short = lru_cache(_SHORT_TEXTS)(self._encode)

    @property
    def keeps_parts(self) -> bool:
        """Whether what stands between two special tokens is tokenised once, in whichever texts it comes."""
        return self._texts.cuts

    def vocabulary_digest(self) -> str:
        """The digest of which text has which id."""
        entries = sorted(self._tokenizer.get_vocab(with_added_tokens=True).items())
        return hashlib.blake2b(json.dumps(entries).encode(), digest_size=8).hexdigest()

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        """Token ids of `text`, without added special tokens."""
        return self._encode_short(text).copy() if len(text) <= _SHORT else self._encode(text)

    def _encode(self, text: str) -> list[int]:
        if self._controls is not None and self._controls.guards(text):
            return self._controls.encode(text, self.long_texts)
        return self.encode_own(text)

    def encode_own(self, text: str) -> list[int]:
        """Token ids of a text whose author writes special tokens as such."""
        return self._texts.encode(text)

    def guarded(self, value: Any) -> Any:
        """A JSON value of which every text is encoded as its letters, whatever it spells."""
        return value if self._controls is None else self._controls.guarded(value)

    def guarded_messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages of which every text is encoded so; in an assistant's the marks stay that formats look for."""
        if self._controls is None:
            return list(messages)
        return [
            self._controls.guarded(message)
            | {name: self._controls.guarded(message[name], _SPARED) for name in _ANSWERED if name in message}
            if message.get("role") == "assistant"
            else self._controls.guarded(message)
            for message in messages
        ]

    def encode_whole(self, text: str) -> list[int]:
        """Token ids of a whole prompt, with what the tokenizer puts before every text (a BOS token, for instance)."""
        return self.long_texts.encode(self._tokenizer, text, add_special_tokens=True)

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
        """The text of `token_ids`, special tokens included unless `skip_special_tokens`."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        text: str = self._tokenizer.decode(ids, skip_special_tokens=kwargs.get("skip_special_tokens", False))
        return text

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token, or the ids of a list of them; `unk_token_id` for what the vocabulary lacks."""
        if isinstance(tokens, str):
            token_id = self._tokenizer.token_to_id(tokens)
            return self.unk_token_id if token_id is None else token_id
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def token_id(self, token: str) -> int | None:
        """The id of a token, or None for what the vocabulary lacks."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def _special(self, token: Any) -> int | None:
        text = token.get("content") if isinstance(token, dict) else token
        return None if text is None else self._tokenizer.token_to_id(text)
