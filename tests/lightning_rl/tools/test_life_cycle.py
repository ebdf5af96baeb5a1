"""State of a tool: created once at its first use, the trajectory's own, released once however the trajectory ends."""

import asyncio
import json
import logging
from collections import Counter
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rl.tools import BaseTool, OpenAIFunctionToolSchema, ResultLimits, ToolCall, ToolResponse, TrajectoryTools
from tests.random_examples import examples


def schema(name: str) -> OpenAIFunctionToolSchema:
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {"name": name}})


class Gsm8kLike(BaseTool):
    """Written as verl's own are: state by instance id, a schema of its own, no release of what is not there."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):  # type: ignore[type-arg]
        super().__init__(config, tool_schema)
        self._instance_dict: dict[str, Any] = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        parameters = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
        function = {"name": "calc_reward", "description": "Score.", "parameters": parameters}
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    async def create(self, instance_id=None, ground_truth=None, **kwargs):  # type: ignore[no-untyped-def]
        if instance_id is None:
            instance_id = str(uuid4())
        if ground_truth is None:
            ground_truth = kwargs.get("create_kwargs", {}).get("ground_truth", None)
        self._instance_dict[instance_id] = {"ground_truth": ground_truth, "reward": 0.0}
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):  # type: ignore[no-untyped-def]
        answer = parameters.get("answer", "")
        reward = await self.calc_reward(instance_id, answer)
        improved = 0.0 if reward > self._instance_dict[instance_id]["reward"] else -0.05
        self._instance_dict[instance_id]["reward"] = reward
        return ToolResponse(text=f"Current parsed {answer=} {reward=}"), improved, {"tries": 1}

    async def calc_reward(self, instance_id: str, answer: str) -> float:
        return 1.0 if self._instance_dict[instance_id]["ground_truth"] == str(answer) else 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._instance_dict[instance_id]


def test_a_tool_written_for_verl_works_unchanged() -> None:
    tool = Gsm8kLike(config={}, tool_schema=None)  # type: ignore[arg-type]

    async def trajectory(truth: str) -> Any:
        create_kwargs = {"calc_reward": {"ground_truth": truth}}
        async with TrajectoryTools([tool], ResultLimits(), create_kwargs=create_kwargs) as tools:
            for answer in ("72", 72, "72"):
                await tools.run([ToolCall("c", "calc_reward", json.dumps({"answer": answer}))])
            missing = (await tools.run([ToolCall("c", "calc_reward", "{}")]))[0]
            assert missing.error == "wrong arguments"
            assert "calc_reward: missing: answer. It takes answer;" in missing.content
            return [(result.reward, result.metrics) for result in tools.results[:3]]

    async def both() -> Any:
        return await asyncio.gather(trajectory("72"), trajectory("5"))

    tries = {"tries": 1}
    improving = [(0.0, tries), (-0.05, tries), (-0.05, tries)]
    assert asyncio.run(both()) == [improving, [(-0.05, tries)] * 3]
    assert tool._instance_dict == {}


@pytest.mark.parametrize("form", ["names", "mapping", "bare", "unknown"])
def test_create_gets_what_the_sample_says(form: str) -> None:
    seen: list[Any] = []

    class Named(BaseTool):
        async def create(self, instance_id=None, *, town):  # type: ignore[no-untyped-def, override]
            seen.append(town)
            return "id"  # verl's older form, without a response

        async def execute(self, instance_id, parameters, **kwargs):  # type: ignore[no-untyped-def]
            return f"in {instance_id}"

    class Mapping(Named):
        async def create(self, instance_id=None, *, create_kwargs):  # type: ignore[no-untyped-def, override]
            return await super().create(town=create_kwargs["town"])

    class Bare(Named):
        async def create(self, instance_id=None):  # type: ignore[no-untyped-def, override]
            return await super().create(town="none")

    made = {"names": Named, "mapping": Mapping, "bare": Bare, "unknown": Bare}[form]({}, schema("t"))
    given = {} if form == "bare" else {"t": {"town": "Oslo"}}

    async def trajectory() -> Any:
        async with TrajectoryTools([made], ResultLimits(), create_kwargs=given) as tools:
            return (await tools.run([ToolCall("c", "t", "{}")]))[0]

    result = asyncio.run(trajectory())
    if form == "unknown":
        assert (result.error, seen) == ("TypeError", [])
        assert "town" in result.content
    else:
        assert (result.content, result.error) == ("in id", None)
        assert seen == ["none" if form == "bare" else "Oslo"]


class Boxes(BaseTool):
    """Opens and closes boxes, slowly; tells who had which, and fails or hangs where it is told to."""

    def __init__(self, name: str, awaits: int, fails: set[str]) -> None:
        super().__init__({}, schema(name))
        self.awaits, self.fails = awaits, fails
        self.created: Counter[str] = Counter()
        self.released: Counter[str] = Counter()
        self.open: dict[str, list[str]] = {}

    async def _step(self, what: str) -> None:
        for _ in range(self.awaits):
            await asyncio.sleep(0)
        if what in self.fails:
            raise OSError(f"{what} failed")

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        await self._step("create")
        made = str(uuid4())
        self.created[made] += 1
        self.open[made] = []
        for _ in range(self.awaits):  # what it holds is open, and it has not returned
            await asyncio.sleep(0)
        return made, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        await self._step("execute")
        self.open[instance_id].append(parameters["who"])
        await self._step("late")
        return " ".join(self.open[instance_id]), 1.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.released[instance_id] += 1
        await self._step("release")
        del self.open[instance_id]


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(["a", "b"]), max_size=4), min_size=1, max_size=3),
    st.integers(0, 3),
    st.sets(st.sampled_from(["create", "execute", "late", "release", "agent"])),
    st.integers(0, 40) | st.none(),
    st.integers(1, 3),
)
def test_released_once_and_shared_with_nobody_wherever_a_trajectory_is_cancelled(
    answers: list[list[str]], awaits: int, fails: set[str], cancel_after: int | None, parallel: int
) -> None:
    boxes = [Boxes(name, awaits, fails) for name in ("a", "b")]
    logging.disable(logging.CRITICAL)

    async def trajectory(who: str) -> Any:
        async with TrajectoryTools(boxes, ResultLimits(max_parallel_calls=parallel)) as tools:
            calls = [[ToolCall("c", name, json.dumps({"who": who})) for name in names] for names in answers]
            for some in calls:
                results = await tools.run(some)
                assert [result.name for result in results] == [call.name for call in some]
            if "agent" in fails:
                raise RuntimeError("the agent failed")
            return tools.results

    async def main() -> list[Any]:
        first, second = asyncio.create_task(trajectory("first")), asyncio.create_task(trajectory("second"))
        if cancel_after is not None:
            for _ in range(cancel_after):
                await asyncio.sleep(0)
            first.cancel()
            await asyncio.sleep(0)
            first.cancel()  # and once more, while it closes
        return await asyncio.gather(first, second, return_exceptions=True)

    try:
        first, second = asyncio.run(main())
    finally:
        logging.disable(logging.NOTSET)
    for box in boxes:
        assert box.created == box.released
        assert set(box.created.values()) <= {1}
        assert len(box.created) <= 2
        for had in box.open.values():
            assert len(set(had)) <= 1
        assert not box.open or "release" in fails
    if "agent" not in fails:
        assert isinstance(second, list)
        assert isinstance(first, list | asyncio.CancelledError)
    if not fails and parallel == 1:
        names = [name for some in answers for name in some]
        expected = [" ".join(["second"] * names[: at + 1].count(name)) for at, name in enumerate(names)]
        assert [result.content for result in second] == expected


def test_calls_at_the_same_time_create_once_and_nothing_that_is_not_used() -> None:
    used, idle = Boxes("used", 3, set()), Boxes("idle", 0, set())

    async def trajectory() -> Any:
        async with TrajectoryTools([used, idle], ResultLimits(max_parallel_calls=5)) as tools:
            return await tools.run([ToolCall(str(at), "used", '{"who": "me"}') for at in range(5)])

    results = asyncio.run(trajectory())
    assert {result.error for result in results} == {None}
    assert (len(used.created), len(idle.created)) == (1, 0)


def test_a_creation_that_failed_is_tried_again() -> None:
    boxes = Boxes("a", 0, {"create"})

    async def trajectory() -> Any:
        async with TrajectoryTools([boxes], ResultLimits()) as tools:
            [first] = await tools.run([ToolCall("1", "a", '{"who": "me"}')])
            boxes.fails.clear()
            return first, *await tools.run([ToolCall("2", "a", '{"who": "me"}')])

    first, second = asyncio.run(trajectory())
    assert (first.error, first.content) == ("OSError", "Error: a: it raised OSError: create failed")
    assert (second.error, second.content) == (None, "me")


def test_what_create_says_is_read_before_the_first_result() -> None:
    class Greeting(BaseTool):
        async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
            return "x", ToolResponse(text="welcome")

        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return "done"

    async def trajectory() -> Any:
        async with TrajectoryTools([Greeting({}, schema("t"))], ResultLimits()) as tools:
            return [(await tools.run([ToolCall("c", "t", "")]))[0].content for _ in range(2)]

    assert asyncio.run(trajectory()) == ["welcome\ndone", "done"]


def test_a_failed_release_is_logged_and_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Boxes("bad", 0, {"release"}), Boxes("good", 0, set())

    async def trajectory() -> None:
        async with TrajectoryTools([bad, good], ResultLimits()) as tools:
            await tools.run([ToolCall("1", name, '{"who": "me"}') for name in ("bad", "good")])

    asyncio.run(trajectory())
    assert good.open == {}
    assert "tool 'bad': release of instance" in caplog.text


def test_calls_outside_of_the_trajectory_are_refused() -> None:
    async def outside() -> None:
        tools = TrajectoryTools([Boxes("a", 0, set())], ResultLimits())
        with pytest.raises(RuntimeError, match="async with"):
            await tools.run([ToolCall("1", "a", "{}")])
        async with tools:
            pass
        with pytest.raises(RuntimeError, match="async with"):
            await tools.run([ToolCall("1", "a", "{}")])

    asyncio.run(outside())
