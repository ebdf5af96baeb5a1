"""What lies in a run's folder beside its store, as lists and curves show it: state, metrics, config.

Invariant: nothing secret leaves here. A key's value is replaced by what it is, wherever it stands in a config, a URL
loses its password, and of environment variables only names are shown.
"""

import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import yaml

from lightning_rl.algorithms.evaluation import EVALUATIONS, Evaluation
from lightning_rl.files import LOCK, finished, is_held
from lightning_rl.inspect.recorded import STORE, NotRecorded
from lightning_rl.telemetry.metrics import jsonl

METRICS, CONFIG = "metrics.jsonl", "config.yaml"
URL_FILE, KEY_FILE = "server.url", "admin.key"
_SECRET = re.compile(
    r"(^|[._-])(api_?key|key|token|secret|pwd|pat|credentials?)$|(password|passwd|secret_?key)$", re.IGNORECASE
)
_ASSIGNED = re.compile(r"(\w*(?:key|token|secret|passw(?:or)?d|pwd|_pat|credentials?))=[^\s,]+", re.IGNORECASE)
_ENVIRONMENT = re.compile(r"(^|\.)(environment|env_vars)\.")
_PASSWORD = re.compile(r"(?<=://)([^/@\s:]*):[^/@\s]+@")
_BEST = (("tune/reward", "tuning reward"), ("val/reward", "held-out reward"), ("critic/score/mean", "reward"))
_FILES = 64  # that are kept read
_TIMES = ("timing_s/step", "timing_s/testing", "timing_s/tuning")


def runs_below(folders: list[Path]) -> list[Path]:
    """The run folders among `folders` and below them, the newest first. Raises NotRecorded where there is none."""
    written_at: dict[Path, float] = {}
    for folder in folders:
        if not folder.is_dir():
            problem = (
                f"{folder.resolve()} is no folder" if folder.exists() else f"there is no folder {folder.resolve()}"
            )
            raise NotRecorded(f"{problem}: name that of a run, or one that has runs below it")
        for run_dir in _runs(folder):
            written_at.setdefault(run_dir.resolve(), _written(run_dir))
    if not written_at:
        places = ", ".join(str(folder.resolve()) for folder in folders)
        raise NotRecorded(f"there is no run in {places}: a run's folder has a {STORE} or a {METRICS}")
    return sorted(written_at, key=lambda run_dir: -written_at[run_dir])


def _runs(folder: Path) -> Iterator[Path]:
    if is_run(folder):
        yield folder
        return
    for depth in ("*", "*/*", "*/*/*"):  # trainer.project_name makes a folder between
        yield from (path for path in sorted(folder.glob(depth)) if path.is_dir() and is_run(path))


def is_run(folder: Path) -> bool:
    """Whether a run has written here."""
    return any((folder / name).is_file() for name in (STORE, METRICS, URL_FILE))


def _written(run_dir: Path) -> float:
    files = (run_dir / name for name in (METRICS, STORE, f"{STORE}-wal", CONFIG))
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


def metrics(run_dir: Path) -> list[dict[str, float]]:
    """The lines of the run's metrics; one that is not whole yet, or none of ours, is left out."""
    file = run_dir / METRICS
    return _read_metrics(file, _stamp(file)) if file.is_file() else []


@lru_cache(_FILES)
def _read_metrics(file: Path, _stamp: tuple[int, int]) -> list[dict[str, float]]:
    return jsonl.read(file)


def _stamp(file: Path) -> tuple[int, int]:
    """What is another one once the file was written to."""
    stat = file.stat()
    return stat.st_mtime_ns, stat.st_size


def series(rows: list[dict[str, float]], names: list[str]) -> dict[str, Any]:
    """The values of these metrics, each with its steps and with the seconds that the run had taken by then.

    These are by the clock, or, in lines that have no `time`, the sum of what the steps took.
    """
    curves: dict[str, dict[str, list[float]]] = {name: {"step": [], "seconds": [], "value": []} for name in names}
    seconds, began = 0.0, None
    for row in rows:
        before, seconds = seconds, seconds + sum(row.get(name, 0.0) for name in _TIMES)
        if "time" in row:
            if began is None or row["time"] - began < before:  # the first row, or a clock that was set back
                began = row["time"] - seconds
            seconds = row["time"] - began
        for name, points in curves.items():
            if name in row and math.isfinite(row[name]):
                points["step"].append(row["step"])
                points["seconds"].append(round(seconds, 3))
                points["value"].append(row[name])
    return {name: points for name, points in curves.items() if points["step"]}


def best(rows: list[dict[str, float]]) -> dict[str, Any] | None:
    """The best reward of the tuning set, else of held-out tasks, else of training."""
    for name, label in _BEST:
        measured = [(row[name], int(row["step"])) for row in rows if name in row]
        if measured:
            value, step = max(measured, key=lambda one: one[0])
            return {"metric": name, "label": label, "value": value, "step": step, "last": measured[-1][0]}
    return None


def account(rows: list[dict[str, float]]) -> dict[str, Any] | None:
    """The token account as the newest line has it; None where nothing was counted."""
    last = next((row for row in reversed(rows) if "tokens/received" in row), None)
    if last is None:
        return None
    prefix = "tokens/excluded/"
    return {
        "step": int(last["step"]),
        "received": last["tokens/received"],
        "trained": last.get("tokens/trained", 0.0),
        "pending": last.get("tokens/pending", 0.0),
        "excluded": {name.removeprefix(prefix): n for name, n in sorted(last.items()) if name.startswith(prefix)},
    }


def state(run_dir: Path) -> str:
    """`running`, `finished`, or `stopped` (it ended before its last step, or crashed)."""
    if is_held(run_dir / LOCK):
        return "running"
    ended = finished(run_dir) is not None or (run_dir / EVALUATIONS).is_file()
    return "finished" if ended else "stopped"


def evaluations(run_dir: Path) -> list[str]:
    """What a baseline measured on each of its datasets, in words; none of another run, or before it ended. Raises
    NotRecorded."""
    file = run_dir / EVALUATIONS
    if not file.is_file():
        return []
    try:
        measured = msgspec.json.decode(file.read_bytes(), type=list[dict[str, Any]])
        known = ({name: math.nan if value is None else value for name, value in one.items()} for one in measured)
        return [str(msgspec.convert(one, Evaluation)) for one in known]  # what was not measured is null in JSON
    except (msgspec.MsgspecError, OSError) as error:
        raise NotRecorded(f"{file.resolve()} is no baseline's: {error}") from error


def config(run_dir: Path) -> dict[str, Any]:
    """The run's keys, flat and without secrets; {} where it has none. Raises NotRecorded."""
    file = run_dir / CONFIG
    if not file.is_file():
        return {}
    try:
        return _read_config(file, _stamp(file))
    except (yaml.YAMLError, OSError, UnicodeError, AttributeError) as error:
        raise NotRecorded(f"{file.resolve()} cannot be read as a run's config: {error}") from error


@lru_cache(_FILES)
def _read_config(file: Path, _stamp: tuple[int, int]) -> dict[str, Any]:
    return dict(flat(yaml.safe_load(file.read_text(encoding="utf-8")) or {}))


def flat(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a config by their dotted keys."""
    for name, inner in value.items():
        key = f"{before}{name}"
        if isinstance(inner, Mapping) and inner:
            yield from flat(inner, f"{key}.")
        else:
            yield key, without_secret(key, inner)


def without_secret(key: str, value: Any) -> Any:
    """The value of a key as it may be shown."""
    if isinstance(value, str) and value and _SECRET.search(key):
        return "(a key, not shown)"
    if isinstance(value, str) and _ENVIRONMENT.search(key):
        return "(set, not shown)"
    if isinstance(value, str):
        return _ASSIGNED.sub(r"\1=***", _PASSWORD.sub(r"\1:***@", value))
    if isinstance(value, list):
        return [without_secret(key, each) for each in value]
    return dict(flat(value)) if isinstance(value, Mapping) else value
