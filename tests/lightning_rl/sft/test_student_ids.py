"""The law: what is trained as a prompt is what the gateway would ask the student."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_rl.sft import traces
from lightning_rl.sft.student_ids import StudentFormat, Written
from lightning_rl.sft.traces import CallTrace
from lightning_rl_adapters import forest, triplet
from lightning_rl_proxy.rendering.answers import NotWritten, answer_ids
from lightning_rl_proxy.rendering.base import Renderer
from lightning_rl_proxy.rendering.load import load_renderer

from .records import CHECKPOINT, conversation, record, write

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "d",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]
CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": "a"}'}}],
}


@pytest.fixture(scope="module", params=["template", "qwen3"])
def renderer(request: pytest.FixtureRequest) -> Renderer:
    return load_renderer(CHECKPOINT, request.param, "student")


def trace(tmp_path: Path, records: list[dict[str, Any]]) -> CallTrace:
    [found], _ = traces.read([write(tmp_path / "calls.jsonl", records)])
    return found


def prompts(written: Written) -> dict[str, list[int]]:
    return {one.call_id: one.prompt_token_ids for one in triplet.triplets(forest.build(written.calls), {})}


def test_a_first_prompt_is_the_students_own_and_a_later_one_continues_it(tmp_path: Path, renderer: Renderer) -> None:
    written = StudentFormat(renderer).write(trace(tmp_path, conversation("r", ["select 1", "done"])))
    first, second = written.calls
    question = [{"role": "user", "content": "question 0"}]
    assert prompts(written)["r-0"] == renderer.render(question, None)
    sampled = renderer.parse("", first.prompt_ids, first.response_ids, None, "stop", None)
    assert sampled.content == "select 1"
    assert first.response_ids[-1] in renderer.stop_token_ids
    asked = renderer.extend(first.prompt_ids, first.response_ids, [{"role": "user", "content": "question 1"}], None)
    assert asked is not None
    assert (second.parent_id, second.prompt_ids) == ("r-0", asked)
    assert written.as_sampled == 0


def test_reasoning_is_learned_by_either_of_its_names(tmp_path: Path) -> None:
    def ids(name: str) -> list[int]:
        answer = {"role": "assistant", "content": "select 1", name: "it counts"}
        [call] = (
            StudentFormat(load_renderer(CHECKPOINT, "qwen3", "student"))
            .write(trace(tmp_path, [record("r", answer=[answer])]))
            .calls
        )
        return call.response_ids

    assert ids("reasoning") == ids("reasoning_content") != ids("remark")


def test_ids_of_the_same_tokenizer_and_format_stay_as_they_were_sampled(tmp_path: Path, renderer: Renderer) -> None:
    prompt = renderer.render([{"role": "user", "content": "question 0"}], None)
    odd = [*renderer.tokenizer.encode("se"), *renderer.tokenizer.encode("lect 1"), renderer.stop_token_ids[0]]
    same = {"prompt_token_ids": prompt, "response_token_ids": odd, "exact": True}
    digest = renderer.tokenizer.vocabulary_digest()

    def ids(**changes: Any) -> tuple[list[int], list[int], int]:
        written = StudentFormat(renderer).write(trace(tmp_path, [record("r", **same | changes)]))
        [call] = written.calls
        return call.prompt_ids, call.response_ids, written.as_sampled

    assert ids(vocabulary=digest) == (prompt, odd, 1)
    rendered = (
        prompt,
        answer_ids(renderer, [{"role": "user", "content": "question 0"}], record("r")["answer"][0], None),
    )
    assert ids(vocabulary="another") == (*rendered, 0)
    assert ids(vocabulary=digest, prompt_token_ids=[*prompt, 5]) == (*rendered, 0)  # another chat format asked it so
    assert ids(vocabulary=digest, answer=[]) == (prompt, odd, 1)  # its client left, and no answer was read
    assert ids(vocabulary=digest, exact=False) == (*rendered, 0)
    assert ids(vocabulary=digest, response_token_ids=[]) == (*rendered, 0)
    assert ids(vocabulary=digest, prompt_token_ids=[5, 6], dialect="completions") == ([5, 6], odd, 1)


@pytest.mark.parametrize(("exact", "as_sampled"), [(True, 2), (False, 0)])
def test_a_call_stays_as_it_was_sampled_where_the_one_before_does(
    exact: bool, as_sampled: int, tmp_path: Path, renderer: Renderer
) -> None:
    prompt, end = renderer.render([{"role": "user", "content": "question 0"}], None), renderer.stop_token_ids[0]
    said = [*renderer.tokenizer.encode("se"), *renderer.tokenizer.encode("lect 1"), end]
    first, second = conversation("r", ["select 1", "done"], vocabulary=renderer.tokenizer.vocabulary_digest())
    first |= {"prompt_token_ids": prompt, "response_token_ids": said, "exact": exact}
    second |= {"prompt_token_ids": [*prompt, *said, 7], "response_token_ids": [8], "exact": True}
    written = StudentFormat(renderer).write(trace(tmp_path, [first, second]))
    assert written.as_sampled == as_sampled
    assert ((written.calls[1].prompt_ids, written.calls[1].response_ids) == ([7], [8])) == exact
    assert [call.parent_id for call in written.calls] == [None, "r-0"]


def test_a_tool_call_is_written_in_the_students_format_and_means_the_same(tmp_path: Path) -> None:
    renderer = load_renderer(CHECKPOINT, "qwen3", "student")
    written = StudentFormat(renderer).write(trace(tmp_path, [record("r", answer=[CALLED], tools=TOOLS)]))
    [call] = written.calls
    assert call.prompt_ids == renderer.render([{"role": "user", "content": "question 0"}], TOOLS)
    [said] = renderer.parse("", call.prompt_ids, call.response_ids, None, "stop", TOOLS).tool_calls
    assert (said["function"]["name"], json.loads(said["function"]["arguments"])) == ("look", {"at": "a"})


@pytest.mark.parametrize("finish_reason", ["stop", "tool_calls", None])
def test_an_answer_that_was_not_cut_has_its_end(finish_reason: str | None, tmp_path: Path, renderer: Renderer) -> None:
    written = StudentFormat(renderer).write(trace(tmp_path, [record("r", finish_reason=finish_reason)]))
    assert written.calls[0].response_ids[-1] in renderer.stop_token_ids


def test_a_conversation_that_is_rendered_anew_follows_none_that_was_sampled_otherwise(
    tmp_path: Path, renderer: Renderer
) -> None:
    """An answer that nobody sampled stands between the two."""
    prompt, end = renderer.render([{"role": "user", "content": "question 0"}], None), renderer.stop_token_ids[0]
    said = [*(token for letter in "select 1" for token in renderer.tokenizer.encode(letter)), end]
    first, second = conversation("r", ["select 1", "done"], vocabulary=renderer.tokenizer.vocabulary_digest())
    first |= {"prompt_token_ids": prompt, "response_token_ids": said, "exact": True}
    between = [{"role": role, "content": "why?"} for role in ("user", "assistant", "user")]
    written = StudentFormat(renderer).write(trace(tmp_path, [first, second | {"messages": between}]))
    messages = [*first["messages"], *first["answer"], *between]
    assert (written.as_sampled, written.calls[1].parent_id) == (1, None)
    assert written.calls[1].prompt_ids == renderer.render(messages, None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"media": [[0, 1, "x"]]}, "images"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "sha256:x"}}]}]},
            "images",
        ),
        ({"answer": []}, "no_answer"),
        ({"answer": [], "response_token_ids": [5, 6]}, "no_answer"),  # its client left before the end
        ({"dialect": "completions"}, "raw_prompt"),
        ({"parent_call_id": "elsewhere"}, "unknown_conversation"),
        ({"answer": [CALLED], "tools": TOOLS}, "answer_changed"),  # the tutorial's template writes no tool calls
    ],
)
def test_what_cannot_be_written_is_named(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    student = StudentFormat(load_renderer(CHECKPOINT, "template", "student"))
    written = student.write(trace(tmp_path, [record("r", **changes)]))
    assert (written.calls, written.why_not) == ([], {"r-0": reason})


def test_a_cut_answer_is_written_without_an_end(tmp_path: Path, renderer: Renderer) -> None:
    messages, answer = [{"role": "user", "content": "q"}], {"role": "assistant", "content": "select"}
    whole = answer_ids(renderer, messages, answer, None)
    assert answer_ids(renderer, messages, answer, None, ended=False) == whole[:-1]
    cut = record("r", messages=messages, answer=[answer], finish_reason="length")
    [call] = StudentFormat(renderer).write(trace(tmp_path, [cut])).calls
    assert (call.response_ids, call.finish_reason) == (whole[:-1], "length")
    with pytest.raises(NotWritten, match="answer_changed"):
        answer_ids(renderer, messages, answer | {"tool_calls": [{"function": {"name": "x", "arguments": "{}"}}]}, None)


def test_reasoning_in_the_text_of_an_answer_is_its_reasoning() -> None:
    renderer = load_renderer(CHECKPOINT, "qwen3", "student")
    question = [{"role": "user", "content": "q"}]
    marked = {"role": "assistant", "content": "<think>\nI count.\n</think>\n\nselect"}
    apart = {"role": "assistant", "content": "select", "reasoning_content": "I count."}
    assert answer_ids(renderer, question, marked, None) == answer_ids(renderer, question, apart, None)
    plain = load_renderer(CHECKPOINT, "template", "student", history="keep")  # knows no reasoning: it is text
    assert "I count." in plain.tokenizer.decode(answer_ids(plain, question, marked, None))


def test_a_call_whose_parent_cannot_be_written_is_rendered_anew(tmp_path: Path, renderer: Renderer) -> None:
    first, second = conversation("r", ["select 1", "done"])
    first |= {"media": [[0, 1, "x"]], "tools": TOOLS}  # which hold for the calls that go on with it
    written = StudentFormat(renderer).write(trace(tmp_path, [first, second]))
    [call] = written.calls
    messages = [*first["messages"], *first["answer"], *second["messages"]]
    assert (call.parent_id, call.prompt_ids) == (None, renderer.render(messages, TOOLS))
    assert written.why_not == {"r-0": "images"}
