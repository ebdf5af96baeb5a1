"""The folder of a run that attached to a server is read as one with a store of its own."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightning_rl.cli import app
from lightning_rl.control_plane.launch import launch
from lightning_rl.inspect import recorded
from lightning_rl.inspect.recorded import NotRecorded
from lightning_rl.inspect.rollout_source import resources_of
from lightning_rl.processes.service_keys import ADMIN_KEY
from lightning_rl.store import copied
from lightning_rl.store.contract import ErrorInfo, ResourcesRequest, Reward
from lightning_rl.viewer import report
from lightning_rl_adapters import semconv
from tests.adapters.words import say
from tests.lightning_rl.inspect.runs import TALK, metrics_of, open_store, record, rollout_record, step_of, write_run
from tests.lightning_rl.runner.conftest import policy_of
from tests.lightning_rl.viewer.test_report import answers_of

RUN, OTHER = "3fa2c1", "0b1c2d"
KEY = "an-admin-key-of-the-tests"
FORKED = [*TALK, say(3, "x", "y")]
RESOURCES = {"main_llm": {"type": "proxy_llm", "model": "policy"}}
CAUSE = {3: {semconv.FORK_CAUSE: "edited_text"}}


def fill(run_dir: Path, *runs: str) -> None:
    """A store with rollouts of each of these runs, one after the other."""
    with open_store(run_dir) as store:
        store.publish(ResourcesRequest(resources=RESOURCES))
        for number in range(3):
            for run in runs:
                record(store, f"train-7-0-{number}.{run}", TALK, reward=float(number))
        for run in runs:
            given = [Reward(value=0.5, name="style", call_id=f"val-1.{run}-c1")]
            record(store, f"val-1.{run}", FORKED, CAUSE, mode="val", call_rewards=given)
            lost = ErrorInfo(type="Lost", message="the runner is gone", infrastructure=True)
            record(store, f"train-7-1-0.{run}", [], error=lost, attempts=2)


def beside(run_dir: Path) -> Path:
    """What a trainer writes into its folder, wherever the store is."""
    trained = [rollout_record(f"train-7-0-{number}.{RUN}", "g", float(number)) for number in range(3)]
    write_run(run_dir, steps=[step_of(7, *trained)], metrics=[metrics_of(7)], config={})
    (run_dir / "run.id").write_text(RUN)
    return run_dir


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with its own store."""
    run_dir = beside(tmp_path_factory.mktemp("own"))
    fill(run_dir, RUN)
    return run_dir


@pytest.fixture(scope="module")
def attached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the same run at a server that another run uses, too."""
    served = tmp_path_factory.mktemp("served")
    fill(served, RUN, OTHER)
    with launch(served, policy_of(engines=[]), admin_key=KEY, runner_key="runner") as serving:
        run_dir = beside(tmp_path_factory.mktemp("attached"))
        (run_dir / "server.url").write_text(serving.url)
        yield run_dir


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_KEY, KEY)
    monkeypatch.setattr(copied, "_PAGE", 3)
    monkeypatch.setattr(copied, "_TRACES", 2)


def told(run_dir: Path, *words: str) -> str:
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return re.sub(r"\ba0[0-9a-z]{19}\b", "ATTEMPT", done.stdout.replace(str(run_dir), "RUN_DIR"))


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["train-7-0-2"],
        [f"val-1.{RUN}"],
        ["train-7-1-0", "--json"],
        ["train-7-0-1", "--call", "2"],
    ],
    ids=lambda words: " ".join(words) or "the run",
)
def test_explain_says_what_it_says_of_a_run_with_its_own_store(own: Path, attached: Path, words: list[str]) -> None:
    there = told(attached, "explain", *words, "--run-dir", str(attached))
    here = told(own, "explain", *words, "--run-dir", str(own))
    if "--json" in words:
        assert _timeless(json.loads(there)) == _timeless(json.loads(here))
    else:
        assert there == here


def test_doctor_finds_what_it_finds_in_a_run_with_its_own_store(own: Path, attached: Path) -> None:
    found = [json.loads(told(each, "doctor", "--json", str(each))) for each in (attached, own)]
    assert found[0] == found[1]
    assert found[0]["looked_at"]["rollouts"] == 4, "those of the other run are not looked at"


@pytest.mark.parametrize("what", ["rollouts", "calls", "rows", "spans"])
def test_export_writes_what_it_writes_of_a_run_with_its_own_store(
    own: Path, attached: Path, tmp_path: Path, what: str
) -> None:
    found = []
    for run_dir in (attached, own):
        file = tmp_path / f"{run_dir.name}.jsonl"
        told(run_dir, "export", str(run_dir), "-o", str(file), "--what", what)
        found.append([_timeless(json.loads(line)) for line in file.read_text().splitlines()])
    assert found[0] == found[1] != []
    assert all(each["rollout_id"].endswith(RUN) for each in found[0])


def test_what_an_agent_was_given_comes_along_for_a_replay(own: Path, attached: Path) -> None:
    given = []
    for run_dir in (attached, own):
        with recorded.opened(run_dir) as connection:
            rollout = recorded.trace(connection, f"train-7-0-0.{RUN}").rollout
            given.append(resources_of(connection, rollout.resources_id))
    assert given[0] == given[1] == RESOURCES


def test_a_report_has_its_rollouts_and_findings(own: Path, attached: Path, tmp_path: Path) -> None:
    of_own, of_attached = (
        answers_of(report.write(each, tmp_path / f"{each.name}.html").read_text())["report"] for each in (own, attached)
    )
    assert of_own["rollouts"]["rollouts"] == 5
    assert of_attached["rollouts"] == of_own["rollouts"]
    assert of_own["doctor"]["findings"]
    assert of_attached["doctor"] == of_own["doctor"]


def test_a_report_of_a_server_that_is_away_says_what_it_lacks(
    attached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told_of = answers_of(report.write(attached, tmp_path / "whole.html").read_text())
    monkeypatch.delenv(ADMIN_KEY)
    without_key = answers_of(report.write(attached, tmp_path / "less.html").read_text())
    assert without_key["report"]["pairs"] == []
    assert without_key["runs/run/metrics"] == told_of["runs/run/metrics"]
    [message] = caplog.messages
    assert message.startswith("the report is without rollouts: ")
    assert f"set {ADMIN_KEY} to that server's admin key" in message


def test_its_rollouts_are_listed_without_those_of_the_other_run(attached: Path) -> None:
    listed = told(attached, "rollouts", "list", "--json", "--run-dir", str(attached)).splitlines()
    ids = [json.loads(line)["rollout_id"] for line in listed]
    assert ids == [f"{name}.{RUN}" for name in ("train-7-0-0", "train-7-0-1", "train-7-0-2", "val-1", "train-7-1-0")]


def test_the_folder_stays_as_it_was(attached: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in attached.rglob("*")}
    told(attached, "explain", "--run-dir", str(attached))
    assert {file: file.stat().st_mtime_ns for file in attached.rglob("*")} == before


def test_the_newest_run_may_be_an_attached_one(attached: Path, tmp_path: Path) -> None:
    shutil.copytree(attached, tmp_path / "runs" / "one")
    assert recorded.newest_run(tmp_path / "runs") == tmp_path / "runs" / "one"


def refusal(run_dir: Path) -> str:
    with pytest.raises(NotRecorded) as told_so, recorded.opened(run_dir):
        pass
    assert "\n" not in str(told_so.value)
    return str(told_so.value)


def test_without_the_key_it_is_asked_for(attached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = (attached / "server.url").read_text()
    monkeypatch.delenv(ADMIN_KEY)
    said = refusal(attached)
    assert f"{attached} is of a run that attached to the server at {url}, which has its rollouts" in said
    assert f"set {ADMIN_KEY} to that server's admin key" in said
    monkeypatch.setenv(ADMIN_KEY, "another-key-of-the-tests")
    assert f"the server at {url}, which has its rollouts and refuses the key in {ADMIN_KEY}" in refusal(attached)


def test_where_the_server_is_away_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "server.url").write_text("http://127.0.0.1:1")
    (tmp_path / "run.id").write_text(RUN)
    said = refusal(tmp_path)
    assert "the server at http://127.0.0.1:1, which has its rollouts and cannot be read" in said
    assert f"start it again with its store, or write where it is now into {tmp_path / 'server.url'}" in said


def _timeless(told: object) -> object:
    """Without ids of attempts and resources and without times, which differ from store to store."""
    made = ("attempt_id", "counting_attempt_id", "resources_id", "created_at", "ended_at", "reward_id", "span_id")
    if isinstance(told, dict):
        return {name: _timeless(value) for name, value in told.items() if name not in made and name != "run_dir"}
    return [_timeless(each) for each in told] if isinstance(told, list) else told
