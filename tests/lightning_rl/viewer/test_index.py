"""Lists of rollouts: filters, sorting by anything, pages behind a key, words; and a run that goes on."""

import itertools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from lightning_rl.inspect.recorded import NotRecorded
from lightning_rl.store.contract import ErrorInfo, Finish, Reward, Rollout, RolloutConfig, RolloutRequest
from lightning_rl.trajectories import step_record
from lightning_rl.viewer import search
from lightning_rl.viewer.index import Called, Index, row_of
from lightning_rl.viewer.run import ViewedRun
from lightning_rl.viewer.search import WrongQuery
from lightning_rl_adapters import semconv
from tests.lightning_rl.inspect.runs import open_store
from tests.lightning_rl.viewer.viewed import add_rollout, read, record_of, small_run, turn


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ViewedRun]:
    viewed = read(small_run(tmp_path_factory.mktemp("small")))
    yield viewed
    viewed.close()


def names(run: ViewedRun, **query: Any) -> list[str]:
    return [row["rollout_id"] for row in run.answer("rollouts", {k: str(v) for k, v in query.items()})["rollouts"]]


def test_the_newest_come_first_and_each_has_what_became_of_it(run: ViewedRun) -> None:
    assert names(run)[:3] == ["train-3-open", "val-2", "train-2-failed"]
    [row] = run.answer("rollouts", {"text": "lakes", "step": "2", "reward_min": "1"})["rollouts"]
    told = ("status", "mode", "group_id", "reward", "calls", "sampled", "trained", "advantage", "trained_step")
    assert [row[name] for name in told] == ["succeeded", "train", "g2", 1.0, 2, 4, 2, 1.0, 2]


def test_what_a_failed_rollout_counted_with_is_in_its_group(tmp_path: Path) -> None:
    failed = ErrorInfo(type="ValueError", message="no such table")
    with open_store(tmp_path) as store:
        add_rollout(store, "well", [turn("a", "b")], group="g", reward=1.0)
        add_rollout(store, "badly", [turn("a", "c")], group="g", reward=None, error=failed)
    step_record.write(tmp_path, record_of(1, {"well": (1.0, 1.0, 1), "badly": (0.0, -1.0, 1)}))
    run = read(tmp_path)
    [group] = run.answer("groups", {})["groups"]
    assert (group["mean"], group["low"], group["high"]) == (0.5, 0.0, 1.0)
    run.close()


def test_tokens_of_a_helper_count_only_where_no_call_has_token_ids(tmp_path: Path) -> None:
    reported = {"response_ids": [], "logprobs": [], "versions": [], "model": "judge"}
    judge = turn("is it right?", "yes", after=0, **reported, attributes={semconv.OUTPUT_TOKENS: 1000})
    with open_store(tmp_path) as store:
        add_rollout(store, "judged", [turn("a", "b"), judge])
        add_rollout(store, "without-ids", [judge])
    with closing(read(tmp_path)) as run:
        rows = {row["rollout_id"]: row["sampled"] for row in run.answer("rollouts", {"sort": "-sampled"})["rollouts"]}
    assert rows == {"judged": 2, "without-ids": 1000}


def test_filters_go_together(run: ViewedRun) -> None:
    assert names(run, mode="val") == ["val-2", "val-0"]
    assert names(run, status="failed") == ["train-2-failed"]
    assert names(run, step=1, reward_max=0.5) == ["train-1-0"]
    assert names(run, group_id="g1", sort="position") == ["train-1-0", "train-1-1"]
    assert names(run, excluded="validation", sort="position") == ["val-0", "val-2"]
    assert names(run, excluded="open") == ["train-3-open"]
    assert names(run, mode="val", status="failed") == []


def test_a_search_finds_words_of_tasks_prompts_answers_and_errors(run: ViewedRun) -> None:
    assert names(run, text="count cars") == ["val-2"]
    assert names(run, text="BIRDS") == names(run, text='"such table"') == ["train-2-failed"]
    assert names(run, text='"from lakes" done', step=1, sort="position") == ["train-1-0", "train-1-1"]
    assert names(run, text='"lakes from"') == []
    assert names(run, text="lak", step=1) == ["train-1-1", "train-1-0"]  # the last word may go on
    assert names(run, text="count(*) ' OR 1=1 --") == []
    assert names(run, text='"') == []


def test_a_run_that_is_not_searched_is_read_without_its_words(tmp_path: Path) -> None:
    run = ViewedRun(small_run(tmp_path))
    run.start(behind=False, searched=False)
    with closing(run):
        with run.index.reading() as connection:
            assert connection.execute("SELECT count(*) FROM texts").fetchone()[0] == 0
        [row] = run.answer("rollouts", {"step": "2", "group_id": "g2", "reward_min": "1"})["rollouts"]
        assert (row["calls"], row["sampled"]) == (2, 4)


def test_a_search_finds_parts_of_words(run: ViewedRun) -> None:
    whole = names(run, text="lakes", limit=500)
    assert len(whole) > 3
    assert names(run, text="*ake", limit=500) == names(run, text="*AKES", limit=500) == whole
    assert names(run, text="*ake *count", limit=500) == names(run, text="lakes count", limit=500)
    assert names(run, text="ake") == names(run, text="*zzz") == names(run, text='"*ake"') == []
    assert names(run, text="*") == names(run)  # as the first key of a part that is being written
    with pytest.raises(WrongQuery, match="3 characters or more"):
        names(run, text="*ke")


def test_a_part_of_very_many_words_is_found_in_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    viewed = read(small_run(tmp_path / "run"))
    monkeypatch.setattr(search, "_WORDS_AT_ONCE", 1)
    several = names(viewed, text="*ars")
    monkeypatch.setattr(search, "_MOST_WORDS", 0)
    with pytest.raises(WrongQuery, match="more than 0 different words have ars in them"):
        names(viewed, text="*ars")
    viewed.close()
    assert several == ["val-2", "val-0"]  # cars, in their tasks


@pytest.mark.parametrize("column", search.COLUMNS)
@pytest.mark.parametrize("down", ["", "-"])
def test_pages_behind_a_key_are_the_whole_list_sorted_by_anything(run: ViewedRun, column: str, down: str) -> None:
    whole = names(run, sort=down + column, limit=500)
    assert sorted(whole) == sorted(names(run))
    paged: list[str] = []
    after = ""
    while after is not None:
        page = run.answer("rollouts", {"sort": down + column, "limit": "2", "after": after})
        paged += [row["rollout_id"] for row in page["rollouts"]]
        after = page["next"]
    assert paged == whole
    values = [row[column] for row in run.answer("rollouts", {"sort": down + column, "limit": "500"})["rollouts"]]
    known = list(itertools.takewhile(lambda value: value is not None, values))
    assert known == sorted(known, reverse=bool(down))
    assert values[len(known) :] == [None] * (len(values) - len(known))  # what has no value comes last


@pytest.mark.parametrize(
    "query", [{"sort": "reward; DROP TABLE rollouts"}, {"after": "nonsense"}, {"step": "three"}, {"sort": "record"},
     {"limit": "-1"}, {"limit": "0"}, {"after": "[0, Infinity]"}, {"after": f"[0, {10**20}]"}, {"limit": "nan"},
     {"step": "inf"}, {"after": '[{"a": 1}, 2]'}, {"limitt": "3"}]
)  # fmt: skip
def test_a_wrong_query_is_refused_in_words(run: ViewedRun, query: dict[str, str]) -> None:
    with pytest.raises(
        WrongQuery, match=r"there is no column|there is no filter 'limitt'|is no key|is no number|is below 1"
    ):
        run.answer("rollouts", query)
    assert run.answer("rollouts", {"text": "\0"})["rollouts"] is not None
    assert len(names(run)) == 8


def test_choices_say_how_many_rollouts_each_has(run: ViewedRun) -> None:
    known = run.answer("choices", {})
    assert known["mode"] == {"train": 6, "val": 2}
    assert known["status"] == {"succeeded": 6, "failed": 1, "running": 1}
    assert known["excluded"]["validation"] == 2
    assert (known["steps"], known["rollouts"]) == ([0, 3], 8)


def test_groups_and_tasks_stand_side_by_side(run: ViewedRun) -> None:
    found = run.answer("groups", {"step": "2"})
    assert [(each["group_id"], each["n"], each["mean"], each["low"], each["high"]) for each in found["groups"]] == [
        ("g2", 2, 0.5, 0.0, 1.0)
    ]
    assert [row["advantage"] for row in run.answer("groups/g2", {})["rollouts"]] == [1.0, -1.0]
    [task] = run.answer("tasks", {})["tasks"]
    assert (task["first"], task["last"], task["before"], task["after"]) == (0, 2, 0.0, 1.0)
    rows = run.answer(f"tasks/{task['task_key']}", {"mode": "val"})["rollouts"]
    assert [row["rollout_id"] for row in rows] == ["val-0", "val-2"]


def test_a_run_that_goes_on_is_followed(tmp_path: Path) -> None:
    run_dir = small_run(tmp_path / "run")
    with open_store(run_dir) as store:
        add_rollout(store, "train-3-fails", [turn("seals", "dive")], step=3, group="g3", ends=False)
    run = read(run_dir)
    with open_store(run_dir) as store:
        failing = store.rollout("train-3-fails").attempt_id
        assert failing is not None
        error = ErrorInfo(type="OSError", message="the harbour is frozen")
        store.finish("train-3-fails", failing, Finish(status="failed", error=error))
        add_rollout(store, "train-3-new", [turn("otters", "swim")], step=3, group="g3")
        rollout = store.rollout("train-3-open")
        assert rollout.attempt_id is not None
        store.finish("train-3-open", rollout.attempt_id, Finish(status="succeeded", reward=0.25))
        done = store.rollout("train-2-1")
        assert done.attempt_id is not None
        store.add_rewards("train-2-1", done.attempt_id, [Reward(value=0.75)], late=True)
        store.enqueue([RolloutRequest(task="later", rollout_id="train-4-queued")])
    step_record.write(run_dir, record_of(3, {"train-3-new": (1.0, 2.0, 1)}))
    run.indexer.look()
    assert names(run)[:2] == ["train-4-queued", "train-3-new"]
    assert names(run, text="otters") == ["train-3-new"]
    assert names(run, text="oserror harbour") == ["train-3-fails"]
    by_name = {row["rollout_id"]: row for row in run.answer("rollouts", {})["rollouts"]}
    assert (by_name["train-3-open"]["status"], by_name["train-3-open"]["reward"]) == ("succeeded", 0.25)
    assert by_name["train-2-1"]["reward"] == 0.75
    assert by_name["train-3-new"]["advantage"] == 2.0
    step_record.write(run_dir, record_of(3, {"train-3-new": (1.0, -2.0, 1)}))  # a resumed run writes it anew
    run.indexer.look()
    assert run.answer("rollouts", {"text": "otters"})["rollouts"][0]["advantage"] == -2.0
    step_record.set_aside(run_dir, after=2)  # and one that goes on from an earlier step has it yet to do
    run.indexer.look()
    assert run.answer("rollouts", {"text": "otters"})["rollouts"][0]["advantage"] is None
    assert run.index.record_of("train-3-new") is None
    assert 3 not in run.index.steps()
    run.close()
    assert not run.index.path.exists()  # nothing is left behind


def test_one_rollout_is_read_without_its_steps_others(run: ViewedRun) -> None:
    found = run.index.record_of("train-1-1")
    assert found is not None
    step, record = found
    assert (step.step, step.rule, len(step.rollouts), record.reward) == (1, "final", 1, 1.0)


def ended(rollout_id: str, **more: Any) -> Rollout:
    return Rollout(
        rollout_id=rollout_id, group_id="g", agent=None, resources_id=None, config=RolloutConfig(), metadata={},
        attempt_count=1, created_at=1.0, ended_at=3.5,
        **{"task": "t", "mode": "train", "status": "succeeded", "counting_attempt_id": "a"} | more,
    )  # fmt: skip


def row(index: Index, rollout_id: str) -> dict[str, Any]:
    """What the index has of a rollout, with the reasons why something of it is not trained."""
    with index.reading() as connection:
        found = dict(connection.execute("SELECT * FROM rollouts WHERE rollout_id = ?", [rollout_id]).fetchone())
        reasons = connection.execute("SELECT reason FROM exclusions WHERE position = ?", [found["position"]])
        return found | {"reasons": sorted(reason for (reason,) in reasons)}


def test_what_a_step_made_of_a_rollout_stays_when_the_rollout_is_read_again() -> None:
    made = record_of(1, {"r": (1.0, 1.0, 3)})
    [of_rollout] = made.rollouts
    first, second, third = of_rollout.calls.values()
    calls = {
        "c1": replace(first, left_out="stale"),  # of which some was trained
        "c2": replace(second, trained_tokens=0, left_out="undelivered"),
        "c3": replace(third, trained_tokens=0),
    }
    checked = replace(of_rollout, rollout_id="checked", calls={}, left_out="validation")
    made = replace(made, rollouts=[replace(of_rollout, calls=calls, left_out="overlong"), checked])
    with closing(Index()) as index:
        for _ in range(2):
            index.put([(0, ended("r")), (1, ended("gone", status="cancelled", counting_attempt_id=None))])
            index.put([(2, ended("checked", mode="val"))])
            index.put_step(made, 1)
            index.put([(0, ended("r")), (2, ended("checked", mode="val"))])
        assert row(index, "r")["reasons"] == ["overlong", "undelivered"]
        assert row(index, "gone")["reasons"] == ["cancelled"]
        assert row(index, "checked")["reasons"] == ["validation"]


def test_calls_weigh_by_their_trained_tokens_and_penalties_are_no_part_of_the_reward() -> None:
    made = record_of(1, {"silent": (0.25, 1.0, 2), "told": (9.0, 1.0, 1)})
    first, second = made.rollouts[0].calls.values()
    calls = {"c1": first, "c2": replace(second, trained_tokens=3, advantage=-1.0)}
    silent = replace(made.rollouts[0], calls=calls, overlong_penalty=-0.5, kl_penalty=-0.25)
    with closing(Index()) as index:
        index.put([(0, ended("silent")), (1, ended("told", reward=0.5, rewards={"reward": 0.5, "style": 1.0}))])
        index.put_step(replace(made, rollouts=[silent, made.rollouts[1]]), 1)
        found = row(index, "silent")
        assert (found["trained"], found["advantage"], found["reward"], found["seconds"]) == (4, -0.5, 1.0, 2.5)
        told = row_of(row(index, "told"))
        assert told["reward"] == 0.5, "what the store has is the reward"
        assert told["rewards"] == {"reward": 0.5, "style": 1.0}


def test_calls_are_counted_and_what_they_say_may_be_no_unicode() -> None:
    call = Called(rollout_id="r", ids=2, reported=3, forked=True, text="an answer \ud83d")
    with closing(Index()) as index:
        index.put([(0, ended("r"))])
        index.put_calls([call, call, replace(call, forked=False), replace(call, rollout_id="unknown")])
        found = row(index, "r")
        assert (found["calls"], found["ids"], found["reported"], found["forks"]) == (3, 6, 9, 2)


def test_long_tasks_that_begin_alike_are_different_tasks() -> None:
    with closing(Index()) as index:
        index.put([(number, ended(f"r{number}", task="x" * 500 + end)) for number, end in enumerate("aab")])
        keys = [row(index, f"r{number}")["task_key"] for number in range(3)]
        assert keys[0] == keys[1] != keys[2]


def test_what_is_no_path_of_the_page_is_named(run: ViewedRun) -> None:
    with pytest.raises(NotRecorded, match="nothing at 'secrets'"):
        run.answer("secrets", {})
