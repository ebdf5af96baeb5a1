"""What a run says at its end: what became of the reward, where everything is, and what to type next."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from lightning_rl.files import write_whole

_FILE = "finished.json"  # in the run's folder
_EDGE = 4  # of the steps, a quarter is a run's beginning, or its end


class Finished(msgspec.Struct, frozen=True):
    """A run that has come to its end: the steps that it was to make, and those that it made (fewer where it stopped
    early)."""

    asked: int
    made: int


def note_end(run_dir: Path, finished: Finished | None) -> None:
    """Note that the run has come to its end; None: that it goes on."""
    if finished is None:
        (run_dir / _FILE).unlink(missing_ok=True)
    else:
        write_whole(run_dir / _FILE, msgspec.json.encode(finished))


def end_of(run_dir: Path) -> Finished | None:
    """How the run came to its end; None where it has not, or its model is not there."""
    file = run_dir / _FILE
    if not file.is_file() or not (run_dir / "model").is_dir():
        return None
    return msgspec.json.decode(file.read_bytes(), type=Finished)


def lines(run_dir: Path, history: Sequence[Mapping[str, float]], rollout: str | None) -> list[str]:
    """The summary. `history` are the metrics of all steps, `rollout` is one that was trained last."""
    told = []
    for what, name in (("reward", "critic/score/mean"), ("held-out", "val/reward"), ("tuning", "tune/reward")):
        values = [(int(row["step"]), row[name]) for row in history if name in row]
        if name == "critic/score/mean":
            values = _edges(values)
        if values:
            told.append(f"{what:<12}{_change(values)}")
    folder = shlex.quote(str(run_dir))
    told.append(f"{'run':<12}{run_dir}")
    if (run_dir / "model").is_dir():
        told.append(f"{'model':<12}{run_dir / 'model'}")
    told.append(f"{'next':<12}lightning-rl doctor {folder}")
    if rollout is not None:
        told.append(f"{'':<12}lightning-rl explain {rollout} --run-dir {folder}")
    return told


def _change(values: Sequence[tuple[int, float]]) -> str:
    (first, before), (last, after) = values[0], values[-1]
    if first == last:
        return f"{after:.3f} (step {last})"
    return f"{before:.3f} -> {after:.3f} (step {first} to {last})"


def _edges(values: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The first and the last value, each the mean of a quarter of the steps: a step alone is noise."""
    edge = len(values) // _EDGE
    if edge < 2:
        return [*values]
    before, after = (sum(value for _, value in part) / edge for part in (values[:edge], values[-edge:]))
    return [(values[0][0], before), (values[-1][0], after)]
