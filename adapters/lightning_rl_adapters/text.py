"""Texts with half of a surrogate pair, which Python and JSON's escapes can hold, and UTF-8, records and tokenizers
cannot."""

from typing import Any


def encodable(text: str) -> str:
    """The text with half surrogates written as escapes: of a JSON text that is another one of the same value."""
    return text.encode(errors="backslashreplace").decode()


def encodable_values(value: Any) -> Any:
    """What JSON may hold, with each text in it `encodable`."""
    if isinstance(value, dict):
        return {encodable(name): encodable_values(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [encodable_values(inner) for inner in value]
    return encodable(value) if isinstance(value, str) else value
