"""Tasks from files: JSONL, JSON, CSV, Parquet, Hugging Face datasets on disk, and folders of Harbor's tasks.

Invariant: a task is a JSON value, and a JSONL line is the very value that was written. A file that cannot be read as
asked is an error that names the file and the place in it.
"""

import csv
import difflib
import importlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from lightning_rl.data import images
from lightning_rl.errors import Explained

_BOM = b"\xef\xbb\xbf"
_EXCERPT = 40  # characters shown of the place where JSON ends to be JSON
_INTEGER = re.compile(r"-?(0|[1-9]\d{0,3999})", re.ASCII)  # int() takes no more than 4300 digits
HARBOR = "harbor"  # the field of a task that is a folder of Harbor's
_DECIMAL = re.compile(r"-?((0|[1-9]\d*)(\.\d*)?|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)


class DataError(Explained, ValueError):
    """A file of tasks that is not there, or not what its name says."""


def load_tasks(files: str | Path | Sequence[str | Path]) -> list[Any]:
    """The tasks of one or several files, joined in order.

    Args:
        files: JSONL (`.jsonl`, `.ndjson`), one JSON array (`.json`), CSV with a header (`.csv`, `.tsv`; a column whose
            every value is a number holds numbers, an empty value is None), Parquet (`.parquet`), or a folder made by
            the `save_to_disk` of a Hugging Face `Dataset`; these two need the extra `data`. Or a folder of Harbor's
            tasks: each is `{"name", "prompt", "harbor"}`, its folder's name and path and its instruction.

    Raises DataError naming the file and the place in it.
    """
    return [task for path in _paths(files) for task in _load(path)]


def check_files(files: str | Path | Sequence[str | Path]) -> None:
    """Raises DataError for a file that is not there, or of an unknown kind, without reading any."""
    for path in _paths(files):
        with _read_errors_named(path):
            _reader(path)


def _paths(files: str | Path | Sequence[str | Path]) -> list[Path]:
    paths = [Path(name).expanduser() for name in ([files] if isinstance(files, str | Path) else files)]
    if not paths:
        raise DataError("no file of tasks was named")
    return paths


def _load(path: Path) -> list[Any]:
    with _read_errors_named(path):
        tasks = list(_reader(path)(path))
    if not tasks:
        raise DataError(f"{path.resolve()} holds no task")
    return tasks


@contextmanager
def _read_errors_named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path.resolve()} cannot be read: {error.strerror or error}") from error


def _reader(path: Path) -> Callable[[Path], Iterator[Any]]:
    if not path.exists():
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, beside, n=1)
        raise DataError(f"there is no file {path.resolve()}" + (f"; did you mean {near[0]!r}?" if near else ""))
    if path.is_dir():
        return _harbor_folder if any(path.glob("*/task.toml")) else _dataset_folder
    if path.suffix.lower() not in _READERS:
        raise DataError(f"{path.resolve()}: tasks are read from {', '.join(_READERS)} and dataset folders")
    return _READERS[path.suffix.lower()]


def _text_lines(path: Path, kind: str) -> Iterator[str]:
    """The lines, ends included, without a byte order mark. Raises DataError for one that is not UTF-8."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield line.removeprefix(_BOM if number == 1 else b"").decode()
            except UnicodeDecodeError as error:
                raise DataError(f"{path.resolve()}:{number} is no {kind} in UTF-8: {error}") from error


def _jsonl(path: Path) -> Iterator[Any]:
    for number, line in enumerate(_text_lines(path, "JSON"), start=1):
        if line.strip():
            yield _json(line, path, number)


def _json_array(path: Path) -> Iterator[Any]:
    text = "".join(_text_lines(path, "JSON"))
    value = _json(text, path, 1) if text.strip() else []
    if not isinstance(value, list):
        raise DataError(f"{path.resolve()} holds no array of tasks; one task a line goes into a .jsonl file")
    yield from value


def _json(text: str, path: Path, first_line: int) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        line, reason = _explained(text, str(error))
    except RecursionError:
        line, reason = 0, "it is nested too deeply"
    raise DataError(f"{path.resolve()}:{first_line + line} is no JSON: {reason}")


def _explained(text: str, reason: str) -> tuple[int, str]:
    """How many lines into `text` it ends to be JSON, and why. msgspec counts bytes; people count lines."""
    match = re.search(r" \(byte (\d+)\)$", reason)
    if match is None:
        return text.rstrip().count("\n"), _why_truncated(text) if "truncated" in reason else reason
    raw, place = text.encode(), int(match[1])
    line, rest = raw[:place].count(b"\n"), raw[place:].decode(errors="replace").strip()
    if no_number := re.match(r"NaN|Infinity", rest):
        return line, f"{no_number[0]} is no JSON value"
    if "trailing" in reason:
        return line, "it is more than one value (in .jsonl each has a line of its own)"
    return line, f"{reason[: match.start()]}, at {rest[:_EXCERPT]!r}"


def _why_truncated(text: str) -> str:
    """msgspec says the same of what is not whole and of half a surrogate pair before the end of a string."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return "it is cut off: a value, a string or a bracket is not complete"
    return "it has half of a surrogate pair, \\ud800 to \\udbff without the other half, which is no character"


def _csv(path: Path) -> Iterator[Any]:
    with _long_fields():
        lines_and_rows = list(_csv_rows(path))
    if not lines_and_rows:
        return
    (line, names), *rows = lines_and_rows
    _check_header(names, f"{path.resolve()}:{line}")
    for line, row in rows:
        if len(row) != len(names):
            raise DataError(
                f"{path.resolve()}:{line} has not as many fields as the first line: {len(row)}, not {len(names)}"
            )
    columns = [_column([row[place] for _, row in rows]) for place in range(len(names))]
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Rows with the line that each begins on; blank lines are skipped."""
    separator = "\t" if path.suffix.lower() == ".tsv" else ","
    reader = csv.reader(_text_lines(path, "CSV"), delimiter=separator, strict=True)
    line = 1
    try:
        for row in reader:
            if row:
                yield line, row
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path.resolve()}:{line} is no CSV: {error}") from error


@contextmanager
def _long_fields() -> Iterator[None]:
    """Prompts are longer than the 128 KiB that the csv module takes by default."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _check_header(names: list[str], place: str) -> None:
    for number, name in enumerate(names, start=1):
        if not name.strip():
            raise DataError(f"{place}: column {number} has no name")
        if names.index(name) != number - 1:
            raise DataError(f"{place}: two columns are named {name!r}")


def _column(texts: list[str]) -> list[Any]:
    """What a column of CSV holds: numbers, where all its values are and none is a code such as 007; else text."""
    value = _value_type([text.strip() for text in texts if text])
    return [value(text) if text else None for text in texts]


def _value_type(texts: list[str]) -> Callable[[str], Any]:
    if all(_INTEGER.fullmatch(text) for text in texts):
        return int if all(int(text).bit_length() < 64 for text in texts) else str  # an id that JSON would not keep
    if all(_DECIMAL.fullmatch(text) and math.isfinite(float(text)) for text in texts):
        return float
    return str


def _parquet(path: Path) -> Iterator[Any]:
    """By pyarrow, on which `datasets` stands: that one would first write a copy into the user's cache."""
    parquet = _library("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            _check_header(file.schema_arrow.names, str(path.resolve()))
            yield from _rows(file.iter_batches(), path)
    except _library("pyarrow").ArrowException as error:
        raise DataError(f"{path.resolve()} is no Parquet file: {error}") from error


def _dataset_folder(path: Path) -> Iterator[Any]:
    datasets = _library("datasets")
    try:
        with _no_progress_bars(datasets):
            dataset = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path.resolve()} is no dataset that `save_to_disk` has written: {error}") from error
    if isinstance(dataset, datasets.DatasetDict):
        splits = ", ".join(str(path / split) for split in dataset)
        raise DataError(f"{path.resolve()} holds several splits; name one of them: {splits}")
    yield from _rows(dataset.with_format("arrow").iter(batch_size=1000), path)


def _harbor_folder(path: Path) -> Iterator[Any]:
    for file in sorted(path.glob("*/task.toml")):
        folder = file.parent.resolve()
        try:
            instruction = (folder / "instruction.md").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{folder}: a Harbor task has an instruction.md: {error}") from error
        yield {"name": folder.name, "prompt": instruction.strip(), HARBOR: str(folder)}


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(
            "Parquet files and dataset folders are read by `datasets`: pip install 'lightning-rl[data]'"
        ) from error


@contextmanager
def _no_progress_bars(datasets: Any) -> Iterator[None]:
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _rows(batches: Iterable[Any], path: Path) -> Iterator[Any]:
    """The rows of Arrow tables. Nothing is decoded on the way: an image is its bytes, which become a data URL."""
    rows = (row for batch in batches for row in _listed(batch, path))
    for number, row in enumerate(rows):
        yield {
            column: _plain(value, f"{path.resolve()}, row {number}, column {column!r}") for column, value in row.items()
        }


def _listed(batch: Any, path: Path) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = batch.to_pylist(maps_as_pydicts="strict")
    except (OverflowError, ValueError, KeyError) as error:  # a date that Python has none for, two equal keys of a map
        raise DataError(f"{path.resolve()} holds a value that cannot be read: {error}") from error
    return rows


def _plain(value: Any, place: str) -> Any:
    """`value` as JSON has it."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)  # a float would not be what was written
    if isinstance(value, list | tuple):
        return [_plain(item, place) for item in value]
    if isinstance(value, dict) and (image := images.as_text(value)) is not None:
        return image
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: _plain(item, place) for name, item in value.items()}
    if isinstance(value, dict):  # a map whose keys no JSON has
        return [[_plain(name, place), _plain(item, place)] for name, item in value.items()]
    advice = "; an image is a path, a URL, or what `datasets.Image` stores of a PNG, JPEG, GIF or WebP file"
    raise DataError(
        f"{place}: a task is a JSON value, and {type(value).__name__} {str(value)[:40]} is none"
        + advice * isinstance(value, bytes)
    )


_READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json_array,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
}
