"""What may be emitted or returned: finite numbers as rewards, and text that can be encoded. Loads nothing."""

import math
from typing import Protocol, SupportsFloat, runtime_checkable


@runtime_checkable
class _Array(Protocol):
    def item(self) -> object: ...


def number(value: object) -> float | None:
    """`value` as a float where it is one number (bools, NumPy's and torch's, also in an array of one, too), else None;
    text is none."""
    if not isinstance(value, SupportsFloat):
        return None
    try:
        return float(value)
    except TypeError:
        return _only_one(value)
    except (ValueError, RuntimeError, OverflowError):  # arrays and tensors of several numbers
        return None


def _only_one(array: object) -> float | None:
    """The number of an array that has a single one."""
    try:
        one = array.item() if isinstance(array, _Array) else None
        return float(one) if isinstance(one, int | float) else None
    except (TypeError, ValueError, OverflowError):
        return None


def finite(value: object, where: str) -> float:
    """`value` as a float. Raises ValueError naming `where` for NaN, infinities and what is no number."""
    as_float = number(value)
    if as_float is None or not math.isfinite(as_float):
        raise ValueError(f"{where}: a reward must be a finite number, got {value!r:.200}")
    return as_float
