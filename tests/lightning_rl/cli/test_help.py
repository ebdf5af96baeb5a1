"""What `--help` shows of every command: each example on a line of its own, as it is typed."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from lightning_rl.cli import app


def commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        yield from commands(command, (*words, name)) if inner else [((*words, name), command)]


EXAMPLE = re.compile(r"\s*([A-Z_]+=\S+ )?lightning-rl ")
COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_examples_stand_on_lines_of_their_own(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = CliRunner().invoke(app, [*words, "--help"]).stdout
    lines = [line.strip() for line in shown.splitlines()]
    help_text = inspect.cleandoc(COMMANDS[words].help or "").splitlines()
    examples = [line.strip() for line in help_text if EXAMPLE.match(line)]
    assert all(example in lines for example in examples), shown
