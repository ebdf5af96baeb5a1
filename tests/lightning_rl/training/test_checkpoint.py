"""Checkpoints: whole or not there, whenever a run is killed; what is saved is what is loaded."""

import itertools
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rl.errors import WorkerDied
from lightning_rl.inference.weights.stream import stream_of
from lightning_rl.training import checkpoint
from lightning_rl.training.checkpoint import CheckpointError
from tests.random_examples import examples

MODEL = Path(__file__).parents[3] / "examples" / "sql_agent" / "checkpoint"


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(MODEL)
    return loaded


def small(checkpoints: Path, step: int) -> Path:
    """A checkpoint of a few bytes, whose every part says which step it is of."""

    def export(folder: Path) -> None:
        (folder / "config.json").write_text(f"config {step}")
        (folder / "model.safetensors").write_bytes(bytes([step]) * 100)

    state = {"step": step, "optimizer": {0: torch.full((3,), float(step))}}
    return checkpoint.save(checkpoints / f"step-{step}", export=export, state=state)


def assert_whole(folder: Path) -> None:
    step = int(folder.name.removeprefix("step-"))
    state = checkpoint.load_state(folder)
    assert state["step"] == step
    assert state["optimizer"][0].tolist() == [step] * 3
    assert (folder / "config.json").read_text() == f"config {step}"
    assert (folder / "model.safetensors").read_bytes() == bytes([step]) * 100


def names(checkpoints: Path) -> list[str]:
    return sorted(folder.name for folder in checkpoints.iterdir())


def told_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == checkpoint.__name__]


# What is saved is loaded


def test_what_is_saved_is_loaded(model: torch.nn.Module, tmp_path: Path) -> None:
    """`transformers` loads the folder as it is."""
    export = partial(checkpoint.export_model, model, stream_of(model), MODEL)
    state = {"step": 3, "actor": {"optimizer": {"state": {0: {"exp_avg": torch.randn(3)}}}}}
    folder = checkpoint.save(tmp_path / "checkpoints" / "step-3", export=export, state=state)
    found = checkpoint.load_state(folder)
    assert found["step"] == 3
    assert torch.equal(*(each["actor"]["optimizer"]["state"][0]["exp_avg"] for each in (found, state)))  # type: ignore[index]
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(folder).encode("SELECT") == AutoTokenizer.from_pretrained(MODEL).encode(
        "SELECT"
    )


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    def drawn() -> list[Any]:
        return [torch.rand(2).tolist(), random.random(), random.gauss(), np.random.rand(), np.random.normal()]

    drawn()  # Python's and NumPy's Gaussians come in pairs: one of each is kept
    checkpoint.save(tmp_path / "step-1", export=lambda _: None, state=checkpoint.rng_state())
    expected = [drawn(), drawn()]
    checkpoint.set_rng_state(checkpoint.load_state(tmp_path / "step-1"))
    assert [drawn(), drawn()] == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_random_numbers_of_a_gpu_go_on_where_they_were(tmp_path: Path) -> None:
    torch.rand(2, device="cuda")
    state = {"rng": checkpoint.rng_state(), "held": torch.arange(5, device="cuda", dtype=torch.bfloat16)}
    checkpoint.save(tmp_path / "step-1", export=lambda _: None, state=state)
    expected = torch.rand(5, device="cuda")
    found = checkpoint.load_state(tmp_path / "step-1")
    checkpoint.set_rng_state(found["rng"])
    assert torch.equal(torch.rand(5, device="cuda"), expected)
    assert found["held"].device.type == "cpu"
    assert torch.equal(found["held"], state["held"].cpu())  # type: ignore[attr-defined]


# Broken ones


def test_the_latest_is_the_newest_whole_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert checkpoint.latest(tmp_path / "none") is None
    for step in (2, 10):
        small(tmp_path, step)
    (tmp_path / "step-11.partial").mkdir()
    (tmp_path / "step-x").mkdir()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-10"
    assert told_in(caplog) == []
    (tmp_path / "step-12").mkdir()  # somebody's own
    assert checkpoint.latest(tmp_path) == tmp_path / "step-10"
    [told] = told_in(caplog)
    assert f"checkpoint {tmp_path / 'step-12'} is broken and passed over: manifest.json is missing" in told


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _change(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        ("model.safetensors", _cut, "model.safetensors has 99 bytes instead of 100"),
        ("model.safetensors", _change, "model.safetensors was changed: its checksum is another"),
        ("model.safetensors", Path.unlink, "model.safetensors is missing"),
        ("training_state/.metadata", Path.unlink, "training_state/.metadata is missing"),
        ("training_state", shutil.rmtree, "training_state/.metadata is missing"),
        ("manifest.json", Path.unlink, "manifest.json is missing"),
        ("manifest.json", _cut, "manifest.json cannot be read"),
        ("manifest.json", partial(Path.write_text, data='{"files": {}}'), "manifest.json was changed"),
    ],
)
def test_a_broken_one_is_told_and_the_one_before_is_taken(
    name: str, damage: Callable[[Path], None], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small(tmp_path, 1)
    damage(small(tmp_path, 2) / name)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1"
    [message] = told_in(caplog)
    assert f"checkpoint {tmp_path / 'step-2'} is broken and passed over: {told}" in message
    assert_whole(small(tmp_path, 2))
    assert checkpoint.latest(tmp_path) == tmp_path / "step-2"


@pytest.fixture(scope="module")
def whole() -> Path:
    return small(Path(tempfile.mkdtemp()), 7)


@settings(deadline=None, max_examples=examples(300))
@given(data=st.data())
def test_every_bit_that_is_flipped_and_every_cut_is_seen(whole: Path, data: st.DataObject) -> None:
    files = sorted(file for file in whole.rglob("*") if file.is_file())
    assert len(files) == 6  # config, weights, manifest; tensors, their description, values
    file = data.draw(st.sampled_from(files))
    content = file.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    flipped = bytes([content[place] ^ (1 << data.draw(st.integers(0, 7)))])
    damaged = content[:place] + (flipped + content[place + 1 :] if data.draw(st.booleans()) else b"")
    file.write_bytes(damaged)
    try:
        assert checkpoint.fault(whole) is not None
    finally:
        file.write_bytes(content)
    assert checkpoint.fault(whole) is None


# Runs that are killed


def killed_at(moment: int, within: Path, act: Callable[[], object]) -> bool:
    """Do `act` in a child that is killed before its `moment`-th change (or opening) of a file `within`; whether it was.

    Raises ChildProcessError where the child failed otherwise.
    """
    child = os.fork()
    if not child:
        left = itertools.count(moment, -1)

        def kill(event: str, arguments: tuple[Any, ...]) -> None:
            changes = event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link")
            if changes and str(within) in str(arguments) and next(left) == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        failed = 1
        try:
            sys.addaudithook(kill)
            act()
            failed = 0
        finally:
            os._exit(failed)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended == 1:
        raise ChildProcessError("the child failed, see its traceback")
    return ended == -signal.SIGKILL


def test_a_kill_while_saving_leaves_the_one_before_or_a_whole_new_one(tmp_path: Path) -> None:
    found: list[str] = []
    for moment in itertools.count(1):
        checkpoints = tmp_path / str(moment)
        small(checkpoints, 1)
        killed = killed_at(moment, checkpoints, lambda: small(checkpoints, 2))  # noqa: B023
        newest = checkpoint.latest(checkpoints)
        assert newest is not None
        assert_whole(newest)
        found.append(newest.name)
        checkpoint.prune(checkpoints, None)
        assert names(checkpoints) == (["step-1", "step-2"] if newest.name == "step-2" else ["step-1"])
        assert_whole(small(checkpoints, 2))
        if not killed:
            break
    assert len(found) > 20
    assert sorted(found) == found, "there is one moment from which on the new one is there"
    assert found[0] == "step-1"


@pytest.mark.long
def test_a_kill_while_one_is_written_anew_leaves_the_one_before(tmp_path: Path) -> None:
    """A resumed run comes by a broken one again, and writes it again."""
    moments = itertools.count(1)
    for moment in moments:
        checkpoints = tmp_path / str(moment)
        small(checkpoints, 1)
        _cut(small(checkpoints, 2) / "config.json")
        killed = killed_at(moment, checkpoints, lambda: small(checkpoints, 2))  # noqa: B023
        newest = checkpoint.latest(checkpoints)
        assert newest is not None
        assert_whole(newest)
        if not killed:
            assert names(checkpoints) == ["step-1", "step-2"]
            break
    assert checkpoint.latest(checkpoints) == checkpoints / "step-2"
    assert next(moments) > 20


def test_a_kill_while_pruning_leaves_no_half_one(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        small(tmp_path / "all", step)
    for moment in itertools.count(1):
        checkpoints = tmp_path / str(moment)
        shutil.copytree(tmp_path / "all", checkpoints)
        killed = killed_at(moment, checkpoints, lambda: checkpoint.prune(checkpoints, 2, [checkpoints / "step-1"]))  # noqa: B023
        for folder in checkpoints.glob("step-*"):
            assert folder.name.endswith(".partial") or checkpoint.fault(folder) is None
        assert {"step-1", "step-3", "step-4"} <= set(names(checkpoints))
        checkpoint.prune(checkpoints, 2, [checkpoints / "step-1"])
        assert names(checkpoints) == ["step-1", "step-3", "step-4"]
        if not killed:
            break
    assert moment > 5


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill of the machine: what was not synced may be gone, though its name is there."""
    synced: set[int] = set()
    missing: list[Path] = []
    sync, rename = os.fsync, Path.rename

    def note(file: int) -> None:
        synced.add(os.fstat(file).st_ino)
        sync(file)

    def check(path: Path, target: Path) -> Path:
        if target.name == "step-1":
            missing.extend(each for each in (path, *path.rglob("*")) if each.stat().st_ino not in synced)
            synced.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Path, "rename", check)
    small(tmp_path, 1)
    assert missing == []
    assert synced == {tmp_path.stat().st_ino}, "the new name is synced too"


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(model: torch.nn.Module, tmp_path: Path) -> None:
    """A real failing write, of the weights and then of the state: no file may be longer than a megabyte."""
    small(tmp_path, 1)
    save = partial(checkpoint.save, tmp_path / "step-2")
    large = {"optimizer": torch.zeros(2**20)}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    told = r"checkpoint .*step-2 cannot be written \(.*\); make room, then resume"
    try:
        with pytest.raises(CheckpointError, match=told):
            save(export=partial(checkpoint.export_model, model, stream_of(model), MODEL), state={})
        with pytest.raises(CheckpointError, match=told):
            save(export=lambda _: None, state=large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1"
    assert save(export=lambda _: None, state=large) == checkpoint.latest(tmp_path)


def test_an_interrupt_while_the_state_is_written_is_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        small(tmp_path, 1)
    assert checkpoint.latest(tmp_path) is None


# Pruning


@pytest.mark.parametrize(
    ("keep", "protect", "left"),
    [
        (None, [], [1, 2, 3, 4, 10]),
        (1, [], [10]),
        (3, [], [3, 4, 10]),
        (9, [], [1, 2, 3, 4, 10]),
        (1, [2], [2, 10]),
        (2, [10, 1], [1, 4, 10]),
    ],
)
def test_the_oldest_go_but_for_the_best(keep: int | None, protect: list[int], left: list[int], tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 10):
        small(tmp_path, step)
    (tmp_path / "step-2.partial").mkdir()
    (tmp_path / "step-3.old.partial").mkdir()
    (tmp_path / "notes.partial").mkdir()
    checkpoint.prune(tmp_path, keep, [tmp_path / f"step-{step}" for step in protect])
    assert names(tmp_path) == sorted(["notes.partial", *(f"step-{step}" for step in left)])


def test_the_newest_whole_one_stays_when_newer_ones_are_broken(tmp_path: Path) -> None:
    """A bit flipped in the newest, as seen at the next resume only: it is not what is kept in place of a whole one."""
    for step in (1, 2, 3, 4):
        small(tmp_path, step)
    for step in (3, 4):
        _change(tmp_path / f"step-{step}" / "model.safetensors")
    checkpoint.prune(tmp_path, 1)
    assert names(tmp_path) == ["step-2", "step-3", "step-4"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-2"
    _cut(tmp_path / "step-2" / "config.json")
    checkpoint.prune(tmp_path, 1)
    assert names(tmp_path) == ["step-2", "step-3", "step-4"], "with none whole, nothing is deleted"


def test_folders_that_are_no_checkpoints_are_not_touched(tmp_path: Path) -> None:
    for step in (2, 3, 4):
        small(tmp_path, step)
    (tmp_path / "step-1").mkdir()  # somebody's own
    checkpoint.prune(tmp_path, 1)
    assert names(tmp_path) == ["step-1", "step-4"]


# The final model


def test_the_final_model_is_a_hugging_face_folder_that_outlives_its_checkpoint(
    model: torch.nn.Module, tmp_path: Path
) -> None:
    export = partial(checkpoint.export_model, model, stream_of(model), MODEL)
    folder = checkpoint.save(tmp_path / "checkpoints" / "step-3", export=export, state={"step": 3})
    final = checkpoint.final_model(tmp_path, folder)
    assert final == tmp_path / "model"
    assert names(final) == sorted(set(names(folder)) - {"manifest.json", "training_state"})
    assert (final / "model.safetensors").stat().st_ino == (folder / "model.safetensors").stat().st_ino
    (final / "config.json").write_text((final / "config.json").read_text() + "\n")
    assert checkpoint.fault(folder) is None, "an edited config is the final model's alone"
    shutil.rmtree(folder)
    again = AutoModelForCausalLM.from_pretrained(final)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_the_final_model_is_copied_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(bytes(2**20))

    folder = checkpoint.save(tmp_path / "step-1", export=export, state={})

    def none(*_: object) -> None:
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", none)
    final = checkpoint.final_model(tmp_path, folder)
    assert (final / "model.safetensors").read_bytes() == bytes(2**20)


@pytest.mark.long
def test_a_kill_while_the_final_model_is_replaced_leaves_no_mixture(tmp_path: Path) -> None:
    for step in (1, 2):
        small(tmp_path / "checkpoints", step)
    for moment in itertools.count(1):
        run = tmp_path / str(moment)
        shutil.copytree(tmp_path / "checkpoints", run / "checkpoints")
        for folder in run.glob("checkpoints/step-*"):  # folders in folders, as an adapter's
            (folder / "more").mkdir()
            shutil.copy(folder / "model.safetensors", folder / "more" / "manifest.json")
        checkpoint.final_model(run, run / "checkpoints" / "step-1")
        killed = killed_at(moment, run, lambda: checkpoint.final_model(run, run / "checkpoints" / "step-2"))  # noqa: B023
        held = {file.read_bytes()[-1] for file in (run / "model").rglob("*") if file.is_file()}
        assert held in (set(), {1, ord("1")}, {2, ord("2")})
        if not killed:
            assert names(run) == ["checkpoints", "model"]
            assert names(run / "model") == ["config.json", "model.safetensors", "more"]
            assert names(run / "model" / "more") == ["manifest.json"], "only the checkpoint's own is left out"
            break
    assert moment > 5


def test_a_worker_that_dies_while_a_checkpoint_is_written_is_no_full_disk(tmp_path: Path) -> None:
    """A run with `trainer.max_restarts` begins again from the checkpoint before."""

    def gathered_from_nobody(_: Path) -> None:
        raise WorkerDied("worker 0 of 2 is gone")

    small(tmp_path, 1)
    with pytest.raises(WorkerDied, match="worker 0 of 2 is gone"):
        checkpoint.save(tmp_path / "step-2", export=gathered_from_nobody, state={})
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    assert newest.name == "step-1"


def test_a_final_model_that_cannot_be_written_names_its_checkpoint(tmp_path: Path) -> None:
    folder = small(tmp_path / "checkpoints", 1)
    run = tmp_path / "run"
    run.write_text("no folder")
    with pytest.raises(CheckpointError, match=r"the final model .*model cannot be written .*step-1"):
        checkpoint.final_model(run, folder)


def test_a_broken_checkpoint_becomes_no_final_model(tmp_path: Path) -> None:
    folder = small(tmp_path / "checkpoints", 1)
    checkpoint.final_model(tmp_path, folder)
    _cut(folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"of checkpoint .*step-1, which is broken: model.safetensors has 99 bytes"
    ):
        checkpoint.final_model(tmp_path, folder)
    assert (tmp_path / "model" / "model.safetensors").stat().st_size == 100
