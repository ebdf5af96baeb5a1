"""The first prompt of an agent loop, before it runs: what the gateway will render of a task, in tokens.

Known of the built-in loops alone, which begin with the task's messages and the run's tools; a loop or an agent of one's
own may ask for anything.
"""

import functools
from collections.abc import Sequence
from typing import Any

from lightning_rl.agents.task_fields import name_of, shown_messages_of, tools_of
from lightning_rl.loops.loop_registry import NamedLoops, makers
from lightning_rl.loops.single_turn import SingleTurnAgent
from lightning_rl.loops.tool_agent import ToolAgent
from lightning_rl.tools.base_tool import schema_of
from lightning_rl.tools.config import load_tools
from lightning_rl_proxy.dialects import chat_completions
from lightning_rl_proxy.rendering import images
from lightning_rl_proxy.rendering.base import Renderer


class FirstPrompts:
    """Counts the tokens of the prompts that the loops of a config begin with, as `renderer` writes them."""

    def __init__(self, loops: NamedLoops, renderer: Renderer) -> None:
        self._loops = loops
        self._makers = makers(loops.path)
        self._renderer = renderer

    def tokens(self, task: Any) -> int | None:
        """Tokens of the first prompt of `task`; None where its loop is not a built-in one.

        Raises LoopTaskError for a task that no loop can begin with, and GatewayError for messages that the gateway
        would refuse.
        """
        loop = self._makers.get(name_of(task, self._loops.default))
        if loop not in (SingleTurnAgent, ToolAgent):
            return None
        fields: dict[str, Any] = {"model": "policy", "messages": shown_messages_of(task)}
        if loop is ToolAgent and (tools := self._schemas(tools_of(task).selection)):
            fields["tools"] = tools
        request = chat_completions.parse(fields)
        ids = self._renderer.render(request.prompt_messages, request.tools)
        if self._renderer.vision is None:
            return len(ids)
        shown = [images.read(where, url) for where, url in images.urls(request.prompt_messages)]
        return len(self._renderer.vision.expand(ids, shown)[0])

    def _schemas(self, selection: Sequence[str] | None) -> list[dict[str, Any]]:
        return [schema for name, schema in self._of_tools.items() if selection is None or name in selection]

    @functools.cached_property
    def _of_tools(self) -> dict[str, dict[str, Any]]:
        return {tool.name: schema_of(tool).request_form() for tool in load_tools(self._loops.multi_turn)}
