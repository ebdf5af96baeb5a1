"""Scripts of a shell that a task fills: one word wherever it stands, and never code."""

import subprocess
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_rl.agents.resources import LLM
from lightning_rl.command_agent.agent import CommandAgent
from lightning_rl.command_agent.script import check_scripts, filled_script, filled_words
from lightning_rl.command_agent.template import CommandError, Values
from tests.random_examples import examples

LLM_OF_TEST = LLM("m", "http://h/rollout/r/attempt/a/v1", "key", "http://h/rollout/r/attempt/a")
SHAPES = [
    "printf %s {said}",
    'printf %s "{said}"',
    "printf %s '{said}'",
    'printf %s "$(printf %s {said})"',
    'printf %s "$(printf %s "{said}")"',
    'printf %s "`printf %s {said}`"',
    "(printf %s {said})",
    'case x in x) printf %s "{said}";; esac',
    "# it isn't \"this\nprintf %s '{said}'",
    "printf %s \"it's\" >/dev/null; printf %s {said}\\'\\\" | sed 's/..$//'",
]
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0\n\r"))


def printed(script: str, variables: dict[str, str]) -> str:
    done = subprocess.run(["sh", "-c", script], env={"PATH": "/usr/bin:/bin"} | variables, capture_output=True)
    assert done.stderr == b""
    return done.stdout.decode()


@pytest.mark.parametrize("script", SHAPES)
@settings(max_examples=examples(40))
@given(said=TEXTS)
@example(said="New York")
@example(said='it\'s $(touch gone) `x` "$HOME" \\ *')
def test_whatever_a_task_says_is_one_word_of_a_script(script: str, said: str) -> None:
    found = printed(*filled_script(script, Values({"said": said}, LLM_OF_TEST)))
    assert found == said


def test_a_shell_that_is_the_program_has_its_script_filled_so_and_its_words_as_they_are() -> None:
    values = Values({"prompt": "Don't `stop`"}, LLM_OF_TEST)
    words, variables = filled_words(["bash", "-lc", "echo {prompt} | tee log", "sh", "{prompt}"], values)
    assert words[3:] == ["sh", "Don't `stop`"]
    assert printed(words[2].replace("| tee log", ""), variables) == "Don't `stop`\n"
    assert filled_words(["claude", "-p", "{prompt}"], values) == (["claude", "-p", "Don't `stop`"], {})
    assert filled_words(["bash", "run.sh", "{prompt}"], values)[1] == {}


@pytest.mark.parametrize(
    "words",
    [["timeout", "60", "bash", "-c", "echo {prompt}"], ["docker", "exec", "x", "/bin/sh", "-ec", "a {a.b}"]],
)
def test_a_script_that_another_programs_shell_reads_takes_no_text_of_a_task(words: list[str]) -> None:
    with pytest.raises(CommandError, match="would read what a task says as code: give that as an argument"):
        check_scripts(words)
    check_scripts([*words[:-1], "echo $1", "sh", "{prompt}"])


def test_braces_and_the_shells_own_variables_stay() -> None:
    values = Values({"a": 1}, LLM_OF_TEST)
    assert filled_script("${HOME} {{a}}", values) == ("${HOME} {a}", {})


@pytest.mark.parametrize(("said", "message"), [("a\0b", "the character NUL"), ("\ud800", "is no text that UTF-8 has")])
def test_a_text_that_no_program_can_be_given_is_named(said: Any, message: str) -> None:
    with pytest.raises(CommandError, match=r"\{prompt\} of the task .*" + message):
        Values({"prompt": said}, LLM_OF_TEST)["prompt"]


def test_an_agent_refuses_such_a_command_when_it_is_made() -> None:
    with pytest.raises(CommandError, match="as code"):
        CommandAgent('timeout 9 sh -c "echo {prompt}"', reward="true")
