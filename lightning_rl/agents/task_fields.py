"""What a loop reads of a task, which verl's Parquet rows and plain texts both are. Pure, but for images in files."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lightning_rl.data.images import url_of
from lightning_rl.errors import Explained

AGENT_NAME = "agent_name"
_IMAGE = "<image>"  # verl's mark of a place in a text


class LoopTaskError(Explained, ValueError):
    """A task that no loop can begin with, or that names a loop that there is not."""


class ToolsOfTask(NamedTuple):
    """Which tools a task selects (None: all), and what each is created with."""

    selection: list[str] | None
    create_kwargs: dict[str, dict[str, Any]]


def messages_of(task: Any) -> list[dict[str, Any]]:
    """The conversation that a task begins with: a text is a user's; else its `prompt` or `messages`, each a text or a
    list of messages. Raises LoopTaskError for any other."""
    prompt = task
    if isinstance(task, Mapping):
        prompt = task.get("prompt") or task.get("messages")
    if isinstance(prompt, str) and prompt:
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, Sequence) and prompt and all(isinstance(each, Mapping) and "role" in each for each in prompt):
        return [dict(each) for each in prompt]
    description = f"has the keys {sorted(map(str, task))}" if isinstance(task, Mapping) else f"is {task!r:.60}"
    raise LoopTaskError(
        f"a loop begins with a text, or with a task's `prompt` (or `messages`): a text or a list of messages; this "
        f"task {description}"
    )


def shown_messages_of(task: Any) -> list[dict[str, Any]]:
    """The same, showing the task's `images` where the text says `<image>`, as in verl's files. Raises LoopTaskError
    where these are not as many, or an image cannot be read."""
    messages, fields = messages_of(task), task if isinstance(task, Mapping) else {}
    texts = [message["content"] for message in messages if isinstance(message.get("content"), str)]
    for kind in ("video", "audio"):
        if fields.get(f"{kind}s") and any(f"<{kind}>" in text for text in texts):
            raise LoopTaskError(f"the task's prompt says `<{kind}>`, and models are shown images alone here")
    images = fields.get("images")
    in_parts = any(isinstance(message.get("content"), list) for message in messages)  # which show them themselves
    if not isinstance(images, list | tuple) or not images or (in_parts and not any(_IMAGE in text for text in texts)):
        return messages
    if (places := sum(text.count(_IMAGE) for text in texts)) != len(images):
        raise LoopTaskError(
            f"the task has {len(images)} `images`, and its prompt says `{_IMAGE}` {places} times; name the column "
            "otherwise where the prompt is not to show them"
        )
    urls = iter([_url(image, place) for place, image in enumerate(images)])
    return [_showing(message, urls) for message in messages]


def _showing(message: dict[str, Any], urls: Iterator[str]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str) or _IMAGE not in content:
        return message
    return message | {"content": _parts(content, urls)}


def _parts(content: str, urls: Iterator[str]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for place, text in enumerate(content.split(_IMAGE)):
        parts += [{"type": "image_url", "image_url": {"url": next(urls)}}] if place else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def _url(image: Any, place: int) -> str:
    try:
        return url_of(image)
    except (OSError, ValueError) as error:
        raise LoopTaskError(f"image {place} of the task's `images` cannot be shown: {error}") from error


def name_of(task: Any, default: str) -> str:
    """The loop that a task asks for by `agent_name`, else `default`."""
    name = task.get(AGENT_NAME) if isinstance(task, Mapping) else None
    return default if name is None else str(name)


def check_names(tasks: Sequence[Any], loop_names: Sequence[str], default: str) -> None:
    """Raises LoopTaskError for the first task that asks for a loop that there is not."""
    for index, task in enumerate(tasks):
        if (name := name_of(task, default)) not in loop_names:
            raise unknown(f"task {index}", name, loop_names)


def unknown(where: str, name: str, loop_names: Sequence[str]) -> LoopTaskError:
    """The error for a name that is none of `loop_names`."""
    return LoopTaskError(f"{where} has agent_name {name!r}, and there is no such loop; there are {sorted(loop_names)}")


def tools_of(task: Any) -> ToolsOfTask:
    """The tools of a task, under verl's names: `extra_info.tool_selection`, and
    `extra_info.tools_kwargs.NAME.create_kwargs`."""
    extra = task.get("extra_info") if isinstance(task, Mapping) else None
    if not isinstance(extra, Mapping):
        return ToolsOfTask(None, {})
    kwargs = extra.get("tools_kwargs") or {}
    create_kwargs = {name: dict((of_tool or {}).get("create_kwargs") or {}) for name, of_tool in kwargs.items()}
    selection = extra.get("tool_selection")
    return ToolsOfTask(None if selection is None else list(selection), create_kwargs)
