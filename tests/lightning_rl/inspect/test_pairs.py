"""Preference pairs: the best and the worst of a group, where they first part, as messages and as ids."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from lightning_rl.inspect.export import COLUMNS, export
from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.media import Placed
from tests.adapters.words import ids, say
from tests.lightning_rl.inspect.runs import open_store, record

GOOD = [say(1, "a", "b"), say(2, "c", "right", after=1)]
BAD = [say(1, "a", "b"), say(2, "c", "wrong", after=1)]
Group = list[tuple[list[Call], float | None]]


def pairs_of(folder: Path, *groups: Group, mode: str = "train", **which: Any) -> list[dict[str, Any]]:
    with open_store(folder) as store:
        for number, group in enumerate(groups):
            for index, (calls, reward) in enumerate(group):
                record(store, f"{number}-{index}", calls, reward=reward, group_id=f"g{number}", mode=mode)
    file, count = export(folder, "pairs", "jsonl", folder, **which)
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(found) == count
    return found


def test_a_pair_stands_where_best_and_worst_first_part(tmp_path: Path) -> None:
    other = [say(1, "a", "x")]
    [pair] = pairs_of(tmp_path, [(BAD, 0.0), (other, 0.5), (GOOD, 1.0)])
    assert set(pair) == set(COLUMNS["pairs"])
    assert (pair["group_id"], pair["chosen_reward"], pair["rejected_reward"]) == ("g0", 1.0, 0.0)
    assert [message["content"] for message in pair["prompt"]] == ["a", "b", "c"]
    assert (pair["chosen"], pair["rejected"]) == (
        [{"role": "assistant", "content": "right"}],
        [{"role": "assistant", "content": "wrong"}],
    )
    assert pair["prompt_ids"] == ids("a b c")
    assert (pair["chosen_ids"], pair["rejected_ids"]) == (ids("right"), ids("wrong"))
    assert (pair["chosen_call_id"], pair["rejected_call_id"]) == ("0-2-c2", "0-0-c2")


def test_answers_to_other_images_are_no_pair(tmp_path: Path) -> None:
    def shown(answer: str, image: str) -> list[Call]:
        return [replace(say(1, "look", answer), media=[Placed(0, 1, image)])]

    found = pairs_of(
        tmp_path,
        [(shown("right", "cat"), 1.0), (shown("wrong", "dog"), 0.0)],
        [(shown("right", "cat"), 1.0), (shown("wrong", "cat"), 0.0)],
    )
    assert [pair["group_id"] for pair in found] == ["g1"]


@pytest.mark.parametrize(
    "group",
    [
        [(GOOD, 1.0), (BAD, 1.0)],
        [(GOOD, 1.0), (BAD, None)],
        [(GOOD, 1.0)],
        [(GOOD, 1.0), ([say(1, "a", "b"), say(2, "otherwise", "wrong", after=1)], 0.0)],
        [(GOOD, 1.0), (GOOD, 0.0)],
        [(GOOD, 1.0), ([], 0.0)],
        [([say(1, "", "", exact=False)], 1.0), (BAD, 0.0)],
        [([say(1, "a", "x", trainable=False)], 1.0), ([say(1, "a", "y", trainable=False)], 0.0)],
    ],
)
def test_a_group_without_a_preference_of_the_model_gives_none(group: Group, tmp_path: Path) -> None:
    assert pairs_of(tmp_path, group) == []


def test_mode_and_limit_narrow_them(tmp_path: Path) -> None:
    groups: list[Group] = [[(GOOD, 1.0), (BAD, 0.0)]] * 3
    assert [pair["group_id"] for pair in pairs_of(tmp_path, *groups, limit=2)] == ["g0", "g1"]
    file, count = export(tmp_path, "pairs", "jsonl", tmp_path, mode="val")
    assert (count, file.read_text()) == (0, "")


def test_arguments_are_objects_for_chat_templates_and_parquet_has_the_same(tmp_path: Path) -> None:
    called = {"id": "call_1", "type": "function", "function": {"name": "run", "arguments": '{"n": 1}'}}
    said = {"role": "assistant", "content": "", "tool_calls": [called]}
    attributes = {2: {semconv.OUTPUT_MESSAGES: [said]}}
    with open_store(tmp_path) as store:
        record(store, "good", GOOD, reward=1.0, group_id="g", forks=attributes)
        record(store, "bad", BAD, reward=0.0, group_id="g")
    file, _ = export(tmp_path, "pairs", "jsonl", tmp_path)
    [plain] = [json.loads(line) for line in file.read_text().splitlines()]
    assert plain["chosen"][0]["tool_calls"][0]["function"]["arguments"] == {"n": 1}
    file, _ = export(tmp_path, "pairs", "parquet", tmp_path)
    [flat] = pq.read_table(file).to_pylist()
    assert json.loads(flat["chosen"]) == plain["chosen"]
    assert flat["prompt_ids"] == plain["prompt_ids"]
