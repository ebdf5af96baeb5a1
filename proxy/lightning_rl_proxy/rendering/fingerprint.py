"""What tells two renderers apart: their vocabulary, how they write a conversation that has everything in it, where
answers end, and how images are seen."""

import hashlib
import json
from typing import Any, NamedTuple

from lightning_rl_proxy.rendering.base import Renderer

_CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "a"}'}}
_PROBE: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two", "reasoning_content": "because"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "four"},
]
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "d",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]


class Fingerprint(NamedTuple):
    """Digests: of the vocabulary, of the token ids of a few conversations, and of the model's settings: at which tokens
    its answers end, and how many tokens an image has."""

    vocabulary: str
    chats: str
    settings: str


def fingerprint_of(renderer: Renderer) -> Fingerprint:
    """The fingerprint of a renderer. A conversation that its format refuses counts by the refusal."""
    conversations = [(_PROBE, _TOOLS), (_PROBE[:4], None), (_PROBE[1:2], None)]
    chats = [_rendered(renderer, messages, tools) for messages, tools in conversations]
    settings = [sorted(renderer.stop_token_ids), renderer.vision]
    return Fingerprint(renderer.tokenizer.vocabulary_digest(), _digest(chats), _digest(settings))


def _rendered(
    renderer: Renderer, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> list[int] | None:
    try:
        return renderer.render(messages, tools)
    except ValueError:
        return None


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
