"""The renderer of a model: the library's one for its family, else one over its own chat template."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import renderers
from renderers.base import MODEL_RENDERER_MAP
from renderers.configs import config_from_name

from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.rendering.base import check_kwargs
from lightning_rl_proxy.rendering.chat_templates import (
    PROMPTS,
    TEMPLATE_FAILURES,
    ChatTemplate,
    TemplateRenderer,
    read_template,
    usable_template,
)
from lightning_rl_proxy.rendering.images import Vision, vision_of
from lightning_rl_proxy.rendering.renderers import LibraryRenderer
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer, SpecialTokens

# What a renderer reads of a model's folder: with these alone it writes what it writes with the whole folder.
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "config.json", "generation_config.json",  # where the model ends an answer, and whether it sees
    "preprocessor_config.json", "processor_config.json",
)  # fmt: skip


def load_renderer(
    tokenizer_path: Path,
    name: str,
    model: str,
    *,
    history: Literal["keep", "template"] = "keep",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    special_tokens_in_text: SpecialTokens = "text",
) -> LibraryRenderer | TemplateRenderer:
    """The renderer `name` over `tokenizer_path`/tokenizer.json.

    `auto`: the one made for `model`, else the one that tokenizer_config.json names as `renderer`, else the one of a
    model with the same name behind its owner's (`Qwen3-4B`) whose chats the folder's template writes, too, else
    `template`: the folder's own chat template. Only that one shows images, so a model that sees has it in any case.
    `history`: the reasoning of earlier turns is kept, or dropped where the format does.
    `chat_template_kwargs`: what the format is told besides the messages, `{"enable_thinking": False}`; every prompt is
    rendered with them, and continuations are proven with them. `special_tokens_in_text`: what a special token is where
    a message spells it, its letters or the token itself.

    Raises ValueError naming the renderers that there are, the kwargs that the format takes, or what is wrong with the
    template, and FileNotFoundError for a folder without tokenizer.json.
    """
    if not (tokenizer_path / "tokenizer.json").exists():
        raise FileNotFoundError(f"{tokenizer_path} holds no tokenizer.json")
    tokenizer = FastTokenizer(tokenizer_path, special_tokens_in_text)
    vision = vision_of(tokenizer_path)
    kwargs = dict(chat_template_kwargs or {})
    resolved = name
    if name == "auto" and vision is None:
        named = MODEL_RENDERER_MAP.get(model) or tokenizer.renderer
        resolved = named or _renderer_of_namesake(tokenizer_path, tokenizer, model, kwargs) or "template"
    elif name == "auto":
        resolved = "template"
    if resolved == "template":
        return _template_renderer(tokenizer_path, tokenizer, model, history, kwargs, vision)
    try:
        config = config_from_name(resolved)
    except ValueError as error:
        near = difflib.get_close_matches(resolved, {*MODEL_RENDERER_MAP.values(), "template"}, n=1, cutoff=0.0)[0]
        raise ValueError(f"renderer {resolved!r} is unknown; did you mean {near!r}? {error}") from error
    check_kwargs(kwargs, config.template_field_names(), f"renderer {resolved!r}")
    # Only with all thinking kept is a new user turn a pure continuation.
    retention = {"thinking_retention": "all"} if history == "keep" else {}
    try:
        config = type(config).model_validate(kwargs | retention)
    except ValueError as error:
        problem = " ".join(str(error).split())
        raise ValueError(
            f"chat_template_kwargs={kwargs}, history={history!r}: renderer {resolved!r}: {problem}"
        ) from error
    try:
        return LibraryRenderer(renderers.create_renderer(tokenizer, config), tokenizer)
    except AssertionError as error:  # of a special token that the vocabulary lacks
        raise ValueError(f"renderer {resolved!r} does not fit the tokenizer of {tokenizer_path}: {error}") from error


def _renderer_of_namesake(folder: Path, tokenizer: FastTokenizer, model: str, kwargs: dict[str, Any]) -> str | None:
    """The library's renderer of a model with this name, of whatever owner, if it takes the kwargs, and the folder's
    template writes the same with them."""
    own_name = model.rpartition("/")[2]
    names = dict.fromkeys(name for other, name in MODEL_RENDERER_MAP.items() if other.rpartition("/")[2] == own_name)
    texts = read_template(folder, tokenizer.config) if names else None
    if texts is None:
        return None
    template = usable_template(folder, texts, tokenizer, kwargs)
    return next((name for name in names if _writes_the_same(name, template, tokenizer, kwargs)), None)


def _writes_the_same(name: str, template: ChatTemplate, tokenizer: FastTokenizer, kwargs: dict[str, Any]) -> bool:
    """Whether renderer and template write the same prompts: with and without a system text, with tools and calls."""
    config = config_from_name(name)
    if not kwargs.keys() <= set(config.template_field_names()):
        return False
    try:
        config = type(config).model_validate(kwargs)
        renderer = LibraryRenderer(renderers.create_renderer(tokenizer, config), tokenizer)
        return all(
            renderer.render(messages, tools) == tokenizer.encode(template.text(messages, tools))
            for messages, tools in PROMPTS
        )
    except (*TEMPLATE_FAILURES, AssertionError, GatewayError):  # without the format's special tokens, for one
        return False


def _template_renderer(
    folder: Path,
    tokenizer: FastTokenizer,
    model: str,
    history: Literal["keep", "template"],
    chat_template_kwargs: Mapping[str, Any],
    vision: Vision | None,
) -> TemplateRenderer:
    texts = read_template(folder, tokenizer.config)
    if texts is None:
        raise ValueError(
            f"no renderer is known for model {model!r}; name one that fits its chat format, with "
            "actor_rollout_ref.rollout.renderer or `serve --renderer` (qwen3, llama-3, ...): "
            f"{folder} has no chat template"
        )
    return TemplateRenderer(
        folder,
        tokenizer,
        texts,
        model=model,
        history=history,
        chat_template_kwargs=chat_template_kwargs,
        vision=vision,
    )
