"""What the Trainer takes for the servers of a run, before anything is started."""

import stat
import threading
from pathlib import Path
from typing import Any

import pytest

import lightning_rl as lrl
from lightning_rl import trainer
from lightning_rl.files import RunFolderUnusable, make_run_dir
from lightning_rl.processes.service_keys import RUNNER_KEY
from lightning_rl.runner.agent_pickle import AgentNotPicklable
from lightning_rl.trainer import RunFolderUsed, _run_id, _with_new_session, _write_stores, _write_urls

ONE, TWO = "http://127.0.0.1:1", "http://127.0.0.1:2"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"server": "127.0.0.1:1"}, "server='127.0.0.1:1' is no URL"),
        ({"server": [ONE, "two"]}, "server='two' is no URL"),
        ({"server": []}, r"server=\[\] names no server"),
        ({"server": [ONE, TWO, f"{ONE}/"]}, f"server names one of {ONE}, {TWO}, {ONE}/ twice"),
        ({"server": ONE, "store": lrl.LightningStoreClient(ONE, "key")}, "give server or store, not both"),
        ({"server": [ONE, TWO], "port": 80}, "port: the server is elsewhere"),
        ({"server": [ONE, TWO], "n_runners": 1}, "n_runners is 1, for 2 servers: it takes one for each, or none here"),
    ],
)
def test_what_does_not_go_with_servers_elsewhere_is_said(
    given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNNER_KEY, "a-runner-key-of-the-tests")
    with pytest.raises(ValueError, match=message):
        lrl.Trainer(**given)


def test_a_run_at_a_server_is_not_gone_on_with_without_it(tmp_path: Path) -> None:
    (tmp_path / "server.url").write_text(ONE)
    (tmp_path / "run.id").write_text("abc")
    algorithm = lrl.Baseline()
    algorithm.resume = True
    with pytest.raises(RunFolderUsed, match=f"attached to {ONE}, where its rollouts are: .* server='{ONE}'"):
        lrl.Trainer(_one, run_dir=tmp_path).fit(algorithm, [1])
    assert (tmp_path / "server.url").read_text() == ONE


def test_a_folder_without_the_id_of_its_run_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    algorithm = lrl.Baseline(resume=True)
    assert _run_id(tmp_path, algorithm, attaches=False)
    assert not caplog.messages, "there is no run yet"
    (tmp_path / "store.db").touch()
    assert _run_id(tmp_path, algorithm, attaches=False)
    [told] = caplog.messages
    assert "holds a run and no file run.id" in told
    (tmp_path / "run.id").write_text("abc")
    assert _run_id(tmp_path, algorithm, attaches=False) == "abc"


def _one(task: int) -> float:
    return 1.0


def test_an_algorithm_that_is_a_function_works_at_one_server() -> None:
    @lrl.algo
    def search() -> None: ...

    with pytest.raises(
        ValueError, match=r"FunctionAlgorithm works at one server: give Trainer\(server=\.\.\.\) one URL"
    ):
        lrl.Trainer(server=[ONE, TWO]).fit(search, [])


def test_an_agent_that_cannot_be_sent_leaves_a_folder_that_the_next_one_can_use(tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(AgentNotPicklable, match="a lock"):
        lrl.Trainer(lambda task: float(lock.locked()), run_dir=tmp_path / "run").fit(lrl.Baseline(), [1])
    assert not (tmp_path / "run").exists()


def test_an_agent_that_is_large_to_send_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(trainer, "_LARGE_AGENT", 2_000_000)
    held = bytes(3_000_000)
    with pytest.raises(RunFolderUnusable):
        lrl.Trainer(lambda task: float(len(held)), run_dir=tmp_path / "file").fit(lrl.Baseline(), [1])
    assert "the agent takes 3 MB, and each runner process gets a copy of it" in caplog.text


def test_a_run_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, why in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "run", "Not a directory")):
        with pytest.raises(RunFolderUnusable, match=f"the run folder {folder} cannot be made or written to .{why}"):
            lrl.Trainer(lambda task: 1.0, run_dir=folder).fit(lrl.Baseline(), [1])


def test_a_run_that_goes_on_without_a_server_says_what_will_be_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write_urls(tmp_path, [ONE, TWO])
    _write_urls(tmp_path, [TWO, ONE])
    assert caplog.messages == []
    _write_urls(tmp_path, [TWO])
    assert caplog.messages == [
        f"the run goes on without the servers at {ONE}: what they have of it is in no export, doctor or explain, until "
        f"their URLs are in {tmp_path / 'server.url'} again"
    ]
    assert (tmp_path / "server.url").read_text() == TWO


def test_a_run_that_goes_on_at_another_store_says_what_will_be_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write_stores(tmp_path, ["one", "two"])
    _write_stores(tmp_path, ["two"])
    _write_stores(tmp_path, [])  # of a server that does not say
    assert caplog.messages == []
    _write_stores(tmp_path, ["three"])
    assert "at a server with another store than before" in caplog.text
    assert (tmp_path / "server.stores").read_text().split() == ["one", "two", "three"]


def test_a_folder_keeps_the_sessions_of_its_trainers_to_its_owner(tmp_path: Path) -> None:
    first, second = _with_new_session(tmp_path), _with_new_session(tmp_path)
    assert len(first) == 1
    assert second[:-1] == first
    assert second[1] != first[0]
    for name in ("run.sessions", "run.lock"):
        make_run_dir(tmp_path)
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_an_id_that_was_not_written_whole_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for content in (b"", b"\xff\xfe\x00"):
        caplog.clear()
        (tmp_path / "run.id").write_bytes(content)
        assert _run_id(tmp_path, lrl.Baseline(resume=True), attaches=False).isalnum()
        assert "or did its first start fail?" in caplog.text
