"""Places in commands: what fills them, and what stays."""

import pytest

from lightning_rl.agents.resources import LLM
from lightning_rl.command_agent.template import CommandError, Values, filled

LLM_OF_TEST = LLM("m", "http://h/rollout/r/attempt/a/v1", "key", "http://h/rollout/r/attempt/a")


@pytest.mark.parametrize(
    ("text", "task", "expected"),
    [
        ("{prompt}", "a task", "a task"),
        ("{prompt}", {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}, "u"),
        ("{prompt}", {"messages": [{"role": "user", "content": [{"type": "text", "text": "u"}]}]}, "u"),
        ("{a.b}/{n}/{l}", {"a": {"b": "x"}, "n": 3, "l": [1]}, "x/3/[1]"),
        ("openai/{llm.model} {llm.base_url}", {}, "openai/m http://h/rollout/r/attempt/a/v1"),
        ("{llm.endpoint}", {}, "http://h/key/key/v1"),
        ('{{print}} ${x} $x {"a": 1} {} { }', {}, '{print} ${x} $x {"a": 1} {} { }'),
        ("{a}", {"a": "{b}", "b": "no"}, "{b}"),
        ("{user-id} {a.x-1}", {"user-id": "u", "a": {"x-1": 2}}, "u 2"),
    ],
)
def test_places_are_filled(text: str, task: object, expected: str) -> None:
    assert filled(text, Values(task, LLM_OF_TEST)) == expected


@pytest.mark.parametrize("task", [{"a": 1}, "text", 7])
def test_a_name_that_there_is_not_is_an_error(task: object) -> None:
    for text in ("{b}", "{a.c}", "{llm.key}"):
        with pytest.raises(CommandError, match="is no field of the task"):
            filled(text, Values(task, LLM_OF_TEST))


def test_files_are_texts_by_name() -> None:
    def of(files: object) -> dict[str, str]:
        return Values({"files": files}, LLM_OF_TEST).files()

    assert of({"a.py": "1", "b.py": None}) == {"a.py": "1"}, "as a table of tasks has them"
    assert of(None) == of({}) == Values("text", LLM_OF_TEST).files() == {}
    for wrong in ([["a.py", "1"]], {"a.py": 1}, "a.py"):
        with pytest.raises(CommandError, match="the task's `files` are texts by name"):
            of(wrong)
