"""How an answer begins that must be a tool call, or that its client has begun.

The texts are found by rendering examples, and used only where an answer that goes on from them is parsed as meant.
"""

import hashlib
import json
import re
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.rendering.base import Renderer, tool_call

PROBED_ID = "call00000"  # of a call in an example: some templates take no longer one
_TOOL, _ARGUMENT, _VALUE = "name0placeholder0", "argument0placeholder0", "value0placeholder0"
OPENING = re.compile(r"<think>\s*(</think>\s*)?\Z")  # of reasoning, at the end of a prompt
_EMPTY_THOUGHT = re.compile(r"\A\s*<think>\s*</think>\s*")


class Forcing(NamedTuple):
    """How a format's turn begins that is a call: its empty thinking, and its text up to the name, or the arguments.

    `to_arguments` holds the placeholder of the name. Each text is None where it is not proven.
    """

    thought: str
    to_name: str | None
    to_arguments: str | None

    def ids(
        self, renderer: Renderer, prompt_ids: list[int], tools: Sequence[dict[str, Any]], name: str | None
    ) -> list[int] | None:
        """The ids behind this prompt; see `Renderer.forced`. The only tool there is has its name forced too."""
        if name is None and len(tools) == 1:
            name = tools[0]["function"]["name"]
        head = self.to_name if name is None else self.to_arguments
        if head is None:
            return None
        opened = OPENING.search(renderer.tokenizer.decode(prompt_ids[-16:]))
        name = renderer.tokenizer.guarded(name or "")
        # Where a call's id stands before its arguments, each has its own.
        own_id = hashlib.sha256(array("q", prompt_ids).tobytes()).hexdigest()[: len(PROBED_ID)]
        head = head.replace(_TOOL, name).replace(PROBED_ID, own_id)
        return renderer.encode_behind(self.thought_behind("" if opened is None else opened[0]) + head)

    def thought_behind(self, opening: str) -> str:
        """The empty thinking, as far as the prompt has not written it."""
        if "</think>" in opening:
            return ""
        if not opening:
            return self.thought
        written = self.thought.lstrip()
        return written[len(opening) :] if written.startswith(opening) else "\n</think>\n\n"


def probe_forcing(
    renderer: Renderer, written: Callable[[Sequence[dict[str, Any]], Sequence[dict[str, Any]] | None], str]
) -> Forcing:
    """Read from what a format writes for a call how a call begins; `written` gives a conversation's text."""
    ask = {"role": "user", "content": "a question"}
    parameters = {"type": "object", "properties": {_ARGUMENT: {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": _TOOL, "description": "a tool", "parameters": parameters}}]
    texts: list[str] = []
    try:
        prompt_ids = renderer.render([ask], tools)
        bare = OPENING.sub("", renderer.tokenizer.decode(prompt_ids))
        for arguments in ({_ARGUMENT: _VALUE}, {}):
            calls = [tool_call(PROBED_ID, _TOOL, arguments)]
            text = written([ask, {"role": "assistant", "content": "", "tool_calls": calls}], tools)
            if not text.startswith(bare) or _TOOL not in text[len(bare) :]:
                return Forcing("", None, None)
            texts.append(text[len(bare) :])
    except GatewayError:
        return Forcing("", None, None)
    match = _EMPTY_THOUGHT.match(texts[0])
    thought = match[0] if match else ""
    own, without = (text.removeprefix(thought) for text in texts)
    # Where texts with and without arguments part, the arguments have begun: but for the brace or bracket of either.
    shared = _shared(own, without).removesuffix("{").removesuffix("<")
    heads = own[: own.index(_TOOL)], shared if _TOOL in shared else None
    to_name, to_arguments = (_proven(renderer, prompt_ids, tools, thought, head, own) for head in heads)
    return Forcing(thought, to_name, to_arguments)


_UNKNOWN = "?"  # of what stands before an answer


def probe_lead(
    renderer: Renderer, written: Callable[[Sequence[dict[str, Any]], Sequence[dict[str, Any]] | None], str]
) -> str:
    """What a format writes between a prompt and an answer's text: nothing, or an empty thinking; else `_UNKNOWN`."""
    ask = {"role": "user", "content": "a question"}
    try:
        bare = OPENING.sub("", renderer.tokenizer.decode(renderer.render([ask], None)))
        text = written([ask, {"role": "assistant", "content": _VALUE}], None)
    except GatewayError:
        return _UNKNOWN
    lead, separator, _ = text.removeprefix(bare).partition(_VALUE)
    proven = separator and text.startswith(bare) and (not lead or _EMPTY_THOUGHT.fullmatch(lead))
    return lead if proven else _UNKNOWN


def begun(renderer: Renderer, prompt_ids: list[int], lead: str, text: str) -> list[int] | None:
    """The ids of an answer's beginning behind a prompt, `lead` being what a format writes before it."""
    if lead == _UNKNOWN:
        return None
    opened = OPENING.search(renderer.tokenizer.decode(prompt_ids[-16:]))
    thought = Forcing(lead, None, None).thought_behind("" if opened is None else opened[0])
    content = renderer.tokenizer.guarded_messages([{"role": "assistant", "content": text}])[0]["content"]
    return renderer.encode_behind(thought + content)


def _proven(
    renderer: Renderer, prompt_ids: list[int], tools: Sequence[dict[str, Any]], thought: str, head: str | None, own: str
) -> str | None:
    """`head`, if an answer that goes on from it as the format does is that very call."""
    if head is None:
        return None
    # A placeholder in the head stands for itself here.
    forced = Forcing(thought, head, head).ids(renderer, prompt_ids, tools, _TOOL) or []
    response = forced + renderer.encode_behind(own[len(head) :])
    answer = renderer.parse("probe", prompt_ids, response, None, "stop", tools)
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in answer.tool_calls]
    return head if calls == [(_TOOL, {_ARGUMENT: _VALUE})] and not answer.content.strip() else None


def _shared(one: str, other: str) -> str:
    """The longest common beginning."""
    return one[: next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))]
