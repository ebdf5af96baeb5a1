"""A function as a tool: its schema is whole, its arguments are what its types say, what is wrong is said at once."""

import asyncio
import dataclasses
import enum
import functools
import json
import math
import pickle
import threading
from collections.abc import Callable
from typing import Annotated, Any, Literal, Optional, TypedDict

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from lightning_rl.tools import BaseTool, ResultLimits, ToolCall, ToolError, ToolResponse, TrajectoryTools, function_tool
from lightning_rl.tools.schemas import returned
from tests.random_examples import examples


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    x: float
    title: str = Field(default="origin", description="what it is called")


@dataclasses.dataclass
class Line:
    points: list[Point]
    width: int = 1


class Filter(TypedDict, total=False):
    lines: list[Line]


class Tree(BaseModel):
    value: int
    children: list["Tree"] = []


def everything(
    query: str,
    tags: list[str],
    line: Line,
    tree: Tree,
    where: Filter,
    n: Optional[int] = None,  # noqa: UP045 - the older form is taken too
    mixed: int | list[bool] = 3,
    mode: Literal["fast", "slow"] = "fast",
    color: Color = Color.RED,
    share: Annotated[float, Field(ge=0, le=1)] = 0.5,
    schema: Annotated[str, "said beside the type"] = "s",
    names: list[str] = None,  # type: ignore[assignment]  # noqa: RUF013 - an implicit Optional
) -> str:
    """Find things.

    In many places.

    Args:
        query: what to look for,
            on two lines
        tags: labels
        line: a line
        tree: a tree
        where (Filter): a filter
        n: how many
        mixed: either
        mode: how
        color: which
        share: of all
        names: whose
    """
    return repr((query, tags, line, tree, where, n, mixed, mode, color, share, schema, names))


POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "number"},
        "title": {"type": "string", "default": "origin", "description": "what it is called"},
    },
    "required": ["x"],
}
LINE = {
    "type": "object",
    "properties": {"points": {"type": "array", "items": POINT}, "width": {"type": "integer", "default": 1}},
    "required": ["points"],
}


def function_of(tool: BaseTool) -> dict[str, Any]:
    assert tool.tool_schema is not None
    form = tool.tool_schema.request_form()
    assert form["type"] == "function"
    function: dict[str, Any] = form["function"]
    return function


def run(tool: Any, **arguments: Any) -> Any:
    [result] = run_all(tool, json.dumps(arguments))
    return result


def run_all(tool: Any, *arguments: str, **limits: Any) -> list[Any]:
    async def trajectory() -> list[Any]:
        limits_ = ResultLimits(**{"max_length": None, **limits})
        async with TrajectoryTools([tool], limits_) as tools:
            name = tools.schemas[0]["function"]["name"]
            return await tools.run([ToolCall(f"c{at}", name, text) for at, text in enumerate(arguments)])

    return asyncio.run(trajectory())


def test_the_schema_says_everything_that_the_types_say() -> None:
    function = function_of(BaseTool.from_callable(everything))
    assert (function["name"], function["description"]) == ("everything", "Find things.\n\nIn many places.")
    parameters = function["parameters"]
    assert parameters["required"] == ["query", "tags", "line", "tree", "where"]
    properties = parameters["properties"]
    assert properties["query"] == {"type": "string", "description": "what to look for, on two lines"}
    assert properties["tags"] == {"type": "array", "items": {"type": "string"}, "description": "labels"}
    assert properties["line"] == LINE | {"description": "a line"}
    assert properties["where"] == {
        "type": "object",
        "properties": {"lines": {"type": "array", "items": LINE}},
        "description": "a filter",
    }
    nullable = [{"type": "integer"}, {"type": "null"}]
    assert properties["n"] == {"anyOf": nullable, "default": None, "description": "how many"}
    either = [{"type": "integer"}, {"type": "array", "items": {"type": "boolean"}}]
    assert properties["mixed"] == {"anyOf": either, "default": 3, "description": "either"}
    assert properties["mode"] == {"type": "string", "enum": ["fast", "slow"], "default": "fast", "description": "how"}
    assert properties["color"] == {"type": "string", "enum": ["red", "blue"], "default": "red", "description": "which"}
    bounds = {"minimum": 0, "maximum": 1}
    assert properties["share"] == {"type": "number", **bounds, "default": 0.5, "description": "of all"}
    assert properties["schema"] == {"type": "string", "default": "s", "description": "said beside the type"}
    assert {"type": "null"} in properties["names"]["anyOf"]
    assert properties["tree"] == {"$ref": "#/$defs/Tree", "description": "a tree"}
    assert parameters["$defs"]["Tree"]["properties"]["children"]["items"] == {"$ref": "#/$defs/Tree"}
    jsonschema.Draft202012Validator.check_schema(parameters)


def test_a_default_that_json_lacks_is_not_shown() -> None:
    def find(below: float = float("inf"), above: float = 0.5) -> str:
        """Find it.

        Args:
            below: at most.
            above: at least.
        """
        return ""

    properties = function_of(BaseTool.from_callable(find))["parameters"]["properties"]
    assert properties["below"] == {"type": "number", "description": "at most."}
    assert properties["above"] == {"type": "number", "default": 0.5, "description": "at least."}


def test_arguments_arrive_as_what_the_types_say() -> None:
    given = {
        "query": "q",
        "tags": ["a"],
        "line": {"points": [{"x": 1}]},
        "tree": {"value": 1, "children": [{"value": "2"}]},
        "where": {"lines": [{"points": [], "width": "7"}]},
        "color": "blue",
        "n": "5",
    }
    result = run(everything, **given)
    line, tree = Line([Point(x=1)]), Tree(value=1, children=[Tree(value=2)])
    where = {"lines": [Line([], 7)]}
    expected = ("q", ["a"], line, tree, where, 5, 3, "fast", Color.BLUE, 0.5, "s", None)
    assert (result.content, result.error) == (repr(expected), None)


seen: list[Line] = []


def draw(line: Line) -> str:
    """Draw.

    Args:
        line: what to draw
    """
    seen.append(line)
    return "ok"


DRAW = BaseTool.from_callable(draw)


@settings(max_examples=examples(50), deadline=None)
@given(
    st.fixed_dictionaries(
        {"points": st.lists(st.fixed_dictionaries({"x": st.integers() | st.floats(allow_nan=False) | st.text()}))},
        optional={"width": st.integers() | st.none(), "more": st.booleans()},
    )
)
def test_a_call_runs_exactly_when_it_fits_the_types(line: dict[str, Any]) -> None:
    seen.clear()
    result = run(DRAW, line=line)
    if result.error is None:
        assert all(isinstance(point, Point) for point in seen[0].points)
        assert [point.x for point in seen[0].points] == [float(point["x"]) for point in line["points"]]
    else:
        assert (result.error, seen) == ("wrong arguments", [])
        assert "line." in result.content


def undocumented(q: str) -> str:
    return q


def unhinted(q) -> str:  # type: ignore[no-untyped-def]
    """Find.

    Args:
        q: what
    """
    return str(q)


def undescribed(query: str, quary: int = 0) -> str:
    """Find.

    Args:
        queries: what
        quary: how many
    """
    return query


def starred(*args: str) -> str:
    """Find.

    Args:
        args: what
    """
    return ""


def double_starred(**kwargs: str) -> str:
    """Find.

    Args:
        kwargs: what
    """
    return ""


def untellable(lock: threading.Event) -> str:
    """Find.

    Args:
        lock: what
    """
    return ""


def fielded(q: str = Field(description="what")) -> str:
    """Find."""
    return q


def generating(q: str) -> Any:
    """Find.

    Args:
        q: what
    """
    yield q


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (undocumented, r"'undocumented' \(.*\.py:\d+\) has no docstring"),
        (unhinted, "'unhinted' .*argument 'q' has no type hint; write q: str"),
        (undescribed, "'undescribed' .*argument 'query' has no description; .*its docstring describes 'queries'"),
        (starred, r"'starred' .*\*args: str cannot be told to a model"),
        (double_starred, r"'double_starred' .*\*\*kwargs: str cannot be told"),
        (untellable, "'untellable' .*argument 'lock' of type Event has no JSON schema"),
        (fielded, r"default of argument 'q' is pydantic's Field\(...\), .* q: Annotated\[type, Field"),
        (generating, "'generating' .*is a generator"),
        (Point, "'Point' is a class"),
    ],
)
def test_what_is_wrong_is_said_when_the_function_is_marked(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ToolError, match=message):
        function_tool(function)
    with pytest.raises(ToolError, match=message):
        BaseTool.from_callable(function)


def test_marked_functions_stay_functions() -> None:
    @function_tool
    def bare(q: Annotated[str, "what"]) -> str:
        """Find."""
        return q

    @function_tool("search")
    def named(q: Annotated[str, "what"]) -> str:
        """Find."""
        return q

    assert (bare("x"), named("y")) == ("x", "y")
    assert BaseTool.from_callable(bare).name == "bare"
    assert BaseTool.from_callable(named).name == "search"
    assert function_tool("search")(named) is named  # the same once more
    with pytest.raises(ToolError, match="marked twice, differently"):
        function_tool("find")(named)


class Shelf:
    def find(self, q: str) -> str:
        """Find.

        Args:
            q: what
        """
        return f"{type(self).__name__} has {q}"


def test_a_bound_method_is_a_tool_and_cannot_be_marked() -> None:
    assert run(Shelf().find, q="it").content == "Shelf has it"
    with pytest.raises(ToolError, match=r"'find' .* cannot be marked; give it to BaseTool\.from_callable"):
        function_tool(Shelf().find)


def test_a_given_schema_is_shown_and_nothing_is_inferred() -> None:
    schema = {"name": "find", "parameters": {"type": "object", "properties": {"q": {"type": "string"}, "n": {}}}}

    @function_tool(schema=schema)
    def loose(q, **more):  # type: ignore[no-untyped-def]
        return {"q": q, **more}

    assert function_of(BaseTool.from_callable(loose)) == {"description": "", **schema}
    assert json.loads(run(loose, q=[1], n=2).content) == {"q": [1], "n": 2}
    assert run(loose, n=2).error == "wrong arguments"
    with pytest.raises(ToolError, match="its schema has the argument 'n', which the function does not take"):
        function_tool(schema=schema)(undocumented)
    with pytest.raises(ToolError, match="this is no tool schema"):
        function_tool(schema={"description": "nameless"})(undocumented)


class Counter:
    """Count calls."""

    def __init__(self) -> None:
        self.n = 0

    async def __call__(self, by: int) -> str:
        """Count.

        Args:
            by: so many
        """
        self.n += by
        return f"{self.n} in {threading.current_thread().name}"


async def search(query: str, limit: int, /, *, exact: bool = False) -> str:
    """Search.

    Args:
        query: what
        limit: how many
        exact: or not
    """
    return f"{query} {limit} {exact} in {threading.current_thread().name}"


def test_async_partials_and_callables_run_on_the_loop_and_sync_ones_in_threads_of_their_own() -> None:
    partial = functools.partial(search, exact=True)
    assert list(function_of(BaseTool.from_callable(partial))["parameters"]["properties"]) == ["query", "limit"]
    assert run(partial, query="q", limit=2).content == "q 2 True in MainThread"
    assert run(Counter(), by=2).content == "2 in MainThread"

    def where() -> str:
        """Say where."""
        return f"{threading.current_thread().name} {threading.current_thread().daemon}"

    assert run(where).content == "where True"
    assert run(functools.wraps(search)(lambda *a, **k: search(*a, **k)), query="q", limit=1).content.startswith("q 1")


def test_blocking_tools_do_not_wait_for_each_other_nor_fill_asyncios_pool() -> None:
    together = threading.Barrier(50, timeout=60)  # more than any machine's default pool of min(32, cores + 4)

    def meet() -> str:
        """Wait for all others."""
        together.wait()
        return "met"

    results = run_all(meet, *["{}"] * 50, max_parallel_calls=50)
    assert [result.content for result in results] == ["met"] * 50


@pytest.mark.parametrize("is_async", [True, False])
def test_a_call_that_takes_too_long_is_given_up(is_async: bool) -> None:
    over = threading.Event()

    async def wait_async() -> str:
        """Wait."""
        await asyncio.Event().wait()
        return ""

    def wait_sync() -> str:
        """Wait."""
        over.wait(60)
        return ""

    tool = BaseTool.from_callable(wait_async if is_async else wait_sync, name="wait", timeout=0.01)
    [first, second] = run_all(tool, "{}", "{}")
    over.set()
    assert first.error == second.error == "timeout"
    assert first.content == "Error: wait: it took longer than 0.01 seconds and was given up."


class Panic(BaseException):
    """As a library in Rust raises where it panics."""


class Unshowable(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("raised", "is_async"),
    [
        (ValueError("bad"), True),
        (ValueError("bad"), False),
        (SystemExit(3), True),
        (SystemExit(3), False),
        (Panic("in Rust"), True),
        (Panic("in Rust"), False),
        (Unshowable(), True),
        (Unshowable(), False),
        (StopIteration(), True),
        (StopIteration(), False),
        (asyncio.CancelledError(), True),
        (asyncio.CancelledError(), False),
        (KeyboardInterrupt(), False),  # on the loop it is the person at the keyboard
    ],
)
def test_what_a_tool_raises_is_an_answer(raised: BaseException, is_async: bool) -> None:
    def fail() -> str:
        """Raise."""
        raise raised

    async def fail_async() -> str:
        """Raise."""
        raise raised

    [result, next_one] = run_all(fail_async if is_async else fail, "{}", "{}")
    assert result.error == next_one.error is not None
    assert result.content.startswith("Error: fail")
    told = "cancelled" if is_async and isinstance(raised, asyncio.CancelledError) else type(raised).__name__
    assert told in result.content


MARK = ToolResponse(text="as is")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("text", ("text", 0.0, {})),
        ({"a": "ä"}, ('{"a": "ä"}', 0.0, {})),
        (MARK, ("as is", 0.0, {})),
        (("text",), ("text", 0.0, {})),
        (({"a": 1}, 0.5), ('{"a": 1}', 0.5, {})),
        ((MARK, 1, {"m": 2}), ("as is", 1.0, {"m": 2})),
        (("text", None, None), ("text", 0.0, {})),
        (("text", 0, {}), ("text", 0.0, {})),
        (("text", 0, {1: np.float32(0.5), "n": np.int64(3)}), ("text", 0.0, {"1": 0.5, "n": 3.0})),
        (("text", 0, {"ids": {7}, "x": math.nan, "y": [{7}]}), ("text", 0.0, {"ids": "{7}", "x": "nan", "y": "[{7}]"})),
        (("text", False), ("text", 0.0, {})),
        (("text", True), ("text", 1.0, {})),
        (7, ("7", 0.0, {})),
        ([1, "a"], ("[1, 'a']", 0.0, {})),
        (None, ("None", 0.0, {})),
    ],
)
def test_what_a_function_returns_is_response_reward_metrics(value: Any, expected: tuple[str, float, Any]) -> None:
    response, reward, metrics = returned(value)
    assert (response.text, reward, metrics) == expected
    assert type(reward) is float

    def tool() -> Any:
        """Return it."""
        return value

    result = run(tool)
    assert (result.content, result.reward, result.metrics, result.error) == (*expected, None)


@pytest.mark.parametrize("value", [(), (1, 2, 3, 4), ("a", "0.5", {}), ("a", "much"), ("a", float("nan")), ("a", 0, 1)])
def test_what_no_function_may_return_is_an_error(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        returned(value)


def test_a_tool_goes_to_another_process_with_its_function() -> None:
    tool = pickle.loads(pickle.dumps(BaseTool.from_callable(search, name="find", timeout=3)))
    assert (tool.name, tool.timeout_seconds) == ("find", 3)
    assert run(tool, query="q", limit=1).content.startswith("q 1 False")
