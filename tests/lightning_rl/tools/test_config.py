"""Tools that the configuration names: YAML in both shapes, Python files, both together, and what is wrong with them."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_rl.config import ConfigError, compose
from lightning_rl.tools import ResultLimits, ToolCall, TrajectoryTools
from lightning_rl.tools.config import limits_of, load_tools
from tests.lightning_rl.config.test_effects import CHECKPOINT

CLASSES = """
from lightning_rl.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse

class Greet(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=self.config["greeting"] + " " + parameters["who"]), 0.25, {}

class Own(Greet):
    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {"name": "own"}})

class Other: ...
"""
FUNCTIONS = """
from lightning_rl.tools import function_tool
from langchain_core.tools import tool

@function_tool
def greet(who: str) -> str:
    '''Greet.

    Args:
        who: whom
    '''
    return "hi " + who

@function_tool("bye")
def part(who: str) -> str:
    '''Part.

    Args:
        who: whom
    '''
    return "bye " + who

@tool
def chained(who: str) -> str:
    '''Come from LangChain.'''
    return who

alias = part

def no_tool(): ...
"""
SCHEMA = {
    "name": "greet",
    "description": "Greet.",
    "parameters": {
        "type": "object",
        "properties": {"who": {"type": "array", "items": {"type": "string"}, "description": "whom"}},
        "required": ["who"],
    },
}
UNDER_FUNCTION = """
  tool_schema:
    type: function
    function: {name: greet, description: Greet., parameters: {type: object, properties: {who: {type: array,
      items: {type: string}, description: whom}}, required: [who]}}
"""
DIRECTLY = """
  tool_schema:
    name: greet
    description: Greet.
    parameters: {type: object, properties: {who: {type: array, items: {type: string}, description: whom}},
      required: [who]}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with classes, functions and no YAML yet."""
    (tmp_path / f"classes_{tmp_path.name}.py").write_text(CLASSES)
    (tmp_path / "functions.py").write_text(FUNCTIONS)  # of this name in every test's folder
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def load(**keys: Any) -> Any:
    config = compose({"actor_rollout_ref": {"rollout": {"multi_turn": keys}}})
    return load_tools(config.actor_rollout_ref.rollout.multi_turn)


def declare(folder: Path, entry: str) -> str:
    file = folder / "tools.yaml"
    file.write_text(f"tools:\n{entry.replace('CLASSES', f'classes_{folder.name}')}")
    return str(file)


def ask(tools: Any, name: str, arguments: str) -> Any:
    async def trajectory() -> Any:
        async with TrajectoryTools(tools, ResultLimits()) as opened:
            return (await opened.run([ToolCall("c", name, arguments)]))[0]

    return asyncio.run(trajectory())


@pytest.mark.parametrize("schema", [UNDER_FUNCTION, DIRECTLY])
def test_both_documented_shapes_give_the_whole_schema(folder: Path, schema: str) -> None:
    entry = "- class_name: CLASSES.Greet\n  config: {type: native, greeting: hello, timeout_seconds: 9}"
    [tool] = load(tool_config_path=declare(folder, entry + schema))
    assert tool.tool_schema.request_form() == {"type": "function", "function": SCHEMA}
    assert (tool.name, tool.timeout_seconds) == ("greet", 9.0)
    result = ask([tool], "greet", '{"who": "you"}')
    assert (result.content, result.reward) == ("hello you", 0.25)


def test_a_schema_may_be_the_classs_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREETING", "good day")
    [tool] = load(
        tool_config_path=declare(folder, "- class_name: CLASSES.Own\n  config: {greeting: '${oc.env:GREETING}'}")
    )
    assert ask([tool], "own", '{"who": "you"}').content == "good day you"


def test_a_file_gives_its_marked_functions_and_tools_each_once(folder: Path) -> None:
    assert load() == []
    first, second = load(function_tool_path="functions.py"), load(function_tool_path=str(folder / "functions.py"))
    assert [tool.name for tool in first] == [tool.name for tool in second] == ["greet", "bye", "chained"]
    assert ask(first, "bye", '{"who": "you"}').content == "bye you"


def test_a_function_that_two_files_have_is_one_tool(folder: Path) -> None:
    home = f"home_{folder.name}"
    (folder / f"{home}.py").write_text(FUNCTIONS)
    (folder / "guest.py").write_text(f"from {home} import greet\n")
    for paths in ([f"{home}.py", "guest.py"], ["guest.py", f"{home}.py"], [home, f"{home}.py"]):
        assert [tool.name for tool in load(function_tool_path=paths)] == ["greet", "bye", "chained"]


def test_a_file_of_a_modules_name_is_still_that_file(folder: Path) -> None:
    (folder / "json.py").write_text(FUNCTIONS)
    assert len(load(function_tool_path="json.py")) == 3
    assert load(function_tool_path="json.py")[0].function is load(function_tool_path="json.py")[0].function


def test_names_in_both_registries_are_one_error_that_names_all(folder: Path) -> None:
    bye = "\n- class_name: CLASSES.Greet\n  tool_schema: {name: bye}\n- class_name: CLASSES.Own\n"
    path = declare(folder, "- class_name: CLASSES.Greet" + DIRECTLY + bye)
    with pytest.raises(ConfigError) as error:
        load(tool_config_path=path, function_tool_path="functions.py")
    told = str(error.value)
    assert f"'bye' in {path}: tools[1] and in functions.py:part; 'greet' in {path}: tools[0] and in" in told
    assert "own" not in told.split("several:")[1]
    assert (
        len(load(tool_config_path=declare(folder, "- class_name: CLASSES.Own"), function_tool_path="functions.py")) == 4
    )


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("- class_nam: x", r"tools\[0\]: 'class_nam' is unknown; did you mean 'class_name'"),
        ("- config: {}", "class_name is None; write package.module.Class"),
        ("- class_name: CLASSES.Gree", "has no 'Gree'; did you mean 'Greet'"),
        ("- class_name: CLASSES.Other", "is no subclass of lightning_rl.tools.base_tool.BaseTool"),
        ("- class_name: CLASSES.Greet", "Greet has no schema: give tool_schema, or override get_openai_tool_schema"),
        ("- class_name: CLASSES.Greet\n  tool_schema: {description: d}", r"no tool schema \(function.name: Field requ"),
        ("- class_name: CLASSES.Own\n  config: {type: natve}", "config.type is 'natve'; there are native and mcp"),
        ("- class_name: verl.tools.gsm8k_tool.Gsm8kTool", "is verl's, which is not installed; copy the class into"),
        ("- config: {type: mcp}", "mcp.mcp_servers_config_path is missing"),
        (
            "- config: {type: mcp, rate_limitt: 1}",
            r"tools\[0\]: config: 'rate_limitt' is unknown; did you mean 'rate_limi",
        ),
        ("  {", "cannot be read"),
    ],
)
def test_what_is_wrong_with_a_declaration_is_said(folder: Path, entry: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load(tool_config_path=declare(folder, entry))
    assert "multi_turn" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no tool in it; mark its functions with @function_tool"),
        ("1 / 0", "(?s)cannot be imported.*ZeroDivisionError"),
        ("from lightning_rl.tools import function_tool\n@function_tool\ndef f(): ...", "(?s)'f' .*has no docstring"),
        (None, "there is no file"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(folder: Path, text: str | None, message: str) -> None:
    if text is not None:
        (folder / "wrong.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(function_tool_path=str(folder / "wrong.py"))


def test_limits_are_what_the_keys_say() -> None:
    def limits(of: Any = None, **keys: Any) -> ResultLimits:
        config = compose({"actor_rollout_ref": {"rollout": {"multi_turn": keys}}})
        return limits_of(config.actor_rollout_ref.rollout.multi_turn, of)

    assert limits() == ResultLimits(max_parallel_calls=1, max_length=256, side="middle", tokenizer=None)
    given = {"max_parallel_calls": 3, "max_tool_response_length": None, "tool_response_truncate_side": "left"}
    assert limits(**given) == ResultLimits(max_parallel_calls=3, max_length=None, side="left")
    tokens = limits(CHECKPOINT, tool_response_length_unit="tokens", max_tool_response_length=2)
    assert tokens.cut("one two three four")[1] > 0
    with pytest.raises(ConfigError, match=r"tool_response_length_unit=tokens needs the model's tokenizer"):
        limits(tool_response_length_unit="tokens")
