"""What may be emitted or returned: finite numbers as rewards, and text that can be encoded. Loads nothing."""

import math
import numbers


def finite(value: object, where: str) -> float:
    """`value` as a float. Raises ValueError naming `where` for NaN, infinities and what is no number."""
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"{where}: a reward must be a finite number, got {value!r}")
    return float(value)


def encodable(text: str) -> str:
    """The text with half surrogates, which no encoding holds and models' JSON may have, written as escapes."""
    return text.encode(errors="backslashreplace").decode()
