"""Exported files hold what was recorded, number by number, whichever format; memory does not grow with the run."""

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
import urllib3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from lightning_rl.cli import app
from lightning_rl.control_plane.launch import launch
from lightning_rl.errors import Explained
from lightning_rl.files import write_whole
from lightning_rl.inspect import export as exports
from lightning_rl.inspect import recorded
from lightning_rl.inspect.export import COLUMNS, WHATS, What, arrow_schema, export
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Finish, Reward, RolloutRequest
from lightning_rl.store.sql import SqlStore
from lightning_rl.trajectories.trajectory import trajectory_of
from lightning_rl_adapters import otel, semconv
from lightning_rl_adapters.call import Call, VersionRange, calls_of, to_span
from lightning_rl_adapters.rows import Row
from lightning_rl_adapters.span import Span
from tests.adapters.words import attempt_of, ids, say
from tests.lightning_rl.inspect.runs import TALK, call_record, open_store, record, rollout_record, step_of, write_run
from tests.lightning_rl.runner.conftest import policy_of
from tests.random_examples import examples

DOC = Path(__file__).parents[3] / "docs" / "tools.md"
BRANCHED = [say(1, "a", "b c"), say(2, "d", "e", after=1), say(3, "d f", "g h i", after=1)]

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=6)
SAMPLED = st.lists(
    st.tuples(st.integers(0, 2**31 - 1), st.floats(max_value=0, width=32, allow_nan=False, allow_infinity=False)),
    max_size=6,
)


def read(file: Path) -> list[dict[str, Any]]:
    if file.suffix == ".parquet":
        return list(pq.read_table(file).to_pylist())
    return [json.loads(line) for line in file.read_text().splitlines()]


def exported(run_dir: Path, what: What, form: Any, **which: Any) -> list[dict[str, Any]]:
    file, count = export(run_dir, what, form, run_dir, **which)
    found = read(file)
    assert count == len(found)
    return found


@given(prompt=TOKENS, sampled=SAMPLED, more=SAMPLED)
@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_token_ids_and_logprobs_come_out_as_they_were_recorded(
    tmp_path_factory: pytest.TempPathFactory, prompt: list[int], sampled: list[Any], more: list[Any]
) -> None:
    run_dir = tmp_path_factory.mktemp("exact")
    first, second = (
        Call(
            call_id=f"c{number}", rollout_id="r", attempt_id="a1", number=number - 1, model="policy",
            parent_id="c1" if number == 2 else None, prompt_ids=prompt, response_ids=[token for token, _ in said],
            logprobs=[logprob for _, logprob in said], temperature=0.7, finish_reason="stop",
            versions=[VersionRange(3, 0, len(said))] if said else [],
        )
        for number, said in ((1, sampled), (2, more))
    )  # fmt: skip
    with open_store(run_dir) as store:
        claim = store.start(RolloutRequest(task=1, rollout_id="r"), "worker")
        store.add_spans(_moved([to_span(first), to_span(second)], claim.attempt.attempt_id))
        store.finish("r", claim.attempt.attempt_id, Finish(status="succeeded", reward=1.0))
    for form in ("parquet", "jsonl"):
        one, two = exported(run_dir, "calls", form)
        assert one["prompt_token_ids"] == prompt
        assert two["prompt_token_ids"] == prompt + first.response_ids + prompt
        assert two["new_prompt_tokens"] == len(prompt)
        for row, call in ((one, first), (two, second)):
            assert row["response_token_ids"] == call.response_ids
            assert row["response_logprobs"] == call.logprobs
            assert row["policy_versions"] == [3] * len(call.response_ids)
        [row] = exported(run_dir, "rows", form)
        assert row["token_ids"] == prompt + first.response_ids + prompt + second.response_ids
        context = [None] * len(prompt)
        assert row["logprobs"] == [*context, *(first.logprobs or []), *context, *(second.logprobs or [])]
    file, _ = export(run_dir, "spans", "otlp", run_dir / "otlp.jsonl")
    back = [
        span for line in file.read_bytes().splitlines() for span in otel.spans_of(otel.from_json(line), emitted=True)[0]
    ]
    assert len(back) == 2
    for span, call in zip(back, (first, second), strict=True):
        told = {name.removeprefix(otel.FOREIGN): value for name, value in span.attributes.items()}
        assert told[semconv.PROMPT_IDS] == call.prompt_ids
        assert told[semconv.RESPONSE_IDS] == call.response_ids
        assert told[semconv.LOGPROBS] == call.logprobs


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    with open_store(folder) as store:
        given = [Reward(value=0.25, name="polite", call_id="train-1-0-c2")]
        record(store, "train-1-0", TALK, reward=0.5, call_rewards=given)
        record(store, "train-1-1", BRANCHED, attempts=1)
        record(store, "val-1-0", TALK, mode="val")
        store.enqueue([RolloutRequest(task="waits", rollout_id="train-2-0", group_id="train-2")])
    return folder


@pytest.mark.parametrize("what", [what for what in WHATS if what != "pairs"])
def test_both_formats_say_the_same(run_dir: Path, what: What) -> None:
    flat, plain = exported(run_dir, what, "parquet"), exported(run_dir, what, "jsonl")
    texts = [name for name, kind in COLUMNS[what].items() if kind == "json"]
    for row in flat:
        row |= {name: None if row[name] is None else json.loads(row[name]) for name in texts}
    assert [{name: row[name] for name in COLUMNS[what]} for row in plain] == flat
    assert {frozenset(row) for row in plain} == {frozenset(COLUMNS[what])}
    assert arrow_schema(what).names == list(COLUMNS[what])


def test_calls_tell_their_messages_rewards_and_whether_they_count(run_dir: Path) -> None:
    _, second = exported(run_dir, "calls", "jsonl", limit=1)
    assert second["messages"] == [{"role": "user", "content": "d"}]
    assert second["answer"] == [{"role": "assistant", "content": "e"}]
    assert (second["reward"], second["call_rewards"], second["counts"]) == (0.5, {"polite": 0.25}, True)
    assert second["prompt_token_ids"] == ids("a b c d")


def test_mode_and_limit_narrow_it(run_dir: Path) -> None:
    told = [row["rollout_id"] for row in exported(run_dir, "rollouts", "jsonl", mode="train")]
    assert told == ["train-1-0", "train-1-1", "train-2-0"]
    told = [row["rollout_id"] for row in exported(run_dir, "rows", "jsonl", mode="train", limit=2)]
    assert told == ["train-1-0", "train-1-1", "train-1-1"]


def test_rows_are_those_of_the_trajectory_that_training_reads(run_dir: Path) -> None:
    found = exported(run_dir, "rows", "jsonl")
    with recorded.opened(run_dir) as connection:
        traces = [recorded.trace(connection, name) for name in ("train-1-0", "train-1-1", "val-1-0")]
    made = [row for trace in traces for row in trajectory_of(trace, agent_failure=0.0).rows]
    assert len(found) == len(made) == 4
    for told, row in zip(found, made, strict=True):
        same = {name: told[name] for name in Row.__struct_fields__ if name != "excluded"}
        assert same == {name: getattr(row, name) for name in same}
    assert [told["excluded"] for told in found] == [None, None, None, "validation"]
    trained = [call_id for told in found[:3] for call_id in told["call_ids"] if call_id]
    assert len(trained) == sum(len(call.response_ids) for call in TALK + BRANCHED)


def test_rows_leave_out_what_the_step_left_out_by_its_reason(run_dir: Path) -> None:
    dropped = rollout_record("train-1-0", "g", 0.5, left_out="zero_variance")
    kept = rollout_record("train-1-1", "g", 1.0, calls=3)
    kept.calls["train-1-1-c2"] = call_record(None, [], trained_tokens=0, left_out="stale")
    write_run(run_dir, steps=[step_of(7, dropped, kept)])
    first, second, third, _ = exported(run_dir, "rows", "jsonl")
    assert (first["excluded"], first["step"]) == ("zero_variance", 7)
    assert second["excluded_calls"] == {"train-1-1-c2": "stale"}
    assert "train-1-1-c2" not in second["call_ids"]
    assert third["excluded"] is None


def test_rows_leave_out_tokens_that_the_step_left_out_of_a_call(run_dir: Path) -> None:
    whole = exported(run_dir, "rows", "jsonl")[0]
    record = rollout_record("train-1-0", "g", 0.5)
    record.calls["train-1-0-c1"] = call_record([1], [-0.5])
    write_run(run_dir, steps=[step_of(7, record)])
    row = exported(run_dir, "rows", "jsonl")[0]
    first, second = (at for at, call_id in enumerate(whole["call_ids"]) if call_id == "train-1-0-c1")
    assert [at for at, mask in enumerate(whole["loss_mask"]) if mask and not row["loss_mask"][at]] == [first]
    assert row["call_ids"][first] is row["logprobs"][first] is None
    assert row["call_ids"][second] == "train-1-0-c1"


def test_spans_are_those_of_the_server_and_calls_alone_where_asked(run_dir: Path) -> None:
    spans = exported(run_dir, "spans", "jsonl", limit=1)
    assert [span["span_id"] for span in spans] == ["train-1-0-c1", "train-1-0-c2"]
    assert spans[0]["attributes"][semconv.RESPONSE_IDS] == ids("b c")
    file, count = export(run_dir, "calls", "otlp", run_dir)
    assert (file.name, count) == ("calls.jsonl", 7)


def test_our_own_server_takes_the_lines(tmp_path: Path) -> None:
    gone = {"model": "policy", "kind": "embedded", "url": "http://127.0.0.1:9"}
    with launch(tmp_path, policy_of(engines=[gone]), admin_key="admin", runner_key="runner") as serving:
        store = HttpStore(serving.url, "admin")
        claim = store.start(RolloutRequest(task=1, rollout_id="r"))
        spans = _moved(attempt_of(TALK).spans, claim.attempt.attempt_id)
        beside = SqlStore(f"sqlite:///{tmp_path / 'store.db'}")
        beside.add_spans(spans)
        beside.close()
        file, count = export(tmp_path, "spans", "otlp", tmp_path)
        assert count == 2
        headers = {"authorization": "Bearer admin", "content-type": "application/json"}
        for line in file.read_bytes().splitlines():
            answer = urllib3.request("POST", f"{serving.url}/v1/traces", body=line, headers=headers, retries=False)
            assert (answer.status, answer.json()) == (200, {})
        store.finish("r", claim.attempt.attempt_id, Finish(status="succeeded", reward=1.0))
        [attempt] = store.traces(["r"])["r"].attempts
        store.close()
    came = [span.attributes for span in attempt.spans if span.name == otel.FOREIGN + semconv.CALL_SPAN]
    calls = calls_of(attempt.spans)
    assert [one[otel.FOREIGN + semconv.RESPONSE_IDS] for one in came] == [call.response_ids for call in calls]
    assert [one[otel.FOREIGN + semconv.LOGPROBS] for one in came] == [call.logprobs for call in calls]


def _moved(spans: list[Span], attempt_id: str) -> list[Span]:
    for span in spans:
        span.attempt_id = attempt_id
    return spans


@pytest.mark.long
def test_memory_does_not_grow_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "_GROUP_RECORDS", 64)

    def peak(rollouts: int, what: What, form: Any) -> int:
        folder = tmp_path / str(rollouts)
        if not folder.exists():
            with open_store(folder) as store:
                for number in range(rollouts):
                    record(store, f"r-{number}", [say(1, "a " * 200, "b " * 200)])
        tracemalloc.start()
        export(folder, what, form, folder)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    for what, form in (("calls", "parquet"), ("calls", "jsonl"), ("spans", "otlp")):
        peak(100, what, form)  # what is loaded once
        assert peak(600, what, form) < 1.5 * peak(100, what, form)


def test_a_file_is_whole_or_not_there(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run_dir / "calls.jsonl").write_text("before\n")
    written: Callable[..., Iterator[Any]] = exports.records

    def cut(*given: Any, **named: Any) -> Iterator[Any]:
        yield next(written(*given, **named))
        raise OSError("no space left")

    monkeypatch.setattr(exports, "records", cut)
    with pytest.raises(OSError, match="no space"):
        export(run_dir, "calls", "jsonl", run_dir)
    assert (run_dir / "calls.jsonl").read_text() == "before\n"
    assert not list(run_dir.glob("*.partial"))


def test_what_cannot_be_written_is_refused_in_words(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Explained, match="OTLP has spans, and no place for rows"):
        export(run_dir, "rows", "otlp", run_dir)
    with pytest.raises(Explained, match=r"store\.db is a file of the run"):
        export(run_dir, "rows", "jsonl", run_dir / "store.db")
    assert export(run_dir, "rows", "jsonl", run_dir) == export(run_dir, "rows", "jsonl", run_dir)
    with pytest.raises(Explained, match="there is no folder"):
        export(run_dir, "rows", "jsonl", run_dir / "none" / "rows.jsonl")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(Explained, match=r"pip install 'lightning-rl\[data\]'"):
        export(run_dir, "rows", "parquet", run_dir)


def test_the_command_says_how_many_and_where(run_dir: Path) -> None:
    def command(*words: str) -> str:
        done = CliRunner().invoke(app, ["export", str(run_dir), *words], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    assert command("-o", str(run_dir)).startswith(f"4 rollouts in {run_dir / 'rollouts.jsonl'}")
    assert command("--format", "otlp", "-o", str(run_dir / "x.jsonl")).startswith("7 spans in")
    assert command("--format", "parquet", "--what", "rows", "-o", str(run_dir)).startswith("4 rows in")
    assert command("-o", str(run_dir / "x.parquet")).startswith("4 rollouts in")
    assert command("-o", f"{run_dir}/new/").startswith(f"4 rollouts in {run_dir / 'new' / 'rollouts.jsonl'}")
    assert (run_dir / "x.parquet").read_bytes()[:4] == b"PAR1"
    assert msgspec.json.decode((run_dir / "rollouts.jsonl").read_bytes().splitlines()[3])["status"] == "queued"


def test_a_link_stays_one_and_a_pipe_takes_what_comes(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link.jsonl"
    link.symlink_to(tmp_path / "linked.jsonl")
    export(run_dir, "rollouts", "jsonl", link)
    assert link.is_symlink()
    assert len(read(tmp_path / "linked.jsonl")) == 4
    (tmp_path / "linked.jsonl").chmod(0o600)
    export(run_dir, "rollouts", "jsonl", link)
    assert (tmp_path / "linked.jsonl").stat().st_mode & 0o777 == 0o600, "nobody else reads it now either"
    (tmp_path / "key").touch(mode=0o644)
    write_whole(tmp_path / "key", b"secret", mode=0o600)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    pipe, to_pipe = tmp_path / "pipe.jsonl", tmp_path / "to_pipe.jsonl"
    os.mkfifo(pipe)
    to_pipe.symlink_to(pipe)
    with ThreadPoolExecutor() as threads:
        for named in (pipe, to_pipe):
            piped = threads.submit(pipe.read_bytes)
            export(run_dir, "rollouts", "jsonl", named)
            assert piped.result() == link.read_bytes()
    monkeypatch.setattr(sys, "stdout", None)  # as of a process without a terminal
    export(run_dir, "rollouts", "jsonl", link)
    monkeypatch.undo()
    output, appended = tmp_path / "stdout", tmp_path / "appended"  # as /dev/stdout is a link
    output.symlink_to("/proc/self/fd/1")
    appended.write_text("before\n")
    command = [sys.executable, "-m", "lightning_rl", "export", str(run_dir), "--format", "jsonl", "-o", str(output)]
    with appended.open("a") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True, check=True)
    assert appended.read_bytes() == b"before\n" + link.read_bytes()
    assert done.stderr.startswith(f"4 rollouts in {output}")
    assert output.is_symlink()


def test_what_is_asked_for_twice_is_refused(run_dir: Path) -> None:
    done = CliRunner().invoke(app, ["export", str(run_dir), "--pairs", "--what", "calls", "-o", str(run_dir)])
    assert isinstance(done.exception, Explained)
    assert "--pairs and --what calls" in str(done.exception)


def test_a_file_whose_name_says_no_format_is_refused_without_one(run_dir: Path) -> None:
    done = CliRunner().invoke(app, ["export", str(run_dir), "-o", str(run_dir / "x.csv")])
    assert isinstance(done.exception, Explained)
    assert str(done.exception).endswith("x.csv ends with neither .parquet nor .jsonl: name the --format")


def test_the_page_lists_every_column() -> None:
    page = DOC.read_text()
    for what, columns in COLUMNS.items():
        section = page.partition(f"### `{what}`")[2].partition("\n#")[0]
        told = [line.split("|")[1].strip().split(", ") for line in section.splitlines() if line.startswith("| `")]
        assert [name.strip("`") for names in told for name in names] == list(columns), what
