"""verl's `BaseTool`: a tool with state of its own in every trajectory.

Invariant: one object of this class serves all trajectories; what belongs to one is found by the instance id, which
`create` gives and `release` gives back.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar
from uuid import uuid4

from lightning_rl.tools.errors import ToolError, WrongArguments
from lightning_rl.tools.schemas import OpenAIFunctionToolSchema, Returned, ToolResponse, tool_schema


class BaseTool:
    """Subclass it with `execute`, and with `create` and `release` where there is something to open and close.

    In a trajectory: `create` before the tool's first call, `execute` for every call, `release` once at the end, also
    of a trajectory that fails or is cancelled. `execute` may run more than once at a time where `max_parallel_calls`
    is above 1. verl's subclasses work as they are, with `lightning_rl.tools` for `verl.tools` in their imports.

    Args:
        config: what the YAML file says under `config`; `timeout_seconds` in it bounds each call.
        tool_schema: what the model sees; None where `get_openai_tool_schema` gives it.

    Raises:
        ToolError: there is no schema.
    """

    timeout_seconds: float | None = None
    tool_schema: OpenAIFunctionToolSchema | None = None
    # A tool of a plain function: `coerce.as_tool`, which knows every kind of tool and puts itself here.
    from_callable: ClassVar[Callable[..., "BaseTool"]]
    takes_any_arguments: ClassVar[bool] = False  # True: the tool checks what is required itself

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = config
        self.tool_schema = tool_schema
        self.tool_schema = schema_of(self)
        self.name = self.tool_schema.function.name
        limit = (config or {}).get("timeout_seconds")
        if limit is not None:
            self.timeout_seconds = float(limit)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """What the model sees; override it where no YAML file gives a schema."""
        if self.tool_schema is None:
            raise ToolError(
                f"tool {type(self).__module__}.{type(self).__qualname__} has no schema: give tool_schema, or override "
                "get_openai_tool_schema()"
            )
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Open the state of one trajectory; `kwargs` are those of the sample's `create_kwargs`.

        Returns:
            The id by which `execute` and `release` find it, and what is to be read before the first result, if any.
        """
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Returned:
        """Do one call.

        Returns:
            What the model reads, the reward of this call, and metrics.
        """
        raise NotImplementedError(f"{type(self).__qualname__} has no execute()")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Close the state of one trajectory."""


def schema_of(tool: BaseTool) -> OpenAIFunctionToolSchema:
    """The schema that a tool was given, else the one that its class gives."""
    schema = tool.tool_schema if tool.tool_schema is not None else tool.get_openai_tool_schema()
    return tool_schema(schema, f"tool {type(tool).__module__}.{type(tool).__qualname__}")


def check_required(tool: BaseTool, arguments: Mapping[str, Any]) -> None:
    """Refuse a call without an argument that the schema requires.

    Raises:
        WrongArguments: naming all that are missing.
    """
    if tool.takes_any_arguments:
        return
    missing = [name for name in schema_of(tool).function.parameters.required if name not in arguments]
    if missing:
        raise WrongArguments(f"missing: {', '.join(missing)}")
