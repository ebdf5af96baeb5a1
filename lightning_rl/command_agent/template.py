"""Commands with places that a task fills."""

import json
import re
import shlex
import shutil
from collections.abc import Mapping
from typing import Any

from lightning_rl.agents.resources import LLM
from lightning_rl.agents.task_fields import LoopTaskError, messages_of
from lightning_rl.errors import Explained

PLACE = re.compile(r"\{\{|\}\}|\$\{[^}]*\}|\{([A-Za-z_][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*)\}")
_OF_AN_LLM = ("model", "base_url", "anthropic_base_url", "endpoint", "api_key")
_PROMPT = "prompt"
_FILES = "files"


class CommandError(Explained, RuntimeError):
    """A command cannot be run as it is written, or came to nothing that is a reward."""


class Values:
    """What may stand in the places of a command: the task's fields, and `llm`'s."""

    def __init__(self, task: Any, llm: LLM) -> None:
        self._task = task
        self._llm = llm

    def __getitem__(self, name: str) -> str:
        """Raises CommandError for a name that there is not, and for a text that no program can be given."""
        text = self._text(name)
        if "\0" in text:
            raise CommandError(f"{{{name}}} of the task has the character NUL, which no program can be given")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise CommandError(f"{{{name}}} of the task is no text that UTF-8 has: {error}") from error
        return text

    def _text(self, name: str) -> str:
        first, _, rest = name.partition(".")
        if first == "llm" and rest in _OF_AN_LLM:
            return str(getattr(self._llm, rest))
        if name == _PROMPT:
            return self._prompt()
        value = self._task
        for part in name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise CommandError(
                    f"{{{name}}} is no field of the task, {self._description()}; a brace that is meant is doubled"
                )
            value = value[part]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def files(self) -> dict[str, str]:
        """The task's `files`, by name, where it has any; a name without a text, as tables have them, is none.

        Raises CommandError for anything else.
        """
        files = (self._task.get(_FILES) if isinstance(self._task, Mapping) else None) or {}
        texts = {name: text for name, text in files.items() if text is not None} if isinstance(files, Mapping) else None
        if texts is None or not all(isinstance(text, str) for text in texts.values()):
            raise CommandError(f"the task's `files` are texts by name, {{'main.py': '...'}}, and not {files!r:.80}")
        return texts

    def _prompt(self) -> str:
        try:
            last = messages_of(self._task)[-1]["content"]
        except LoopTaskError as error:
            raise CommandError(f"{{prompt}} is no field of the task, {self._description()}") from error
        return last if isinstance(last, str) else "".join(part.get("text") or "" for part in last or ())

    def _description(self) -> str:
        if isinstance(self._task, Mapping):
            return f"which has {sorted(map(str, self._task))}"
        return f"which is a {type(self._task).__name__}"


def filled(text: str, values: Values) -> str:
    """The text with its places filled. A shell's own `${NAME}` stays as it is."""

    def one(place: re.Match[str]) -> str:
        if place[1] is not None:
            return values[place[1]]
        return place[0] if place[0].startswith("$") else place[0][0]

    return PLACE.sub(one, text)


def is_the_same_for_all(text: str) -> bool:
    """Whether no place of the text is filled by a task."""
    return all(place[1] is None for place in PLACE.finditer(text))


def check(command: str, *, local: bool) -> list[str]:
    """The words of a command. Raises CommandError where it is none, or names a program that is not on this machine
    and is to run here."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise CommandError(f"command={command}: {error}") from error
    if not words:
        raise CommandError("command: it is empty; name a program with its arguments, such as 'claude -p {prompt}'")
    if local and not PLACE.search(words[0]) and "/" not in words[0] and shutil.which(words[0]) is None:
        raise CommandError(
            f"command={command}: there is no program {words[0]!r} on the PATH; install it, or say which sandbox has it"
        )
    return words
