"""Tools that a model calls: functions, tools with state, MCP servers, and what a trajectory makes of its calls.

Invariant: a call is answered, its state is the trajectory's own, and what was opened is closed once. Files name their
tools as verl's do; the modules have verl's names, so that `verl.tools` in an import becomes `lightning_rl.tools`.
"""

from lightning_rl.tools.base_tool import BaseTool
from lightning_rl.tools.errors import ToolError, ToolFailed, WrongArguments
from lightning_rl.tools.function_tool import FunctionTool, function_tool
from lightning_rl.tools.limits import ResultLimits
from lightning_rl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from lightning_rl.tools.trajectory import ToolCall, ToolResult, TrajectoryTools

__all__ = [
    "BaseTool",
    "FunctionTool",
    "OpenAIFunctionToolSchema",
    "ResultLimits",
    "ToolCall",
    "ToolError",
    "ToolFailed",
    "ToolResponse",
    "ToolResult",
    "TrajectoryTools",
    "WrongArguments",
    "function_tool",
]
