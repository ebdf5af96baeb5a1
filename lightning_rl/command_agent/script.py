"""Shell scripts with places that a task fills.

Invariant: what a task says is no part of a script. A place becomes a variable, quoted as it stands, so a text is one
word there, inside and outside of quotes, and never code.
"""

import re
from collections.abc import Sequence
from pathlib import PurePath

from lightning_rl.command_agent.template import PLACE, CommandError, Values, filled

_SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
_RUNS_A_SCRIPT = re.compile(r"-[A-Za-z]*c")
_VARIABLE = "LIGHTNING_RL_FIELD_"
_BEFORE_A_COMMENT = " \t\n;&|("


def filled_script(script: str, values: Values) -> tuple[str, dict[str, str]]:
    """The script with its places filled, and the variables that it needs. Raises CommandError for a name that there is
    not."""
    variables: dict[str, str] = {}
    quotes = _quotes(script)

    def one(place: re.Match[str]) -> str:
        if place[1] is None:
            return place[0] if place[0].startswith("$") else place[0][0]
        name = f"{_VARIABLE}{len(variables)}"
        variables[name] = values[place[1]]
        match quotes[place.start()]:
            case '"':
                return f"${{{name}}}"
            case "'":
                return f"'\"${{{name}}}\"'"
        return f'"${{{name}}}"'

    return PLACE.sub(one, script), variables


def filled_words(words: Sequence[str], values: Values) -> tuple[list[str], dict[str, str]]:
    """The words of a command with their places filled, and the variables that they need where a shell is the program
    and one of them its script."""
    script, variables = _script_of(words), dict[str, str]()
    new_words = [filled(word, values) if place != script else "" for place, word in enumerate(words)]
    if script is not None:
        new_words[script], variables = filled_script(words[script], values)
    return new_words, variables


def check_scripts(words: Sequence[str]) -> None:
    """Raises CommandError where a task's text would become part of a script that another program's shell reads."""
    for place, word in enumerate(words[1:], start=1):
        script = _script_of(words[place:]) if PurePath(word).name in _SHELLS else None
        if script is not None and any(match[1] for match in PLACE.finditer(words[place + script])):
            raise CommandError(
                f"command: {words[place + script]!r} is a script of {word}, which would read what a task says as code: "
                f"give that as an argument, {word} -c '... \"$1\" ...' sh {{prompt}}"
            )


def _script_of(words: Sequence[str]) -> int | None:
    """Which word is the script, where the program is a shell that is given one (`bash -c`)."""
    if PurePath(words[0]).name in _SHELLS:
        for place, word in enumerate(words[1:-1], start=1):
            if _RUNS_A_SCRIPT.fullmatch(word):
                return place + 1
    return None


def _quotes(script: str) -> list[str]:
    """The quotes that each character stands in: `"`, `'`, or others where it stands in none."""
    inside, quotes = [""], list[str]()
    while (at := len(quotes)) < len(script):
        char, state, step = script[at], inside[-1], 1
        if state == "'":
            if char == "'":
                inside.pop()
        elif char == "\\":
            step = 2
        elif char in (state, '"', "`") or (char == "'" and state != '"'):
            _enter_or_leave(inside, char)
        elif script.startswith("$(", at):
            inside.append(")")
            step = 2
        elif char == "(" and state != '"':
            inside.append(")")
        elif char == "#" and state != '"' and (at == 0 or script[at - 1] in _BEFORE_A_COMMENT):
            step = len(script[at:].partition("\n")[0])
        quotes += [state] * step
    return quotes


def _enter_or_leave(inside: list[str], char: str) -> None:
    if inside[-1] == char:
        inside.pop()
    else:
        inside.append(char)
