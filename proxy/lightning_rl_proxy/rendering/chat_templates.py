"""A chat format that only its own Jinja template knows: rendered as transformers does, continued where that is proven.

What new messages add is what the template writes behind a placeholder answer: that text alone is tokenised. It is
trusted in the situations in which a probe at start found it to hang on the new messages only; elsewhere `extend` gives
None. The template is foreign code: it runs sandboxed, and whatever it raises is an answer about it, never a crash.
"""

import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.rendering.base import (
    Markup,
    ParsedAnswer,
    Variants,
    arguments_parsed,
    check_kwargs,
    tokens_of,
    tool_call,
    with_ids,
    with_sampled_ids,
)
from lightning_rl_proxy.rendering.call_forms import CallForm, form_by_tokens, form_of
from lightning_rl_proxy.rendering.forcing import (
    OPENING,
    PROBED_ID,
    Forcing,
    begun,
    probe_forcing,
    probe_lead,
)
from lightning_rl_proxy.rendering.images import Vision
from lightning_rl_proxy.rendering.rendered_prompts import RenderedPrompts
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer

Message = dict[str, Any]
Tools = Sequence[dict[str, Any]] | None
Outcome = Literal["proven", "refused", "moved"]

_log = logging.getLogger(__name__)
TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
_VARYING = ("strftime_now", "random", "lipsum")  # with which a template writes the same messages in another way
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", *_NAMED_TOKENS}  # to every template
_THINK = ("<think>", "</think>")  # which parsing needs, special or not
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_THOUGHT = re.compile(r"\A\s*(<think>)?.*?</think>", re.DOTALL)
_PLACEHOLDER = "ANSWER0PLACEHOLDER0"
_QUESTION: Message = {"role": "user", "content": "a question"}
_CALLED: list[Message] = [
    _QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [tool_call(PROBED_ID, "look_up", {"what": "cats"})]},
]
_ANSWERED: list[Message] = [
    *_CALLED,
    {"role": "tool", "content": "two", "tool_call_id": PROBED_ID, "name": "look_up"},
]

_PROBED_TOOL = {
    "type": "function",
    "function": {
        "name": _PLACEHOLDER,
        "description": "Looks a thing up.",
        "parameters": {
            "type": "object",
            "properties": {"what": {"type": "string", "description": "what to look up"}},
            "required": ["what"],
        },
    },
}
_PROBED_ARGUMENTS = {"what": "a"}
_PROBED_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [tool_call(PROBED_ID, _PLACEHOLDER, _PROBED_ARGUMENTS)],
}
_LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a thing up.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
    },
}
PROMPTS: list[tuple[list[Message], Tools]] = [  # that tell chat formats apart
    ([_QUESTION], None),
    ([{"role": "system", "content": "Be brief."}, _QUESTION], [_LOOK_UP]),
    (_ANSWERED, [_LOOK_UP]),
]


class ChatTemplate:
    """A compiled template, or several by name: `default`, and `tool_use` for requests with tools.

    `kwargs` are variables of its own that it is always given; what messages and tools say is `guarded` by the
    tokenizer. `writes_ids`: it writes the ids of tool calls; one that takes those of nine letters alone is given such.
    Raises ValueError naming a kwarg that it does not read.
    """

    def __init__(
        self,
        texts: Mapping[str, str],
        special_tokens: Mapping[str, str],
        tokenizer: FastTokenizer,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        environment = _environment()
        self._templates = {name: environment.from_string(text) for name, text in texts.items()}
        read = {name for text in texts.values() for name in find_undeclared_variables(environment.parse(text))}
        check_kwargs(kwargs or {}, read - environment.globals.keys() - _GIVEN, "it")
        self._always = {**special_tokens, **(kwargs or {})}
        self.reasons = any("</think>" in text for text in texts.values())
        self.varies = any(name in text for text in texts.values() for name in _VARYING)
        # Most templates take the arguments of calls as objects; some put them together as the texts that they came as.
        self._objects, self._short_ids = True, False
        if self._written(_CALLED) is None:
            self._objects = False
            self._objects = self._written(_CALLED) is None
        answered = self._written(_ANSWERED)
        self.writes_ids = answered is not None and PROBED_ID in answered
        long_ids = [with_ids(message, lambda short: f"call_{short}_0") for message in _ANSWERED]
        self._short_ids = answered is not None and self._written(long_ids) is None

    def text(self, messages: Sequence[Message], tools: Tools, *, generation: bool = True) -> str:
        """The conversation as text; with `generation` it ends where the assistant begins to speak."""
        messages = arguments_parsed(messages) if self._objects else messages
        messages = [with_ids(message, _shortened) for message in messages] if self._short_ids else messages
        guarded = self._tokenizer.guarded_messages(messages)
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        return self._templates[name].render(
            messages=[_as_transformers_passes_it(message) for message in guarded],
            tools=None if tools is None else self._tokenizer.guarded(list(tools)),
            documents=None,
            add_generation_prompt=generation,
            **self._always,
        )

    def _written(self, messages: Sequence[Message]) -> str | None:
        """The text of a conversation that is tried; None where the template refuses it."""
        try:
            return self.text(messages, None)
        except TEMPLATE_FAILURES:
            return None


class TemplateRenderer:
    """A `Renderer` over the chat template of a folder.

    `history`: `keep` leaves the sampled reasoning of earlier turns in the context though the template would strip it;
    `template` follows the template, and renders such conversations anew. `chat_template_kwargs` are the template's own
    variables. `append_only` says for each probed situation whether continuing in it is proven, with these variables.
    With `vision` the template is one that shows images, each as one placeholder.
    Raises ValueError naming the folder for a template that cannot be used, or not with them.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: FastTokenizer,
        texts: Mapping[str, str],
        *,
        model: str,
        history: Literal["keep", "template"] = "keep",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        vision: Vision | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.vision = vision
        self.chat_template_kwargs: Mapping[str, Any] = dict(chat_template_kwargs or {})
        self._keep = history == "keep"
        self._template = usable_template(folder, texts, tokenizer, self.chat_template_kwargs)
        self._thinks = self._template.reasons or tokenizer.token_id("</think>") is not None
        self._anchor = _anchor(tokenizer)
        self._closer = self._find_closer()
        self._closer_ids = self.encode_behind(self._closer)
        self.stop_token_ids = _stop_token_ids(folder, tokenizer, self._closer)
        self._outcomes = {name: _worst([self._outcome(p) for p in probes]) for name, probes in self._probed().items()}
        # With two calls in an answer the template would refuse the next turn.
        self._calls_alone = self._outcomes["parallel_tools"] == "refused" != self._outcomes["tool"]
        self.append_only = {name: outcome == "proven" for name, outcome in self._outcomes.items()}
        self._form, self._tools_problem = self._probed_calls()
        self.markup = self._markup()
        self._forcing: Forcing | None = None
        self._lead: str | None = None
        again = partial(TemplateRenderer, folder, tokenizer, texts, model=model, history=history, vision=vision)
        own = self.chat_template_kwargs
        variants = Variants(lambda kwargs: again(chat_template_kwargs={**own, **kwargs}))
        self.with_kwargs, self.is_made = variants.with_kwargs, variants.is_made
        self._model = model
        self._tools_looked_at = False
        rendered = RenderedPrompts(self._rendered, tokenizer.long_texts).ids
        self._prompt_ids = self._rendered if self._template.varies else rendered
        self._warn(model)

    def render(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """See `Renderer`."""
        if tools and not self._tools_looked_at:
            self._tools_looked_at = True
            if self._tools_problem is not None:
                _log.warning("the chat template of model %s %s", self._model, self._tools_problem)
        return self._prompt_ids(messages, tools)

    def _rendered(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        return self.tokenizer.encode(self._text(messages, tools, generation=True))

    def whole(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """See `Renderer`."""
        return self.tokenizer.encode(self._text(messages, tools, generation=False))

    def _text(self, messages: Sequence[Message], tools: Tools, *, generation: bool) -> str:
        try:
            return self._template.text(messages, tools, generation=generation)
        except TEMPLATE_FAILURES as error:
            raise GatewayError(
                400, f"the chat template cannot render these messages: {_why(error)}", param="messages"
            ) from error

    def extend(
        self, prompt_ids: list[int], response_ids: list[int], messages: Sequence[Message], tools: Tools
    ) -> list[int] | None:
        """See `Renderer`. The closer comes first where the answer was cut before it."""
        roles = [message.get("role") for message in messages]
        if not roles or not {"user", "tool", "system"}.issuperset(roles):
            return None
        if not all(self.append_only[situation] for situation in self._situations(response_ids, messages, tools)):
            return None
        if self._template.writes_ids and "tool" in roles:
            _, text = self._split_reasoning(prompt_ids, self._visible(response_ids))
            messages = with_sampled_ids(messages, self._form.ids(text, tools))
        thinking = "thinking" if "user" in roles else "thinking_tool"
        if not self.append_only[thinking] and self._holds_reasoning(prompt_ids + response_ids):
            return None
        added = self._addition(messages, tools)
        return None if added is None else self._behind_answer(response_ids, self.encode_behind(added))

    def parse(
        self,
        call_id: str,
        prompt_ids: list[int],
        response_ids: list[int],
        logprobs: list[float] | None,
        finish_reason: str,
        tools: Tools,
    ) -> ParsedAnswer:
        """See `Renderer`. A malformed tool call stays visible as text."""
        reasoning, text = self._split_reasoning(prompt_ids, self._visible(response_ids))
        content, calls = self._form.split(call_id, text, tools) if tools else (text, [])
        calls = calls[:1] if self._calls_alone else calls
        return ParsedAnswer(
            content=content,
            reasoning=reasoning,
            tool_calls=calls,
            finish_reason=finish_reason,
            token_ids=response_ids,
            logprobs=logprobs,
            decode=self.tokenizer.decode,
            output_tokens=len(response_ids),
        )

    def forced(self, prompt_ids: list[int], tools: Sequence[dict[str, Any]], name: str | None) -> list[int] | None:
        """See `Renderer`."""
        if self._forcing is None:
            self._forcing = probe_forcing(self, self._written)
        return self._forcing.ids(self, prompt_ids, tools, name)

    def begun(self, prompt_ids: list[int], text: str) -> list[int] | None:
        """See `Renderer`."""
        if self._lead is None:
            self._lead = probe_lead(self, self._written)
        return begun(self, prompt_ids, self._lead, text)

    def _written(self, messages: Sequence[Message], tools: Tools) -> str:
        return self._text(messages, tools, generation=False)

    def _find_closer(self) -> str:
        """What the template writes behind an answer whatever follows it; empty where that cannot be told."""
        behind = self._addition([_QUESTION], None)
        if behind is None:
            return ""
        answer = {"role": "assistant", "content": _PLACEHOLDER}
        try:
            tail = self._template.text([_QUESTION, answer], None, generation=False).partition(_PLACEHOLDER)[2]
        except TEMPLATE_FAILURES:
            tail = ""
        if tail and behind.startswith(tail):
            return tail
        # Some templates close a turn only when another follows.
        first = self.tokenizer.encode(behind)[:1]
        return self.tokenizer.decode(first) if self.tokenizer.special_ids.issuperset(first) else ""

    def _addition(self, messages: Sequence[Message], tools: Tools) -> str | None:
        """What the template writes behind an answer that `messages` follow, its closer first."""
        answer: Message = {"role": "assistant", "content": _PLACEHOLDER}
        if calls := _placeholder_calls(messages, tools):
            answer["tool_calls"] = calls
        try:
            prompt = self._template.text([_QUESTION], tools)
            before, _, behind = self._template.text([_QUESTION, answer, *messages], tools).partition(_PLACEHOLDER)
        except TEMPLATE_FAILURES:
            return None
        # Messages that change what stands before the answer (a system text moved to the top) are no continuation.
        if not behind or not before.startswith(OPENING.sub("", prompt)):
            return None
        if not calls:
            return behind
        # How a call ends is the template's own affair: its turn ends with the closer, if that cannot be anything else.
        start = behind.find(self._closer) if self._closer_is_special() else -1
        return None if start < 0 else behind[start:]

    def _closer_is_special(self) -> bool:
        return not self.tokenizer.special_ids.isdisjoint(self._closer_ids)

    def _behind_answer(self, response_ids: list[int], ids: list[int]) -> list[int]:
        """`ids` without what the answer already has of the closer."""
        closer = ids[: len(self._closer_ids)]
        if response_ids and response_ids[-1] in self.stop_token_ids:
            # Whichever stop token was sampled stands in the closer's place.
            stop = next((i for i, token in enumerate(closer) if token in self.stop_token_ids), -1)
            return ids[stop + 1 :]
        overlap = next((n for n in range(len(closer), 0, -1) if response_ids[-n:] == closer[:n]), 0)
        return ids[overlap:]

    def encode_behind(self, text: str) -> list[int]:
        """See `Renderer`."""
        if self._anchor is None:
            return self.tokenizer.encode(text)
        return self.tokenizer.encode(self._anchor + text)[1:]

    def _situations(self, response_ids: list[int], messages: Sequence[Message], tools: Tools) -> Iterator[str]:
        """The probed situations that a continuation is in, but for those of reasoning.

        The ids before it do not tell whether a system text or results of tools are among them: if the template moves
        those, every conversation is taken for one that has them.
        """
        roles = [message.get("role") for message in messages]
        answer = self._visible(response_ids)
        if "user" in roles:
            yield "user"
            if tools:
                yield "tools"
                if self._outcomes["after_tool"] == "moved":
                    yield "after_tool"
        if "tool" in roles:
            yield "tool" if roles.count("tool") == 1 else "parallel_tools"
        elif not answer.strip():
            yield "empty"
        if "system" in roles or self._outcomes["system"] == "moved":
            yield "system"
        shown = [message.get("role") for message in messages if isinstance(message.get("content"), list)]
        if shown:
            yield "tool_image" if "tool" in shown else "image"
        if not (answer + "".join(str(message.get("content")) for message in messages)).isascii():
            yield "unicode"

    def _holds_reasoning(self, ids: list[int]) -> bool:
        marks = [self.tokenizer.token_id(mark) for mark in ("<think>", "</think>")]
        if None not in marks:
            return any(mark in ids for mark in marks)
        return "<think>" in (text := self.tokenizer.decode(ids)) or "</think>" in text

    def _visible(self, response_ids: list[int]) -> str:
        """The text of an answer without special tokens, but with those that parsing needs."""
        unseen = self.markup.unseen
        return self.tokenizer.decode([token for token in response_ids if token not in unseen])

    def _markup(self) -> Markup:
        calls = (self._form.opening, self._form.closing) if self._form.opening else None
        tokens = tokens_of((*_THINK, *filter(None, calls or ())), self.tokenizer)
        inner = tokens_of(self._form.inner, self.tokenizer)
        return Markup(
            reasoning=_THINK if self._thinks else None,
            calls=calls,
            tokens=tokens if self._thinks else {token: mark for token, mark in tokens.items() if mark not in _THINK},
            unseen=(self.tokenizer.special_ids | set(self.stop_token_ids)) - tokens.keys() - inner.keys(),
            bare_calls=calls is None,
            keeps_space=True,
        )

    def _split_reasoning(self, prompt_ids: list[int], text: str) -> tuple[str | None, str]:
        """Reasoning and the rest; of an answer that was cut while it reasoned, all is reasoning."""
        if not self._thinks:
            return None, text
        before, _, rest = text.partition("</think>")
        opened = text.lstrip().startswith("<think>") or self.tokenizer.decode(prompt_ids[-16:]).rstrip().endswith(
            "<think>"
        )
        if not opened:
            return None, text
        return before.strip().removeprefix("<think>").strip() or None, rest.strip()

    def _probed(self) -> "dict[str, list[_Probe]]":
        return _probes() if self.vision is None else _probes() | _image_probes()

    def _outcome(self, probe: "_Probe") -> Outcome:
        """Whether the longer conversation is the shorter one's prompt, the answer, and what we would add."""
        try:
            prompt = self._template.text(probe.history, probe.tools)
            longer = self._template.text([*probe.history, probe.answer, *probe.then], probe.tools)
        except TEMPLATE_FAILURES:
            return "refused"
        added = self._addition(probe.then, probe.tools)
        bare = OPENING.sub("", prompt)
        # Kept reasoning may differ from the template's history, but only inside the answer's own turn.
        start = len(bare if self._keep else prompt)
        if added is None or not longer.startswith(prompt[:start]) or not longer[start:].endswith(added):
            return "moved"
        own = longer[start : len(longer) - len(added)]
        return (
            "proven" if self._is_the_answer(own, probe, opening="" if self._keep else prompt[len(bare) :]) else "moved"
        )

    def _is_the_answer(self, own: str, probe: "_Probe", opening: str) -> bool:
        """Whether `own`, the template's text of the probed answer, is that answer and nothing more."""
        content: str = probe.answer["content"]
        if probe.answer.get("tool_calls"):
            return self._keep or content.strip() in opening + own
        if self._keep:
            own, content = _THOUGHT.sub("", own), _THOUGHT.sub("", content)
        return "".join((opening + own).split()) == "".join(content.split())

    def _probed_calls(self) -> tuple[CallForm, str | None]:
        """How the model writes tool calls, and what keeps tools from being used under this template, if anything does.

        What a template refuses is no problem here: it says so itself.
        """
        prompt = text = ""
        with contextlib.suppress(*TEMPLATE_FAILURES):
            prompt = self._template.text([_QUESTION], [_PROBED_TOOL])
            text = self._template.text([_QUESTION, _PROBED_CALL], [_PROBED_TOOL], generation=False)
        bare = OPENING.sub("", prompt)
        own = text[len(bare) :] if text.startswith(bare) else text.rpartition(_QUESTION["content"])[2]
        if self._closer_is_special():
            own = own.partition(self._closer)[0]
        form = form_of(_THOUGHT.sub("", own), _PLACEHOLDER, _PROBED_ARGUMENTS, [_PROBED_TOOL])
        problem = None
        if prompt and _PLACEHOLDER not in prompt:
            problem = "does not write tools: it never sees those that agents send"
        elif form is None and text.count(_PLACEHOLDER) > prompt.count(_PLACEHOLDER):
            problem = (
                "writes tool calls in a form that is not read here: agents get them as text. Name its family's "
                "renderer, if there is one: actor_rollout_ref.rollout.renderer=glm-4.5, ..."
            )
        return form or form_by_tokens(self._is_token, bare), problem

    def _is_token(self, mark: str) -> bool:
        return self.tokenizer.token_id(mark) is not None

    def _warn(self, model: str) -> None:
        moved = [name for name, outcome in self._outcomes.items() if outcome == "moved"]
        refused = [name for name, outcome in self._outcomes.items() if outcome == "refused"]
        warnings = []
        if moved:
            warnings.append(f"is not append-only for {', '.join(moved)}: there each turn is rendered anew, as a fork")
        if refused:
            warnings.append(f"refuses {', '.join(refused)}: such requests are answered 400")
        if warnings:
            _log.warning("the chat template of model %s %s", model, "; it ".join(warnings))


class _Probe(NamedTuple):
    """A conversation, its next answer, and the messages that follow it."""

    history: list[Message]
    answer: Message
    then: list[Message]
    tools: Tools = None


def read_template(folder: Path, config: Mapping[str, Any]) -> dict[str, str] | None:
    """The template texts of a folder by name; chat_template.jinja comes before tokenizer_config.json's, as usual.

    Raises ValueError naming the folder for a `chat_template` that is neither a text nor a list of named ones.
    """
    file = folder / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.exists() else config.get("chat_template")
    if template is None:
        return None
    if isinstance(template, str):
        return {"default": template}
    try:
        texts = {str(named["name"]): str(named["template"]) for named in template}
    except (TypeError, KeyError) as error:
        raise _unusable(folder, "chat_template is neither a text nor a list of names with templates") from error
    if "default" not in texts:
        raise _unusable(folder, f"of the templates {sorted(texts)} none is named 'default'")
    return texts


def usable_template(
    folder: Path, texts: Mapping[str, str], tokenizer: FastTokenizer, kwargs: Mapping[str, Any]
) -> ChatTemplate:
    """The template of a folder. Raises ValueError naming it for one that cannot be used, or not with the kwargs."""
    try:
        template = ChatTemplate(texts, _special_tokens(folder, tokenizer.config), tokenizer, kwargs)
        template.text([_QUESTION], None)
    except TEMPLATE_FAILURES as error:
        raise _unusable(folder, _why(error)) from error
    return template


def _unusable(folder: Path, why: str) -> ValueError:
    return ValueError(f"the chat template of {folder} cannot be used: {why}")


def _why(error: Exception) -> str:
    """The error in one line."""
    line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return f"{type(error).__name__}{line}: {' '.join(str(error).split())}"


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens that a template may write."""
    settings = {**_json(folder / "special_tokens_map.json"), **config}
    tokens = {name: settings.get(name) for name in _NAMED_TOKENS}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _stop_token_ids(folder: Path, tokenizer: FastTokenizer, closer: str) -> list[int]:
    """What ends an answer: the end tokens of tokenizer and model, and the closer if it is one special token."""
    stop_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        ids = _json(folder / name).get("eos_token_id")
        stop_ids += [ids] if isinstance(ids, int) else ids or []
    closer_id = tokenizer.token_id(closer.strip())
    if closer_id in tokenizer.special_ids and closer_id is not None:
        stop_ids.append(closer_id)
    return list(dict.fromkeys(stop_ids))


def _json(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return content if isinstance(content, dict) else {}


def _anchor(tokenizer: FastTokenizer) -> str | None:
    """A token to encode behind, where a tokenizer writes a space before the first word of every text; else None."""
    for token in sorted(tokenizer.special_ids):
        text = tokenizer.decode([token])
        ids = tokenizer.encode(text + "a")
        if ids[:1] == [token]:
            return text if ids[1:] != tokenizer.encode("a") else None
    return None


def _placeholder_calls(messages: Sequence[Message], tools: Tools) -> list[dict[str, Any]]:
    """Calls that the leading tool messages answer."""
    named = (tools[0].get("function") or {}).get("name") if tools else None
    calls: list[dict[str, Any]] = []
    for message in messages:
        if message.get("role") != "tool":
            break
        call_id = str(message.get("tool_call_id") or f"call_{len(calls)}")
        calls.append(tool_call(call_id, named or "tool", {"value": _PLACEHOLDER}))
    return calls


def _shortened(call_id: str) -> str:
    """An id of nine letters that is the same for the same id."""
    return call_id if _SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _worst(outcomes: Sequence[Outcome]) -> Outcome:
    order: tuple[Outcome, ...] = ("moved", "refused", "proven")
    return min(outcomes, key=order.index)


def _message(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def _probes() -> dict[str, list[_Probe]]:
    """Conversations by the situation that they are in; what is asked, answered and called differs between them."""
    ask, ask_more = _message("user", "How many are there?"), _message("user", " And of the other kind? ")
    tell, tell_more = _message("assistant", "There are 12."), _message("assistant", "None.")
    think = "<think>\nFirst I count them.\n</think>\n\n"
    tools = [_tool("look_up", "Looks a thing up."), _tool("count", "Counts things: <all> & 'sundry'.")]
    # Not the first of the tools: the placeholder names that one, and what is added must not hang on it.
    calls = [tool_call(f"call0000{i}", "count", {"what": animal}) for i, animal in enumerate(("cats", "dogs"))]
    call, two_calls = _message("assistant", "", tool_calls=calls[:1]), _message("assistant", "", tool_calls=calls)
    results = [_message("tool", text, tool_call_id=c["id"], name="count") for text, c in zip("34", calls, strict=True)]
    result, more_call, more_result = results[:1], _message("assistant", "", tool_calls=calls[1:]), results[1:]
    thinking = _message("assistant", think + "There are 12.")
    thinking_call = _message("assistant", think, tool_calls=calls[:1])
    foreign = [
        _message("user", "Wie viele Bäume? 木が何本?"),
        _message("assistant", "Zwölf 🌲."),
        _message("user", "Größe → ?"),
    ]
    system = _message("system", "Be brief.")
    return {
        "user": [_Probe([ask], tell, [ask_more]), _Probe([ask, tell, ask_more], tell_more, [ask])],
        "system": [_Probe([system, ask], tell, [ask_more]), _Probe([system, ask, tell, ask], tell_more, [ask])],
        "tools": [_Probe([ask], tell, [ask_more], tools)],
        "tool": [
            _Probe([ask], call, result, tools),
            _Probe([ask, tell, ask_more], call, result, tools),
            _Probe([ask, call, *result], more_call, more_result, tools),
        ],
        "after_tool": [_Probe([ask, call, *result], tell, [ask_more], tools)],
        "parallel_tools": [_Probe([ask], two_calls, results, tools)],
        "thinking": [_Probe([ask], thinking, [ask_more]), _Probe([ask, tell, ask], thinking, [ask_more])],
        "thinking_tool": [_Probe([ask], thinking_call, result, tools)],
        "empty": [_Probe([ask], _message("assistant", ""), [ask_more])],
        "unicode": [_Probe(foreign[:1], foreign[1], foreign[2:])],
    }


def _image_probes() -> dict[str, list[_Probe]]:
    """Conversations with images, which some templates number."""
    image = {"type": "image_url", "image_url": {"url": ""}}
    ask: Message = {"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]}
    more: Message = {"role": "user", "content": [{"type": "text", "text": "And this, "}, image, image]}
    tools = [_tool("look", "Looks at a thing.")]
    call = _message("assistant", "", tool_calls=[tool_call(PROBED_ID, "look", {"what": "cats"})])
    result: Message = {"role": "tool", "tool_call_id": PROBED_ID, "content": [image]}
    tell = _message("assistant", "A cat.")
    return {
        "image": [_Probe([ask], tell, [more]), _Probe([_QUESTION], tell, [more])],
        "tool_image": [_Probe([ask], call, [result], tools), _Probe([_QUESTION], call, [result], tools)],
    }


def _tool(name: str, description: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _as_transformers_passes_it(message: Message) -> Message:
    """Without empty fields, which templates would print as `None`, with reasoning under the names in use, and images
    as parts without their bytes."""
    fields = {name: value for name, value in message.items() if value is not None}
    if isinstance(fields.get("content"), list):
        fields["content"] = [{"type": "image"} if part["type"] == "image_url" else part for part in fields["content"]]
    names = [name for name in ("reasoning_content", "thinking", "reasoning") if name in fields]
    if not names:
        return fields
    return {"thinking": fields[names[0]], **fields, "reasoning_content": fields[names[0]]}


class _Generation(Extension):
    """The tag `{% generation %}`, which marks an assistant's own text: here it only lets its body through."""

    tags = {"generation"}  # noqa: RUF012  jinja's own declaration

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_through"), [], [], body).set_lineno(line)

    def _through(self, caller: Macro) -> str:
        return caller()


class _TemplateDict:
    """`dict` for templates, as a function only."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """`namespace` for templates, closed to names that begin with an underscore: those lead out of the sandbox."""

    def __init__(*args: Any, **values: Any) -> None:  # `self` may be one of the names
        self, attributes = args[0], dict(*args[1:], **values)
        for name in attributes:
            _refuse_underscore(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template may not set {name!r} on a namespace")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_TemplateDict(), namespace=_TemplateNamespace
    )
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As plain JSON: jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
