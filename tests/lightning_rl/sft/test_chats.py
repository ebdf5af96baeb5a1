"""Chats of one's own are learned from as recorded calls are."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from lightning_rl.config import ConfigError, compose
from lightning_rl.sft import examples, traces
from lightning_rl.sft.examples import Examples
from lightning_rl_proxy.rendering.load import load_renderer
from tests.pages import ROOT

from .records import CHECKPOINT, write

RENDERER = load_renderer(CHECKPOINT, "template", "student")
QWEN = load_renderer(CHECKPOINT, "qwen3", "student")


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TALK = [
    said("system", "be brief"), said("user", "how many?"), said("assistant", "select 1"),
    said("user", "sure?"), said("assistant", "no idea", weight=0), said("user", "and now?"), said("assistant", "yes"),
]  # fmt: skip


PROPERTIES = {"a": {"type": "string"}, "b": {"type": "string"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}}}


def load(file: Path, **sft: Any) -> Examples:
    return examples.load(compose({"sft": {"held_out": 0.0} | sft}), [file], RENDERER)


def trained(found: Examples) -> list[str]:
    return [
        RENDERER.tokenizer.decode([int(id) for id in sequence.token_ids[sequence.trained]])
        for one in found.trained
        for sequence in one.sequences
    ]


def test_every_answer_is_learned_and_one_of_weight_0_is_context(tmp_path: Path) -> None:
    found = load(write(tmp_path / "chats.jsonl", [{"messages": TALK}]))
    assert [text.replace("<|im_end|>", "|") for text in trained(found)] == ["select 1|yes|"]
    found.metrics(0)  # the account balances


def test_an_answer_goes_on_with_all_that_was_said_before_it_once(tmp_path: Path) -> None:
    [one] = load(write(tmp_path / "chats.jsonl", [{"messages": TALK}])).trained
    [sequence] = one.sequences
    whole = RENDERER.whole([said(message["role"], message["content"]) for message in TALK], None)
    assert [int(id) for id in sequence.token_ids] == whole[: len(sequence.token_ids)]
    assert len(sequence.token_ids) >= len(whole) - 1, "but for what the template writes behind the last answer"


def test_every_chat_is_a_group_of_its_own(tmp_path: Path) -> None:
    chats = [{"messages": TALK[:3], "reward": reward} for reward in (1.0, 0.5)]
    found = load(write(tmp_path / "chats.jsonl", chats), best_of_group=1)
    assert [one.rollout_id for one in found.trained] == ["chat-0-1", "chat-0-2"]


def test_what_is_null_in_a_message_was_not_given(tmp_path: Path) -> None:
    nulls = [message | {"weight": message.get("weight"), "name": None, "tool_calls": None} for message in TALK]
    found = load(write(tmp_path / "chats.jsonl", [{"messages": nulls}]))
    assert trained(found) == trained(load(write(tmp_path / "plain.jsonl", [{"messages": TALK}])))


def test_rewards_choose_and_parquet_holds_the_same(tmp_path: Path) -> None:
    chats = [{"messages": TALK[:3], "reward": 1.0}, {"messages": [*TALK[:2], said("assistant", "no")], "reward": 0.0}]
    file = write(tmp_path / "chats.jsonl", chats)
    assert [one.rollout_id for one in load(file, min_reward=0.5).trained] == ["chat-0-1"]
    parquet.write_table(pyarrow.Table.from_pylist(chats), again := tmp_path / "chats.parquet")
    assert trained(load(again)) == trained(load(file)) == ["select 1<|im_end|>", "no<|im_end|>"]
    found, _ = traces.read([file, again])  # of one name, and different rollouts
    assert len({one.rollout_id for one in found}) == 4


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": "hi"}, "record 1: messages is 'hi'; it must be a list"),
        ({"messages": ["hi"]}, r"record 1: messages\[0\] is 'hi'; it must be an object with a role"),
        ({"messages": [{"role": "bot", "content": "x"}]}, r"record 1: messages\[0\].role is 'bot'; it is one of"),
        ({"messages": [*TALK[:2], said("assistant", "x", weight=0.5)]}, "record 1: an answer has weight 0.5; it is 1"),
        (
            {"messages": [TALK[1], said("assistant", "", tool_calls=[{"function": {"arguments": "{}"}}])]},
            r"record 1: messages\[1\].tool_calls\[0\].function has no name",
        ),
        (
            {"messages": [TALK[1], said("assistant", "", tool_calls=[{"function": {"name": "add"}}])]},
            r"record 1: messages\[1\].tool_calls has .*: it has no arguments",
        ),
        ({"messages": TALK[:2]}, "record 1 has no message of the assistant"),
        ({"text": "hi"}, "record 1 is none of .*, nor a chat"),
    ],
)
def test_what_is_no_chat_is_named(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(write(tmp_path / "chats.jsonl", [record]))


def test_what_parquet_adds_to_structs_is_not_learned(tmp_path: Path) -> None:
    calls = [{"function": {"name": "f", "arguments": {argument: "x"}}} for argument in ("a", "b")]
    chats = [{"messages": [TALK[1], said("assistant", "", tool_calls=[call])], "tools": [TOOL]} for call in calls]
    table = pyarrow.Table.from_pylist(chats)
    assert table["messages"][0].as_py()[1]["tool_calls"][0]["function"]["arguments"] == {"a": "x", "b": None}
    parquet.write_table(table, file := tmp_path / "chats.parquet")
    found = examples.load(compose({"sft": {"held_out": 0.0}}), [file], QWEN)
    for text, argument in zip(trained(found), ("a", "b"), strict=True):
        assert f'"arguments": {{"{argument}": "x"}}' in text


def test_a_line_that_is_no_json_is_named_and_an_empty_one_is_passed_over(tmp_path: Path) -> None:
    chat = json.dumps({"messages": TALK})
    (file := tmp_path / "chats.jsonl").write_text(f"{chat}\n\n{chat}\n")
    assert len(load(file).trained) == 2
    file.write_text(f"{chat}\n{{oops\n")
    with pytest.raises(ConfigError, match="record 2 is none of"):
        load(file)


def test_messages_are_what_the_gateway_would_read(tmp_path: Path) -> None:
    def prompt(messages: list[dict[str, Any]]) -> list[int]:
        [one] = load(write(tmp_path / "chats.jsonl", [{"messages": messages}])).trained
        return [int(token) for token in one.sequences[0].token_ids]

    def parts(*texts: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in texts]

    of_parts = [
        said("developer", parts("be ", "brief")),
        said("user", parts("how many?")),
        said("assistant", parts("select 1")),
    ]
    assert prompt(of_parts) == prompt(TALK[:3])


@pytest.mark.parametrize(
    ("written", "same_as"),
    [
        ({"reasoning": "why"}, {"reasoning_content": "why"}),
        ({"content": [{"type": "text", "text": "why"}]}, {"content": "why"}),
        (
            {"content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}},
            {"content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
        ),
    ],
)
def test_other_names_of_one_thing_are_learned_as_it_is(
    written: dict[str, Any], same_as: dict[str, Any], tmp_path: Path
) -> None:
    def learned(answer: dict[str, Any]) -> list[str]:
        add = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
        offered = (
            {"functions": [add]} if "function_call" in answer else {"tools": [{"type": "function", "function": add}]}
        )
        chat = {"messages": [TALK[1], said("assistant", "yes") | answer], **offered}
        found = examples.load(compose({"sft": {"held_out": 0.0}}), [write(tmp_path / "chats.jsonl", [chat])], QWEN)
        return trained(found)

    [text] = learned(written)
    assert [text] == learned(same_as)
    assert "why" in text or "add" in text


def test_images_are_left_out(tmp_path: Path) -> None:
    seen = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,xx"}}]}
    chats = [{"messages": TALK[:3]}, {"messages": [seen, TALK[2]]}]
    found = load(write(tmp_path / "chats.jsonl", chats))
    assert (len(found.trained), found.calls["images"]) == (1, 1)


def test_the_page_shows_a_chat(tmp_path: Path) -> None:
    [line] = re.findall(r"^```json\n(.*?)^```", (ROOT / "docs" / "sft.md").read_text(), re.MULTILINE | re.DOTALL)
    found = load(write(tmp_path / "chats.jsonl", [json.loads(line)]))
    assert [text.replace("<|im_end|>", "|") for text in trained(found)] == ["SELECT count(*) FROM cats|"]
