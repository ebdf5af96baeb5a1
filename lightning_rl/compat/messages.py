"""`TraceToMessages`: what an attempt's calls said, as conversations in OpenAI's form, for fine-tuning elsewhere."""

from collections.abc import Sequence
from typing import Any

from lightning_rl_adapters import forest, semconv
from lightning_rl_adapters.call import calls_of
from lightning_rl_adapters.span import Span


class TraceToMessages:
    """An adapter from an attempt's spans to conversations: one for each call that was answered in full.

    A tool's schema is not in a span, only its digest: rows have `messages` alone.
    """

    def adapt(self, spans: Sequence[Span]) -> list[dict[str, Any]]:
        """`{"messages": [...]}` of each call, by order of arrival: all that was said to the model, then its answer.

        Raises ForestError where the calls do not fit together.
        """
        attributes = {span.span_id: span.attributes for span in spans}
        rows: list[dict[str, Any]] = []
        for node in forest.build(calls_of(spans)).nodes.values():
            if not node.call.delivered:
                continue
            messages: list[dict[str, Any]] = []
            for each in node.path():
                told = attributes[each.call.call_id]
                messages += [*(told.get(semconv.INPUT_MESSAGES) or ()), *(told.get(semconv.OUTPUT_MESSAGES) or ())]
            rows.append({"messages": messages})
        return rows
