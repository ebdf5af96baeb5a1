"""What the page is told of one rollout, of tokens, of a folder; and what it is told of broken ones."""

import base64
import json
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightning_rl.algorithms.evaluation import evaluate
from lightning_rl.cli import dashboard
from lightning_rl.files import owned
from lightning_rl.inspect.recorded import NotRecorded
from lightning_rl.inspect.rollout_source import PagedStore
from lightning_rl.processes.service_keys import ADMIN_KEY
from lightning_rl.store.contract import Rollout, RolloutConfig
from lightning_rl.telemetry import made_with
from lightning_rl.trajectories import step_record
from lightning_rl.trajectories.step_record import CallRecord, RolloutRecord
from lightning_rl.viewer import live, run_folder, tokens
from lightning_rl.viewer.index import Index
from lightning_rl.viewer.indexer import Indexer
from lightning_rl.viewer.live import waiting
from lightning_rl.viewer.run import ViewedRun, encoded
from lightning_rl.viewer.source import ServerSource
from lightning_rl_adapters import semconv
from tests.lightning_rl.inspect.runs import open_store
from tests.lightning_rl.viewer.viewed import PIXEL, PNG, SVG, add_rollout, read, record_of, small_run, turn, with_image


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ViewedRun]:
    viewed = read(small_run(tmp_path / "run"))
    yield viewed
    viewed.close()


def test_a_rollout_has_its_conversation_forest_credit_and_time(run: ViewedRun) -> None:
    told = run.answer("rollouts/train-2-1", {})
    [attempt] = told["attempts"]
    first, second = attempt["calls"]
    assert (first["messages"][0]["content"], first["answer"][0]["content"]) == (
        "count the lakes",
        "SELECT 1 FROM lakes",
    )
    assert (first["continues"], second["continues"]) == (None, 1)
    assert first["training"]["advantage"] == 1.0
    assert first["end"] - first["start"] == pytest.approx(0.5, abs=1e-6)
    assert [row["reward"] for row in told["group"]] == [1.0, 0.0]
    assert told["training"]["step"] == 2


def test_a_call_tells_how_much_of_its_time_was_the_engines(tmp_path: Path) -> None:
    talk = [turn("a", "b", attributes={semconv.ENGINE_US: [100_000, 400_000]}), turn("c", "d")]
    with open_store(tmp_path) as store:
        add_rollout(store, "timed", talk)
    viewed = read(tmp_path)
    first, second = viewed.answer("rollouts/timed", {})["attempts"][0]["calls"]
    viewed.close()
    assert [at - first["start"] for at in first["engine"]] == pytest.approx([0.1, 0.4], abs=1e-5)
    assert "engine" not in second  # recorded before calls had it, or of a backend


def test_a_failure_has_its_error_and_what_it_printed(run: ViewedRun) -> None:
    told = run.answer("rollouts/train-2-failed", {})
    assert told["error"] == "ValueError: no such table"
    assert told["attempts"][0]["log"] == {"stdout": "printed by it", "stderr": "", "traceback": "Traceback: line 7"}


def test_tokens_come_in_columns_with_what_sampler_and_trainer_said(run: ViewedRun) -> None:
    told = run.answer("rollouts/train-2-1/calls/1/2", {})
    sampled = told["tokens"]["sampled"]
    assert sampled["id"] == [4, 5]
    assert sampled["mask"] == [1, 0]
    assert sampled["logprob"] == [-0.5, -1.5]
    assert sampled["trainer"] == [-0.75, None]
    assert sampled["advantage"] == [1.0, None]
    assert sampled["version"] == [1, 1]
    assert told["tokens"]["prompt"]["id"] == [1, 2, 3]
    assert [message["content"] for message in told["request"]["messages"]] == [
        "count the lakes", "SELECT 1 FROM lakes", "empty",
    ]  # fmt: skip
    assert run.answer("rollouts/train-2-1/calls/1/2", {"start": "1"})["tokens"]["sampled"]["id"] == [5]


@pytest.mark.parametrize("path", ["calls/1/9", "calls/2/1"])
def test_a_call_that_there_is_not_is_named(run: ViewedRun, path: str) -> None:
    with pytest.raises(NotRecorded, match="has no call"):
        run.answer(f"rollouts/train-2-1/{path}", {})


def test_a_character_of_several_tokens_is_whole_on_its_first() -> None:
    pieces = {1: b"a", 2: "é".encode()[:1], 3: "é".encode()[1:], 4: b" b"}

    def decode(ids: list[int]) -> str:
        return b"".join(pieces[one] for one in ids).decode(errors="replace")

    assert tokens.texts([1, 2, 3, 4], decode) == ["a", "é", "", " b"]
    assert tokens.texts([1, 2], decode) == ["a", "\ufffd"]
    assert tokens.texts([1, 2], None) == [None, None]


def test_images_are_shown_where_they_are_raster_images_alone(tmp_path: Path) -> None:
    import hashlib

    drawn = hashlib.sha256(SVG).hexdigest()
    with open_store(tmp_path) as store:
        add_rollout(store, "seen", [with_image(), with_image(drawn)], images=[PNG, SVG])
    run = read(tmp_path)
    assert run.answer(f"rollouts/seen/images/{PIXEL}", {}) == f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    with pytest.raises(NotRecorded, match="no PNG, JPEG, GIF or WebP"):
        run.answer(f"rollouts/seen/images/{drawn}", {})
    with pytest.raises(NotRecorded, match="has no image"):
        run.answer("rollouts/seen/images/none", {})
    run.close()


def test_long_texts_are_cut_with_a_note_and_the_call_has_them_whole(tmp_path: Path) -> None:
    long = "x" * 100_000
    with open_store(tmp_path) as store:
        add_rollout(store, "long", [turn(long, "ok")])
    run = read(tmp_path)
    shown = run.answer("rollouts/long", {})["attempts"][0]["calls"][0]["messages"][0]["content"]
    assert shown.endswith("… 84,000 more characters")
    assert run.answer("rollouts/long/calls/1/1", {})["messages"][0]["content"] == long
    run.close()


def test_forks_and_branches_are_told_with_their_cause(tmp_path: Path) -> None:
    cause = {semconv.FORK_CAUSE: "edited_text", semconv.FORK_AT: {"message": 1}}
    talk = [turn("a", "b"), turn("c", "d", after=1), turn("e", "f", after=1), turn("g", "h", after=0, attributes=cause)]
    with open_store(tmp_path) as store:
        add_rollout(store, "forked", talk)
    run = read(tmp_path)
    forks = run.answer("rollouts/forked", {})["attempts"][0]["forks"]
    assert [(fork["calls"], fork["cause"], fork["after"]) for fork in forks] == [
        ([2, 3], None, 1), ([4], "edited_text", None),
    ]  # fmt: skip
    assert run.answer("rollouts", {})["rollouts"][0]["forks"] == 1
    run.close()


def test_the_summary_has_state_steps_and_the_best_value(run: ViewedRun) -> None:
    told = run.answer("summary", {})
    assert (told["state"], told["steps"], told["problem"]) == ("stopped", 2, None)
    assert (told["best"]["label"], told["best"]["value"], told["best"]["step"]) == ("held-out reward", 1.0, 2)
    assert told["account"]["trained"] == 200.0
    assert run.run_dir is not None
    (run.run_dir / "finished.json").write_text("{}")
    assert run.answer("summary", {})["state"] == "finished"


def test_a_run_that_stopped_names_the_checkpoint_that_it_would_go_on_from(run: ViewedRun) -> None:
    assert run.answer("now", {})["checkpoint"] is None
    assert run.run_dir is not None
    for name in ("step-2", "step-10", "step-12"):
        (run.run_dir / "checkpoints" / name).mkdir(parents=True)
    (run.run_dir / "checkpoints" / "step-2" / "manifest.json").touch()
    (run.run_dir / "checkpoints" / "step-10" / "manifest.json").touch()
    assert run.answer("now", {})["checkpoint"] == "step-10"


def test_a_run_that_is_held_is_running_and_looking_never_takes_its_lock(run: ViewedRun) -> None:
    assert run.run_dir is not None
    with owned(run.run_dir):
        assert run_folder.state(run.run_dir) == "running"
    assert run_folder.state(run.run_dir) == "stopped"
    (run.run_dir / "evaluations.json").write_text("[]")
    assert run_folder.state(run.run_dir) == "finished", "as a baseline ends"


def test_what_a_baseline_measured_is_told_in_words(run: ViewedRun) -> None:
    assert run.run_dir is not None
    assert run.answer("now", {})["evaluations"] == run.answer("summary", {})["evaluations"] == []
    measured = [evaluate("train", {"a": [1.0], "b": [0.0], "c": [1.0]}), evaluate("val", {"a": [0.5]}, failed=1)]
    (run.run_dir / "evaluations.json").write_bytes(msgspec.json.encode(measured))
    told = run.answer("summary", {})["evaluations"]
    assert told == run.answer("now", {})["evaluations"] == [str(one) for one in measured]
    assert told[0].startswith("train: accuracy 0.667, 95 % confidence 0.208 to 0.939 (3 tasks, 3 rollouts)")
    assert "unknown of fewer than two tasks" in told[1]
    for broken in ("{}", "[", '[{"dataset": "train"}]', '[{"mean": "high"}]'):
        (run.run_dir / "evaluations.json").write_text(broken)
        assert "evaluations.json is no baseline's" in run.answer("summary", {})["problem"]


def test_curves_go_by_step_and_by_time(tmp_path: Path) -> None:
    rows = [{"step": 1.0, "timing_s/step": 2.0, "r": 0.5}, {"step": 2.0, "timing_s/step": 3.0, "r": 0.75}]
    assert run_folder.series(rows, ["r", "none"]) == {
        "r": {"step": [1.0, 2.0], "seconds": [2.0, 5.0], "value": [0.5, 0.75]}
    }
    clocked = [rows[0] | {"time": 1000.0}, rows[1] | {"time": 1007.0}]  # 4 s of these in no step
    assert run_folder.series(clocked, ["r"])["r"]["seconds"] == [2.0, 9.0]
    assert run_folder.series([rows[0], clocked[1]], ["r"])["r"]["seconds"] == [2.0, 5.0], "the clock came later"
    set_back = [clocked[0], clocked[1] | {"time": clocked[0]["time"] - 3600.0}]
    assert run_folder.series(set_back, ["r"])["r"]["seconds"] == [2.0, 5.0]


def test_no_key_is_told(tmp_path: Path) -> None:
    run_dir = small_run(tmp_path / "run")
    (run_dir / "admin.key").write_text("the-admin-key-of-this-run")
    (run_dir / "config.yaml").write_text(
        "gateway:\n  api_key: sk-hidden\n  store: postgresql://me:hunter2@host/db\n  max_tokens: 7\ntrainer: {}\n"
        "sandbox:\n  environment: {PGPASSWORD: hunter3, GH: ghp-4}\n  options: [API_TOKEN=tok-5, max_tokens=7]\n"
    )
    run = read(run_dir)
    said = b"".join(encoded(run.answer(path, {})) for path in ("summary", "config", "now", "doctor", "choices"))
    for secret in (b"the-admin-key-of-this-run", b"sk-hidden", b"hunter", b"ghp-4", b"tok-5"):
        assert secret not in said
    assert run.settings()["gateway.max_tokens"] == 7
    assert run.settings()["sandbox.environment.GH"] == "(set, not shown)"
    assert run.settings()["sandbox.options"] == ["API_TOKEN=***", "max_tokens=7"]
    secret = msgspec.structs.replace(made_with.here(), command="python train.py --key=sk-argued")
    (run_dir / made_with.FILE).write_bytes(msgspec.json.encode(secret))
    [session] = run.answer("config", {})["made_with"]
    assert session["versions"] == made_with.versions()
    assert "sk-argued" not in str(session)
    run.close()


def test_a_line_of_metrics_that_is_half_or_broken_is_left_out(run: ViewedRun, caplog: pytest.LogCaptureFixture) -> None:
    assert run.run_dir is not None
    file = run.run_dir / "metrics.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"step": 3, "critic/sc')
    assert run.answer("summary", {})["steps"] == 2
    file.write_bytes(whole + b"nonsense\n")
    assert run.answer("summary", {})["steps"] == 2
    assert "metrics.jsonl: line 4 is no step's metrics, and left out" in caplog.text


def looked(run_dir: Path) -> Indexer:
    run = ViewedRun(run_dir)
    run.indexer.begun.wait(20)
    run.close()
    return run._indexer  # type: ignore[return-value]


def test_a_newer_store_is_told_in_words(tmp_path: Path) -> None:
    run_dir = small_run(tmp_path / "run")
    with sqlite3.connect(run_dir / "store.db") as store:
        store.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    store.close()
    problem = looked(run_dir).problem
    assert problem is not None
    assert "schema version 99" in problem


def test_a_broken_store_and_a_folder_without_one_are_told_in_words(tmp_path: Path) -> None:
    for name, content, told in (("broken", b"no database" * 99, "cannot be read"), ("none", None, "holds no run")):
        run_dir = tmp_path / name
        run_dir.mkdir()
        (run_dir / "metrics.jsonl").write_bytes(b'{"step":1,"critic/score/mean":0.5}\n')
        if content is not None:
            (run_dir / "store.db").write_bytes(content)
        problem = looked(run_dir).problem
        assert problem is not None
        assert told in problem


def test_a_damaged_step_record_is_told_and_the_rest_is_shown(tmp_path: Path) -> None:
    run_dir = small_run(tmp_path / "run")
    (run_dir / "steps" / "000001.msgpack").write_bytes(b"half")
    run = read(run_dir)
    problem = run.answer("summary", {})["problem"]
    assert run.answer("rollouts", {})["problem"] == problem
    assert "000001.msgpack cannot be read" in problem
    assert run.index.record_of("train-2-1") is not None
    run.indexer.look()
    assert run.answer("summary", {})["problem"] == problem, "as long as it is so"
    run.close()


def test_of_several_policies_each_calls_record_is_shown(tmp_path: Path) -> None:
    """The run's first policy made the first call, a frozen one the second."""
    run_dir = small_run(tmp_path / "run")
    step_record.write(run_dir, record_of(2, {"train-2-1": (1.0, 1.0, 1)}))
    run = read(run_dir)
    frozen = CallRecord(weight=0.0, mini_batch=None, trained_tokens=0, left_out="frozen")
    others = RolloutRecord(rollout_id="train-2-1", group_id="g", reward=1.0, calls={"train-2-1-c2": frozen})
    record = msgspec.structs.replace(record_of(2, {}), rollouts=[others])
    step_record.write(run_dir, record, "executor")  # later, as a run does
    run.indexer.look()
    [attempt] = run.answer("rollouts/train-2-1", {})["attempts"]
    first, second = (call["training"] for call in attempt["calls"])
    assert (first["advantage"], first["left_out"]) == (1.0, None)
    assert second["left_out"] == "frozen"
    run.close()


def test_a_run_is_read_once_however_many_ask_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Indexer] = []

    def slow(**how: Any) -> Index:
        time.sleep(0.05)
        return Index(**how)

    monkeypatch.setattr(Indexer, "start", lambda indexer: begun.append(indexer))
    monkeypatch.setattr("lightning_rl.viewer.run.Index", slow)
    run = ViewedRun(small_run(tmp_path / "run"))
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(lambda _: run.index, range(4))]
    assert len(begun) == 1
    assert {id(each) for each in found} == {id(run.index)}


def test_a_run_that_goes_on_has_another_server(tmp_path: Path) -> None:
    (tmp_path / "admin.key").write_text("k")
    found: list[PagedStore | None] = [None]
    for url in ("http://127.0.0.1:9/", "http://127.0.0.1:9", "http://127.0.0.1:10"):
        (tmp_path / "server.url").write_text(url)
        found.append(live.server_of(tmp_path, found[-1]))
    _, first, same, other = found
    assert first is same is not None is not other
    assert other is not None
    assert (first.url, other.url) == ("http://127.0.0.1:9", "http://127.0.0.1:10")
    other.close()


def test_runs_are_found_below_a_folder_and_a_folder_without_any_is_named(tmp_path: Path) -> None:
    small_run(tmp_path / "project" / "one")
    small_run(tmp_path / "two")
    assert {path.name for path in run_folder.runs_below([tmp_path])} == {"one", "two"}
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotRecorded, match="there is no run in"):
        run_folder.runs_below([tmp_path / "empty"])
    with pytest.raises(NotRecorded, match="there is no folder"):
        run_folder.runs_below([tmp_path / "nowhere"])


def test_what_is_waited_for_is_said() -> None:
    paused: dict[str, Any] = {"models": {"policy": {"paused": True, "waiting": 3}}, "engines": []}
    said = waiting(paused, {"running": 4, "queued": 2}, "running")
    assert [(each["who"], each["what"].partition(":")[0]) for each in said] == [
        ("calls of policy", "new weights"), ("3 calls", "a place at the engines of policy"),
        ("the trainer", "4 rollouts that run, 2 queued"),
    ]  # fmt: skip
    assert waiting(None, {"queued": 2}, "running")[0]["who"] == "2 rollouts"
    assert waiting(paused, {}, "finished") == []
    idle = {"claims_waiting": 2}
    assert waiting(idle, {}, "running")[0]["what"].startswith("the trainer:")
    assert waiting(idle, {}, "running", trains=False) == [{"who": "2 runners", "what": "rollouts: none is queued"}]
    assert waiting(idle, {"running": 1}, "running", trains=False)[0]["who"] == "whoever queued them"


def test_answers_are_json_that_every_browser_reads() -> None:
    told = json.loads(encoded({"nan": float("nan"), "half": "\ud83d", "path": Path("x")}))
    assert told["nan"] is None
    assert told["path"] == "x"


class _Pages:
    """A server's list of rollouts, a page at a time."""

    def __init__(self, *pages: list[Rollout]) -> None:
        self.pages = list(pages)
        self.asked: list[str | None] = []

    def rewarded(self, after: int | None) -> tuple[list[str], int]:
        return [], 0

    def find(self, rollout_ids: list[str]) -> list[Rollout]:
        return [each for page in self.pages for each in page if each.rollout_id in rollout_ids]

    def page(self, cursor: str | None, limit: int) -> tuple[list[Rollout], str | None]:
        self.asked.append(cursor)
        at = int(cursor or 0)
        return self.pages[at], str(at + 1) if at + 1 < len(self.pages) else None


def _rollout(rollout_id: str) -> Rollout:
    return Rollout(
        rollout_id=rollout_id, task={}, mode="train", status="queued", group_id=None, agent=None, resources_id=None,
        config=RolloutConfig(), metadata={}, attempt_count=0, created_at=0.0,
    )  # fmt: skip


def test_of_a_servers_rollouts_those_of_the_run_are_listed_each_once() -> None:
    server: Any = _Pages([_rollout("a.one"), _rollout("b.two")], [_rollout("c.one")])
    source = ServerSource(server, "one")
    assert [[rollout.rollout_id for _, rollout in page] for page in source.arrived()] == [["a.one"], ["c.one"]]
    server.pages[1].append(_rollout("d.one"))
    assert [(position, rollout.rollout_id) for page in source.arrived() for position, rollout in page] == [(3, "d.one")]
    assert server.asked == [None, "1", "1"]
    server.pages[0][0] = msgspec.structs.replace(_rollout("a.one"), status="running")
    [changed] = source.changed({"a.one": 1, "c.one": 2})
    assert [(place, rollout.status) for place, rollout in changed] == [(1, "running"), (2, "queued")]


def test_a_run_that_attached_to_a_server_is_looked_at_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "server.url").write_text("http://127.0.0.1:1/")
    (tmp_path / "run.id").write_text("one")
    monkeypatch.setenv(ADMIN_KEY, "an-admin-key-of-32-characters-xx")
    [run] = dashboard._runs([tmp_path], None)
    assert [store.url for store in run._stores] == ["http://127.0.0.1:1"]
    (tmp_path / "server.url").write_text("http://127.0.0.1:1\nhttp://127.0.0.1:2")
    [run] = dashboard._runs([tmp_path], None)
    assert [store.url for store in run._stores] == ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    monkeypatch.delenv(ADMIN_KEY)
    [run] = dashboard._runs([tmp_path], None)
    assert run._stores == []
