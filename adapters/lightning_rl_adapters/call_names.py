"""Names of calls: every id under which a client may know one, from the answer that it was given.

Invariant: a name leads to one call. A tool call's id that several calls gave (services may count theirs from 0) is
dropped.
"""

from collections.abc import Iterable, Iterator

from lightning_rl_adapters import semconv
from lightning_rl_adapters.span import Span

# Of the answer: Chat Completions, Completions, Responses, Messages.
_ANSWERS = ("chatcmpl-", "cmpl-", "resp_", "msg_")


def names_of(spans: Iterable[Span]) -> dict[str, str]:
    """Name -> call id.

    The name of an answer of several choices is that of its first one; the others are known by their tool calls alone.
    """
    calls = [span for span in spans if span.name == semconv.CALL_SPAN]
    own = {name: call.span_id for call in calls for name in _own_names(call)}
    owners: dict[str, set[str]] = {}
    for call in calls:
        for name in _tool_calls(call):
            owners.setdefault(name, set()).add(call.span_id)
    return {name: owner for name, (owner, *others) in owners.items() if not others} | own


def _own_names(call: Span) -> Iterator[str]:
    """The call id, and what the dialects make of it: answers, and the items of a response."""
    yield call.span_id
    yield from (prefix + call.span_id for prefix in _ANSWERS)
    yield from (f"rs_{call.span_id}_0", f"msg_{call.span_id}_0")
    yield from (f"fc_{call.span_id}_{index}" for index, _ in enumerate(_tool_calls(call)))


def _tool_calls(call: Span) -> list[str]:
    """The ids of the tool calls that the answer makes."""
    return [
        str(tool_call["id"])
        for message in call.attributes.get(semconv.OUTPUT_MESSAGES) or ()
        for tool_call in message.get("tool_calls") or ()
        if isinstance(tool_call, dict) and tool_call.get("id")
    ]
