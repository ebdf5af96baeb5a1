"""What a tool's function returned, as verl's triple (response, reward, metrics).

Invariant: a reward is a finite number; one that is 0 or False stays, only None is none.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from lightning_rl.tools.schemas import ToolResponse

Returned = tuple[ToolResponse, float, dict[str, Any]]


def returned(value: Any) -> Returned:
    """The triple that `value` stands for.

    Text, a dict (as JSON), a `ToolResponse`, or any other object (by `str`) is a response; a tuple is (response,),
    (response, reward) or (response, reward, metrics).

    Raises:
        TypeError: a tuple of another length, a reward that is no number, metrics that are no dict.
        ValueError: a reward that is not finite.
    """
    if not isinstance(value, tuple):
        return _response(value), 0.0, {}
    if not 1 <= len(value) <= 3:
        raise TypeError(f"a tool returns (response, reward, metrics) or less of it, not {len(value)} values")
    response, reward, metrics = (*value, None, None)[:3]
    return _response(response), _reward(reward), _metrics(metrics)


def _response(value: Any) -> ToolResponse:
    if isinstance(value, ToolResponse):
        return value
    if isinstance(value, str):
        return ToolResponse(text=value)
    if isinstance(value, dict):
        return ToolResponse(text=json.dumps(value, ensure_ascii=False))
    return ToolResponse(text=str(value))


def _reward(value: Any) -> float:
    if value is None:
        return 0.0
    try:
        reward = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"a tool's reward is a number, not {value!r}") from error
    if isinstance(value, str) or not math.isfinite(reward):
        raise ValueError(f"a tool's reward is a finite number, not {value!r}")
    return reward


def _metrics(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"a tool's metrics are a dict, not of type {type(value).__name__}")
    return dict(value)
