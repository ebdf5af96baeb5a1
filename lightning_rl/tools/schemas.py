"""What a tool is to the model, its schema, and what it answers, `ToolResponse`: verl's names, and nothing left out.

Invariant: a schema that comes in goes out whole. verl's classes keep `type`, `description` and `enum` of a property;
here `items`, `anyOf`, nested objects, defaults and whatever else JSON Schema has stay where they were.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from lightning_rl.agents.values import number
from lightning_rl.tools.errors import ToolError
from lightning_rl_adapters.text import encodable


class _Whole(BaseModel):
    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_Whole):
    """One argument; `type` is missing where it is a union."""

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(_Whole):
    """The arguments of a tool."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(_Whole):
    """Name, description and arguments of a tool."""

    name: str = Field(min_length=1)
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=OpenAIFunctionParametersSchema)


class OpenAIFunctionToolSchema(_Whole):
    """A tool as the `tools` of a Chat Completions request name it."""

    type: Literal["function"] = "function"
    function: OpenAIFunctionSchema

    def request_form(self) -> dict[str, Any]:
        """The dict that a request holds: what was given, with the parts that every tool has."""
        function = self.function.model_dump(exclude_unset=True)
        own_parameters = function.pop("parameters", {})
        parameters = {"type": "object", "properties": {}} | own_parameters
        return {"type": "function", "function": {"name": "", "description": ""} | function | {"parameters": parameters}}


def tool_schema(schema: Any, where: str) -> OpenAIFunctionToolSchema:
    """A schema of what was given: ours, another object with `model_dump`, or a dict.

    A dict has either of the documented shapes: `{type: function, function: {name, ...}}`, or `{name, ...}` itself.

    Raises:
        ToolError: it is neither; `where` names the place.
    """
    if isinstance(schema, OpenAIFunctionToolSchema):
        return schema
    if isinstance(schema, BaseModel):
        schema = schema.model_dump(exclude_unset=True)
    if not isinstance(schema, Mapping):
        raise ToolError(f"{where}: a tool schema is a dict with a name, not of type {type(schema).__name__}")
    shaped = schema if "function" in schema else {"type": "function", "function": dict(schema)}
    try:
        return OpenAIFunctionToolSchema.model_validate(shaped)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ToolError(
            f"{where}: this is no tool schema ({wrong}); write {{type: function, function: {{name, description, "
            "parameters}}, or the name directly under tool_schema"
        ) from error


class ToolResponse(BaseModel):
    """What a tool answers: text, a list of images, a list of videos (or of the frames of one).

    An image is a Pillow image, an array of bytes in height x width x channels, the bytes of an image file, its path, a
    URL (`data:` too), or a dict with `bytes` or `image`. A video is a list of images, or an array of frames.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @field_validator("image", "video", mode="before")
    @classmethod
    def _is_list(cls, value: Any) -> Any:
        if value is None or isinstance(value, list):
            return value
        raise ValueError(f"must be a list, also of one: [...], and is of type {type(value).__name__}")

    def is_empty(self) -> bool:
        """Whether there is nothing in it."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Whether there is text and no image or video."""
        return bool(self.text) and not (self.image or self.video)


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
    return {encodable(str(name)): _metric(one) for name, one in value.items()}


def _metric(value: Any) -> Any:
    """As JSON has it: one number of whatever library is a number, what JSON cannot hold is shown as Python does."""
    try:
        json.dumps(value, allow_nan=False)
        return value
    except (TypeError, ValueError, RecursionError):
        as_float = number(value)
    return f"{value!r:.1000}" if as_float is None or not math.isfinite(as_float) else as_float
