"""Messages <-> token ids.

A continuation is append-only or it is refused: `extend` adds ids behind exactly the ids already sampled, or gives None,
and then the caller renders anew and records a fork. No text of a sampled answer is ever tokenised again on the way.
"""

import difflib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec
import renderers
from renderers.base import MODEL_RENDERER_MAP, ToolCallParseStatus
from renderers.configs import config_from_name
from tokenizers import Tokenizer

from lightning_rl_proxy.errors import GatewayError

if TYPE_CHECKING:
    from lightning_rl_proxy.templates import TemplateRenderer


class TokenLogprob(NamedTuple):
    """One sampled token's text and natural-log probability."""

    text: str
    logprob: float


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, parsed: text, reasoning, tool calls in OpenAI's form, and the tokens that it came from.

    `finish_reason` is `stop`, `length`, or what a service said; `stop_match` is the stop string that ended it, which
    `content` does not hold. `output_tokens` counts what was sampled, also where a service told no ids.
    """

    content: str
    reasoning: str | None
    tool_calls: list[dict[str, Any]]
    finish_reason: str
    token_ids: list[int]
    logprobs: list[float] | None
    decode: Callable[[list[int]], str]
    output_tokens: int
    stop_match: str | None = None

    def message(self) -> dict[str, Any]:
        """The answer as the assistant message that a client would send back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message

    def token_logprobs(self) -> list[TokenLogprob] | None:
        """Text and logprob of each token, or None where there are no logprobs."""
        if self.logprobs is None:
            return None
        texts = (self.decode([token]) for token in self.token_ids)
        return [TokenLogprob(text, logprob) for text, logprob in zip(texts, self.logprobs, strict=True)]


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What some sampled tokens add to an answer: text, reasoning, or one whole tool call (`text` is empty then).

    `tool_index` is the call's place among the answer's tool calls. `logprobs` are those of the tokens since the delta
    before, where they are asked for.
    """

    kind: Literal["content", "reasoning", "tool_call"]
    text: str = ""
    tool_call: dict[str, Any] | None = None
    tool_index: int = 0
    logprobs: list[TokenLogprob] | None = None


class Renderer(Protocol):
    """What the gateway needs of a chat format."""

    stop_token_ids: list[int]

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        """The whole prompt, ending where the assistant begins to speak."""
        ...

    def extend(
        self,
        prompt_ids: list[int],
        response_ids: list[int],
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
    ) -> list[int] | None:
        """The ids that `messages` add behind prompt + response, or None where that cannot be done append-only."""
        ...

    def parse(
        self,
        call_id: str,
        prompt_ids: list[int],
        response_ids: list[int],
        logprobs: list[float] | None,
        finish_reason: str,
        tools: Sequence[dict[str, Any]] | None,
    ) -> Answer:
        """The answer that the sampled ids mean."""
        ...


class FastTokenizer:
    """A `tokenizer.json` with the few methods that `renderers` asks of a tokenizer; loads no transformers."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        config_file = path / "tokenizer_config.json"
        self.config: dict[str, Any] = json.loads(config_file.read_text()) if config_file.exists() else {}
        self.name_or_path = str(path)
        self.renderer: str | None = self.config.get("renderer")
        self.unk_token_id = self._special(self.config.get("unk_token"))
        self.eos_token_id = self._special(self.config.get("eos_token"))
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        """Token ids of `text`, without added special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
        """The text of `token_ids`, special tokens included unless `skip_special_tokens`."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        text: str = self._tokenizer.decode(ids, skip_special_tokens=kwargs.get("skip_special_tokens", False))
        return text

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token, or the ids of a list of them; `unk_token_id` for what the vocabulary lacks."""
        if isinstance(tokens, str):
            found = self._tokenizer.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def token_id(self, token: str) -> int | None:
        """The id of a token, or None for what the vocabulary lacks."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def _special(self, token: Any) -> int | None:
        text = token.get("content") if isinstance(token, dict) else token
        return None if text is None else self._tokenizer.token_to_id(text)


class LibraryRenderer:
    """A renderer of the `renderers` library, held to the append-only contract."""

    def __init__(self, renderer: Any, decode: Callable[[list[int]], str]) -> None:
        self._renderer = renderer
        self._decode = decode
        self.stop_token_ids: list[int] = list(renderer.get_stop_token_ids())

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        """See `Renderer`."""
        try:
            ids: list[int] = self._renderer.render_ids(
                arguments_parsed(messages), tools=tools, add_generation_prompt=True
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise GatewayError(
                400, f"the chat format cannot render these messages: {error!r}", param="messages"
            ) from error
        return ids

    def extend(
        self,
        prompt_ids: list[int],
        response_ids: list[int],
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
    ) -> list[int] | None:
        """See `Renderer`."""
        bridged = self._renderer.bridge_to_next_turn(prompt_ids, response_ids, list(messages), tools=tools)
        if bridged is None:
            return None
        ids: list[int] = bridged.token_ids
        context = prompt_ids + response_ids
        return ids[len(context) :] if ids[: len(context)] == context else None

    def parse(
        self,
        call_id: str,
        prompt_ids: list[int],
        response_ids: list[int],
        logprobs: list[float] | None,
        finish_reason: str,
        tools: Sequence[dict[str, Any]] | None,
    ) -> Answer:
        """See `Renderer`. A malformed tool call stays visible as text."""
        parsed = self._renderer.parse_response(response_ids, tools=tools, prompt_ids=prompt_ids)
        calls, content = [], parsed.content
        for index, call in enumerate(parsed.tool_calls):
            if call.status == ToolCallParseStatus.OK:
                calls.append(tool_call(f"call_{call_id}_{index}", call.name, call.arguments))
            else:
                content += f"<tool_call>{call.raw}</tool_call>"
        return Answer(
            content=content,
            reasoning=parsed.reasoning_content,
            tool_calls=calls,
            finish_reason=finish_reason,
            token_ids=response_ids,
            logprobs=logprobs,
            decode=self._decode,
            output_tokens=len(response_ids),
        )


def load_renderer(
    tokenizer_path: Path, name: str, model: str, *, history: Literal["keep", "template"] = "keep"
) -> "LibraryRenderer | TemplateRenderer":
    """The renderer `name` over `tokenizer_path`/tokenizer.json.

    `auto`: the one made for `model`, else the one that tokenizer_config.json names as `renderer`, else `template`: the
    folder's own chat template. `history`: the reasoning of earlier turns is kept, or dropped where the format does.

    Raises ValueError naming the renderers that there are, or what is wrong with the template, and FileNotFoundError for
    a folder without tokenizer.json.
    """
    if not (tokenizer_path / "tokenizer.json").exists():
        raise FileNotFoundError(f"{tokenizer_path} holds no tokenizer.json")
    tokenizer = FastTokenizer(tokenizer_path)
    resolved = (MODEL_RENDERER_MAP.get(model) or tokenizer.renderer or "template") if name == "auto" else name
    if resolved == "template":
        return _template_renderer(tokenizer_path, tokenizer, model, history)
    try:
        config = config_from_name(resolved)
    except ValueError as error:
        near = difflib.get_close_matches(resolved, {*MODEL_RENDERER_MAP.values(), "template"}, n=1, cutoff=0.0)[0]
        raise ValueError(f"renderer {resolved!r} is unknown; did you mean {near!r}? {error}") from error
    if history == "keep" and hasattr(config, "thinking_retention"):
        # Only with all thinking kept is a new user turn a pure continuation.
        config = config.model_copy(update={"thinking_retention": "all"})
    return LibraryRenderer(renderers.create_renderer(tokenizer, config), tokenizer.decode)


def _template_renderer(
    folder: Path, tokenizer: FastTokenizer, model: str, history: Literal["keep", "template"]
) -> "TemplateRenderer":
    from lightning_rl_proxy import templates  # which builds on this module

    texts = templates.read_template(folder, tokenizer.config)
    if texts is None:
        raise ValueError(
            f"no renderer is known for model {model!r}; name one that fits its chat format, with "
            "actor_rollout_ref.rollout.renderer or `serve --renderer` (qwen3, llama-3, ...): "
            f"{folder} has no chat template"
        )
    return templates.TemplateRenderer(folder, tokenizer, texts, model=model, history=history)


def tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call in OpenAI's form."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def arguments_parsed(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool-call arguments as objects, since templates print an object and a string differently."""
    return [m | {"tool_calls": [_parsed(c) for c in m["tool_calls"]]} if m.get("tool_calls") else m for m in messages]


def _parsed(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", {})
    try:
        return call | {"function": function | {"arguments": json.loads(function["arguments"])}}
    except (KeyError, TypeError, json.JSONDecodeError):
        return call
