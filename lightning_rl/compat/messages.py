"""`TraceToMessages`: what an attempt's calls said, as conversations in OpenAI's form, for fine-tuning elsewhere."""

from collections.abc import Sequence
from typing import Any

from lightning_rl_adapters import forest, semconv
from lightning_rl_adapters.call import calls_of
from lightning_rl_adapters.conventions import conversations
from lightning_rl_adapters.span import Span
from lightning_rl_adapters.tool_schemas import tools_of


class TraceToMessages:
    """An adapter from an attempt's spans to conversations: one for each call that was answered in full."""

    def adapt(self, spans: Sequence[Span]) -> list[dict[str, Any]]:
        """`{"messages": [...], "tools": [...]}` of each call: all that was said to the model, then its answer, and the
        tools that it was shown (None: it was shown none, or an earlier release recorded it).

        The gateway's calls come first, by order of arrival; then those that the agent's own spans tell of, by start
        time. Raises ForestError where the calls do not fit together.
        """
        attributes = {span.span_id: span.attributes for span in spans}
        tools = tools_of(spans)
        rows: list[dict[str, Any]] = []
        for node in forest.build(calls_of(spans)).nodes.values():
            if not node.call.delivered:
                continue
            messages: list[dict[str, Any]] = []
            for each in node.path():
                call_attributes = attributes[each.call.call_id]
                messages += [
                    *(call_attributes.get(semconv.INPUT_MESSAGES) or ()),
                    *(call_attributes.get(semconv.OUTPUT_MESSAGES) or ()),
                ]
            digest = attributes[node.path()[0].call.call_id].get(semconv.TOOLS)
            rows.append({"messages": messages, "tools": None if digest is None else tools.get(digest)})
        for conversation in conversations(spans):
            rows += [
                {"messages": [*conversation.prompt, answer], "tools": conversation.tools or None}
                for answer in conversation.answers
            ]
        return rows
