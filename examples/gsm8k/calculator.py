"""A tool with state: a calculator that pays for each step of the solution, as `tools.yaml` declares it.

Invariant: a result is paid for once in a trajectory, however often the model asks for it.
"""

from typing import Any

from examples.calculator.agent import calculate
from lightning_rl.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse


class Calculator(BaseTool):
    """Its state is what it still pays for: the results that the task's `create_kwargs` name.

    `config.step_reward` is what it pays.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self.step_reward = float(config["step_reward"])
        self._unpaid: dict[str, set[str]] = {}

    async def create(
        self, instance_id: str | None = None, results: tuple[int, ...] = (), **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """See `BaseTool`; `results` are those of the solution."""
        instance_id, said = await super().create(instance_id)
        self._unpaid[instance_id] = set(map(str, results))
        return instance_id, said

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """The number, or `error` for what is no sum."""
        result, unpaid = calculate(parameters), self._unpaid[instance_id]
        right = result in unpaid
        unpaid.discard(result)
        return ToolResponse(text=result), self.step_reward if right else 0.0, {"right": right}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """See `BaseTool`."""
        del self._unpaid[instance_id]
