"""Where metrics go: lines that are read back, also after a cut; and what a person sees of a step."""

import io
import resource
from pathlib import Path

import pytest
from rich.console import Console

from lightning_rl.config import ConfigError
from lightning_rl.telemetry import metrics
from lightning_rl.telemetry.metrics.console import ConsoleTracker
from lightning_rl.telemetry.metrics.jsonl import JsonlTracker, history, keep_until, read


def written(path: Path, steps: int) -> bytes:
    tracker = JsonlTracker(path)
    for step in range(steps):
        tracker.log(step, {"reward": step / 2})
    tracker.close()
    return path.read_bytes()


def test_lines_are_read_back(tmp_path: Path) -> None:
    written(tmp_path / "m.jsonl", 2)
    rows = read(tmp_path / "m.jsonl")
    times = [row.pop("time") for row in rows]
    assert rows == [{"step": 0, "reward": 0.0}, {"step": 1, "reward": 0.5}]
    assert times == sorted(times)


def test_what_came_after_the_checkpoint_is_dropped(tmp_path: Path) -> None:
    whole = written(tmp_path / "m.jsonl", 5)
    assert [row["step"] for row in keep_until(tmp_path / "m.jsonl", 2)] == [0, 1, 2]
    assert (tmp_path / "m.jsonl").read_bytes() == b"".join(whole.splitlines(keepends=True)[:3])


def test_a_file_cut_at_any_byte_gives_its_whole_lines(tmp_path: Path) -> None:
    whole = written(tmp_path / "m.jsonl", 3)
    for cut in range(len(whole) + 1):
        (tmp_path / "m.jsonl").write_bytes(whole[:cut])
        kept = keep_until(tmp_path / "m.jsonl", 9)
        assert len(kept) == whole[:cut].count(b"\n")
        assert history(tmp_path / "m.jsonl") == kept == [{"step": n, "reward": n / 2} for n in range(len(kept))]


def test_a_line_that_is_none_of_ours_is_told_once_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = written(tmp_path / "m.jsonl", 3).splitlines(keepends=True)
    (tmp_path / "m.jsonl").write_bytes(whole[0] + whole[1][:9] + whole[1] + whole[2])
    for _ in range(2):
        assert [row["step"] for row in read(tmp_path / "m.jsonl")] == [0, 2]
    assert caplog.text.count("line 2 is no step's metrics") == 1
    assert [row["step"] for row in keep_until(tmp_path / "m.jsonl", 2)] == [0, 2]


def test_a_line_that_fits_in_part_leaves_nothing(tmp_path: Path) -> None:
    before = written(tmp_path / "m.jsonl", 2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: .*m\.jsonl"):
            tracker.log(2, {"reward": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "m.jsonl").read_bytes() == before
    tracker.log(2, {"reward": 1.0})
    assert [row["step"] for row in read(tmp_path / "m.jsonl")] == [0, 1, 2]


def test_a_run_without_a_checkpoint_begins_anew(tmp_path: Path) -> None:
    written(tmp_path / "m.jsonl", 3)
    assert keep_until(tmp_path / "m.jsonl", None) == []
    assert not (tmp_path / "m.jsonl").exists()


def test_a_step_is_a_line_with_its_failures() -> None:
    shown = io.StringIO()
    tracker = ConsoleTracker(4, Console(file=shown, width=120))
    step = {"critic/score/mean": 0.5, "perf/calls_per_s": 10.0, "timing_s/step": 3.0}
    tracker.log(0, {"val/reward": 0.25, "tune/reward": 0.5, "tune/best_step": 0.0})
    tracker.log(1, step)
    tokens = {
        "tokens/received": 1200.0,
        "tokens/trained": 1000.0,
        "tokens/excluded/overlong": 150.0,
        "tokens/pending": 50.0,
    }
    tracker.log(2, step | {"rollouts/agent_failed": 3.0} | tokens)
    tracker.close()
    lines = [" ".join(line.split()) for line in shown.getvalue().strip().splitlines()]
    assert lines == [
        "step 0 held-out reward 0.250",
        "step 0 tuning reward 0.500, best at step 0",
        "step 1/4 reward 0.500 held-out 0.250 10 calls/s about 9 s left",
        "step 2/4 reward 0.500 3 failed held-out 0.250 10 calls/s "
        "1,200 tokens: 1,000 trained, 150 overlong, 50 pending about 6 s left",
    ]


def test_a_long_step_tells_its_parts_and_a_run_that_goes_on_where() -> None:
    shown = io.StringIO()
    tracker = ConsoleTracker(4, Console(file=shown, width=120), began_at=2)
    seconds = {"step": 431.0, "gen": 120.4, "update_actor": 250.0, "old_log_prob": 60.0, "adv": 0.1, "ref": 59.0}
    step = {"critic/score/mean": 0.5, "perf/calls_per_s": 0.0333, "timing_s/sampling_idle": 400.0}
    tracker.log(3, step | {f"timing_s/{name}": value for name, value in seconds.items()})
    tracker.close()
    assert [" ".join(line.split()) for line in shown.getvalue().strip().splitlines()] == [
        "goes on behind step 2: 2 steps are left",
        "step 3/4 reward 0.500 0.033 calls/s 431 s (update_actor 250, gen 120, old_log_prob 60) about 431 s left",
    ]


def test_an_unknown_tracker_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'clearml' cannot be written to; there are console, jsonl"):
        metrics.open_trackers(["jsonl", "clearml"], tmp_path, 1)


def test_a_full_disk_is_named_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: make room, and do that again: .*m\.jsonl"):
        JsonlTracker(tmp_path / "m.jsonl").log(0, {})
