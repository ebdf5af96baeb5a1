"""What the model reads of a call: cut with a marker, images as parts, and what is wrong where it cannot run."""

import asyncio
import base64
import io
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError
from tokenizers import Tokenizer

from lightning_rl.tools import BaseTool, ResultLimits, ToolCall, ToolFailed, ToolResponse, TrajectoryTools
from lightning_rl.tools.errors import ToolError

CHECKPOINT = Path(__file__).parents[3] / "examples" / "sql_agent" / "checkpoint"
TOKENIZER = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
Side = Literal["left", "right", "middle"]


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one
        b: another
    """
    return a + b


def refuse() -> str:
    """Refuse."""
    raise ToolFailed("the shop is closed")


def run(tools: Sequence[Any], calls: Sequence[ToolCall], limits: ResultLimits, **more: Any) -> Any:
    async def trajectory() -> Any:
        async with TrajectoryTools(tools, limits, **more) as opened:
            results = await opened.run(calls)
            assert opened.results == results
            return results

    return asyncio.run(trajectory())


def answer(response: Any, **limits: Any) -> Any:
    def tool() -> Any:
        """Answer."""
        return response

    [result] = run([tool], [ToolCall("c", "tool", "{}")], ResultLimits(**limits))
    return result


@pytest.mark.parametrize(
    ("side", "read"),
    [("left", "(truncated)...67890"), ("right", "12345...(truncated)"), ("middle", "12...(truncated)...90")],
)
def test_the_side_names_what_is_cut(side: Side, read: str) -> None:
    result = answer("1234567890", max_length=5, side=side)
    assert result.content == read
    assert result.metrics == {"truncated": 6 if side == "middle" else 5}
    assert (answer("12345", max_length=5, side=side).content, answer("12345", max_length=5).metrics) == ("12345", {})
    assert answer("1" * 9999, max_length=None, side=side).content == "1" * 9999


@given(st.text(max_size=60), st.integers(1, 70), st.sampled_from(["left", "right", "middle"]), st.booleans())
@settings(deadline=None)
def test_what_is_kept_is_the_texts_own_and_the_rest_is_told(text: str, length: int, side: Side, tokens: bool) -> None:
    units = len(TOKENIZER.encode(text, add_special_tokens=False).ids) if tokens else len(text)
    read, cut = ResultLimits(max_length=length, side=side, tokenizer=TOKENIZER if tokens else None).cut(text)
    if units <= length:
        assert (read, cut) == (text, 0)
        return
    marker = {"left": "(truncated)...", "right": "...(truncated)", "middle": "...(truncated)..."}[side]
    head, tail = ("", read.removeprefix(marker)) if side == "left" else (read.removesuffix(marker), "")
    if side == "middle":
        head, _, tail = read.partition(marker)
    assert text.startswith(head)
    assert text.endswith(tail)
    assert cut == units - (length // 2 * 2 if side == "middle" else length)
    if not tokens:
        assert len(head) + len(tail) == units - cut


def test_a_text_is_cut_between_tokens() -> None:
    text = "select name from singer where age > 20 order by name"
    result = answer(text, max_length=4, side="right", tokenizer=TOKENIZER)
    kept = result.content.removesuffix("...(truncated)")
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.encode(kept, add_special_tokens=False).ids == ids[:4]
    assert result.metrics == {"truncated": len(ids) - 4}


def pixels(url: str) -> Any:
    head, _, data = url.partition(",")
    assert head == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def png(image: Image.Image) -> bytes:
    written = io.BytesIO()
    image.save(written, format="PNG")
    return written.getvalue()


def test_images_of_every_form_become_parts(tmp_path: Path) -> None:
    array = np.arange(2 * 5 * 3, dtype=np.uint8).reshape(2, 5, 3)
    image = Image.fromarray(array)
    (tmp_path / "i.png").write_bytes(png(image))
    forms = [image, array, array.transpose(2, 0, 1), png(image), tmp_path / "i.png", {"bytes": png(image)}]
    result = answer(ToolResponse(text="seen", image=[*forms, "https://x.org/i.png"]))
    text, *parts = result.content
    assert (text, result.error) == ({"type": "text", "text": "seen"}, None)
    *made, linked = [part["image_url"]["url"] for part in parts]
    assert linked == "https://x.org/i.png"
    assert all(np.array_equal(pixels(url), array) for url in made)
    assert made[3] == "data:image/png;base64," + base64.b64encode(png(image)).decode()  # a file as it is


def test_an_image_alone_has_no_empty_text() -> None:
    result = answer(ToolResponse(image=[Image.new("L", (1, 1))]))
    assert [part["type"] for part in result.content] == ["image_url"]


def test_a_video_is_its_frames_after_a_line_that_says_so(tmp_path: Path) -> None:
    frames = np.arange(4 * 2 * 2 * 3, dtype=np.uint8).reshape(4, 2, 2, 3)
    stills = [Image.fromarray(frame) for frame in frames]
    stills[0].save(tmp_path / "v.png", save_all=True, append_images=stills[1:])
    for video in ([frames], [list(frames)], stills, [Image.open(tmp_path / "v.png")]):
        text, line, *parts = answer(ToolResponse(text="look", video=video)).content
        assert [text["text"], line["text"]] == ["look", "[video: 4 frames follow as images]"]
        shown = [pixels(part["image_url"]["url"])[..., :3] for part in parts]
        assert np.array_equal(shown, frames)
    lines = [part.get("text") for part in answer(ToolResponse(video=[frames, frames[:1]])).content]
    assert [line for line in lines if line] == [
        "[video: 4 frames follow as images]",
        "[video: 1 frames follow as images]",
    ]


@pytest.mark.parametrize("field", ["image", "video"])
def test_a_scalar_is_no_list(field: str) -> None:
    with pytest.raises(ValidationError, match=r"must be a list, also of one: \[...\]"):
        ToolResponse(**{field: Image.new("L", (1, 1))})  # type: ignore[arg-type]


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_without_words_is_an_answer_too() -> None:
    def fail() -> str:
        """Raise."""
        raise Unprintable

    [result] = run([fail], [ToolCall("c", "fail", "{}")], ResultLimits())
    assert result.error == "Unprintable"
    assert "Unprintable: <exception str() failed>" in result.content


@pytest.mark.parametrize("image", [7, b"none", np.zeros((2, 2)), "/no/such/file.png"])
def test_what_is_no_image_is_an_error(image: Any) -> None:
    result = answer((ToolResponse(image=[image]), 0.5, {"m": 1}))
    assert result.error is not None
    assert (result.reward, result.metrics) == (0.5, {"m": 1})  # the tool has run
    assert result.content.startswith("Error: tool: its answer cannot be shown: ")


CALLS = {
    "well": ('{"a": 1, "b": 2}', None, "3"),
    "converted": ('{"a": "1", "b": 2.0}', None, "3"),
    "no JSON": ('{"a": 1,', "malformed arguments", "no valid JSON: Expecting property name .* one JSON object"),
    "no object": ("[1, 2]", "malformed arguments", r"are a JSON array, and must be an object: \{"),
    "null": ("null", "malformed arguments", "are a JSON null"),
    "deep": ("[" * 100_000, "malformed arguments", "nested too deeply|no valid JSON"),
    "missing": ('{"a": 1}', "wrong arguments", r"missing: b\. It takes a, b; correct them"),
    "nothing": ("", "wrong arguments", "missing: a; missing: b"),
    "unknown": ('{"a": 1, "bb": 2}', "wrong arguments", r"unknown: bb \(did you mean b\?\); missing: b"),
    "wrong": ('{"a": 1, "b": "two"}', "wrong arguments", 'b: Input should be a valid integer.* not "two"'),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_malformed_call_is_answered_with_what_is_wrong(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    arguments, error, content = CALLS[name]
    [result] = run([add], [ToolCall("c1", "add", arguments)], ResultLimits())
    assert (result.call_id, result.name, result.error, result.reward) == ("c1", "add", error, 0.0)
    if error is None:
        assert (result.content, caplog.text) == (content, "")
    else:
        assert re.search(content, result.content), result.content
        assert f"call of tool 'add' failed ({error})" in caplog.text


def test_an_unknown_tool_is_answered_with_those_there_are() -> None:
    [result] = run([add, refuse], [ToolCall("c", "ad", "{}")], ResultLimits())
    assert result.error == "unknown tool"
    assert result.content == "Error: ad: there is no such tool. Did you mean 'add'? The tools are: add, refuse."


def test_every_content_can_be_sent_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert answer("a\ud800b").content == "a\\ud800b"
    [result] = run([add], [ToolCall("c", "add", '{"\\ud800": 1}')], ResultLimits())
    assert "unknown: \\ud800" in result.content
    assert "unknown: \\ud800" in caplog.text


def test_a_tool_may_say_itself_that_it_failed() -> None:
    [result] = run([refuse], [ToolCall("c", "refuse", "{}")], ResultLimits())
    assert (result.error, result.content) == ("tool error", "Error: refuse: the shop is closed")


@pytest.mark.parametrize("parallel", [1, 2, 7])
def test_all_calls_run_so_many_at_once_and_are_answered_in_order(parallel: int) -> None:
    inside: list[int] = []
    most: list[int] = []

    async def work(at: int) -> int:
        """Work.

        Args:
            at: which
        """
        inside.append(at)
        most.append(len(inside))
        for _ in range(10 - at):  # the later ones are the faster ones
            await asyncio.sleep(0)
        inside.remove(at)
        return at

    calls = [ToolCall(f"c{at}", "work", json.dumps({"at": at})) for at in range(7)]
    results = run([work], calls, ResultLimits(max_parallel_calls=parallel))
    assert [(result.call_id, result.content) for result in results] == [(f"c{at}", str(at)) for at in range(7)]
    assert max(most) == parallel


def test_a_sample_chooses_its_tools() -> None:
    limits = ResultLimits()

    def names(**more: Any) -> list[str]:
        return [schema["function"]["name"] for schema in TrajectoryTools([add, refuse], limits, **more).schemas]

    assert names() == ["add", "refuse"]
    assert names(selection=["refuse"]) == ["refuse"]
    assert names(selection=[]) == []
    with pytest.raises(
        ToolError, match="selection of the sample names 'adds', which no tool has; there are add, refus"
    ):
        names(selection=["adds"])
    with pytest.raises(ToolError, match="create_kwargs of the sample names 'sub'"):
        names(create_kwargs={"sub": {}})
    [result] = run([add, refuse], [ToolCall("c", "add", "{}")], limits, selection=["refuse"])
    assert (result.error, result.content) == (
        "unknown tool",
        "Error: add: there is no such tool. The tools are: refuse.",
    )


def test_two_tools_of_one_name_are_refused() -> None:
    other = BaseTool.from_callable(refuse, name="add")
    with pytest.raises(ToolError, match=r"'add' in tools\[0\] and in tools\[2\]"):
        TrajectoryTools([add, refuse, other], ResultLimits())
    assert len(TrajectoryTools([add, add, BaseTool.from_callable(add)], ResultLimits()).schemas) == 1
