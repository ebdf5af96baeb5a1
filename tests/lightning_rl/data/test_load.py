"""Tasks come back from files as they were written; what is wrong with a file is named, with its place."""

import csv
import json
import sys
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from lightning_rl.data import DataError, load_tasks
from tests import seeing

MAP = pyarrow.map_(pyarrow.string(), pyarrow.int64())
OF_DAYS = pyarrow.map_(pyarrow.date32(), pyarrow.int64())
TASKS: list[Any] = [{"q": "one", "n": 1}, {"q": "zwei ü", "n": 2}, {"q": "three", "n": 3}]
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(json_values, min_size=1, max_size=5))
def test_jsonl_is_exactly_what_was_written(tmp_path_factory: pytest.TempPathFactory, tasks: list[Any]) -> None:
    file = tmp_path_factory.mktemp("data") / "tasks.jsonl"
    file.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    assert load_tasks(file) == tasks


def test_jsonl_may_have_a_byte_order_mark_blank_lines_and_windows_ends(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n2\r\n')
    assert load_tasks(tmp_path / "a.jsonl") == [{"a": 1}, 2]


def test_several_files_are_joined_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("1\n2")
    (tmp_path / "b.json").write_text("[3, 4]")
    assert load_tasks([str(tmp_path / "b.json"), tmp_path / "a.jsonl"]) == [3, 4, 1, 2]


def test_csv_columns_of_numbers_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('q,n,x,code,part\n"a, b",1,1.5,007,\nc,-2,2,010,3\n')
    assert load_tasks(tmp_path / "a.csv") == [
        {"q": "a, b", "n": 1, "x": 1.5, "code": "007", "part": None},
        {"q": "c", "n": -2, "x": 2.0, "code": "010", "part": 3},
    ]


def test_tsv(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("q\tn\na,b\tinf\n")
    assert load_tasks(tmp_path / "a.tsv") == [{"q": "a,b", "n": "inf"}]


def test_parquet(tmp_path: Path) -> None:
    nested = [task | {"list": [{"x": 0.5}], "day": date(2024, 2, 29)} for task in TASKS]
    datasets.Dataset.from_list(nested).to_parquet(tmp_path / "a.parquet")
    assert load_tasks(tmp_path / "a.parquet") == [task | {"list": [{"x": 0.5}], "day": "2024-02-29"} for task in TASKS]


def test_a_dataset_on_disk(tmp_path: Path) -> None:
    datasets.Dataset.from_list(TASKS).save_to_disk(tmp_path / "set")
    assert load_tasks(tmp_path / "set") == TASKS


def test_of_several_splits_one_is_named(tmp_path: Path) -> None:
    split = datasets.Dataset.from_list(TASKS)
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(tmp_path / "set")
    with pytest.raises(DataError, match=f"name one of them: {tmp_path}/set/train, {tmp_path}/set/test"):
        load_tasks(tmp_path / "set")
    assert load_tasks(tmp_path / "set" / "test") == TASKS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', r"a\.jsonl:2 is no JSON: "),
        ("a.jsonl", b'{"a": NaN}\n', r"a\.jsonl:1 is no JSON: "),
        ("a.jsonl", b'1\n"\xff"\n', r"a\.jsonl:2 is no JSON in UTF-8: .*0xff in position 1"),
        ("a.jsonl", b'{"a": NaN}\n', r"NaN is no JSON value"),
        ("a.jsonl", b'{"a": [-Infinity]}\n', r"Infinity is no JSON value"),
        ("a.jsonl", b"1e999\n", r"a\.jsonl:1 is no JSON: Number out of range"),
        ("a.jsonl", b'1\n\n{"a": 1} {"a": 2}\n', r"a\.jsonl:3 is no JSON: it is more than one value"),
        ("a.jsonl", b'{\n  "a": 1\n}\n', r"a\.jsonl:1 is no JSON: it is cut off"),
        ("a.jsonl", b"{'a': 1}\n", r"a\.jsonl:1 is no JSON: .*, at \"'a': 1}\""),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1 is no JSON: it is nested too deeply"),
        ("a.jsonl", b"", r"a\.jsonl holds no task"),
        ("a.json", b"[]", r"a\.json holds no task"),
        ("a.json", b" ", r"a\.json holds no task"),
        ("a.json", b"[1,\n2,\n x]", r"a\.json:3 is no JSON: "),
        ("a.json", b"[1,\n2,\n\n", r"a\.json:2 is no JSON: it is cut off"),
        ("a.jsonl", rb'{"a": "\ud83d"}', r"a\.jsonl:1 is no JSON: it has half of a surrogate pair"),
        ("a.json", b'{"a": 1}\n{"a": 2}\n', r"a\.json:2 is no JSON: it is more than one value"),
        ("a.jsonl", b"\n", r"a\.jsonl holds no task"),
        ("a.json", b'{"a": 1}', r"a\.json holds no array of tasks"),
        ("a.csv", b"q,n\na\n", r"a\.csv:2 has not as many fields as the first line"),
        ("a.csv", b"q,n\na,1,2\n", r"a\.csv:2 has not as many fields as the first line"),
        ("a.csv", b"q,n\n\xff,1\n", r"a\.csv:2 is no CSV in UTF-8"),
        ("a.csv", b'q,n\n"a\nb",1\n\nc,1,2\n', r"a\.csv:5 has not as many fields as the first line: 3, not 2"),
        ("a.csv", b'q,n\na,1\n"b,2\nc,3\n', r"a\.csv:3 is no CSV: unexpected end of data"),
        ("a.csv", b"q,n,q\na,1,b\n", r"a\.csv:1: two columns are named 'q'"),
        ("a.csv", b"q,\na,1\n", r"a\.csv:1: column 2 has no name"),
        ("a.csv", b"", r"a\.csv holds no task"),
        ("a.csv", b"q,n\n", r"a\.csv holds no task"),
        ("a.parquet", b"PAR0", r"a\.parquet is no Parquet file"),
        ("a.txt", b"1\n", r"a\.txt: tasks are read from \.jsonl, .* and dataset folders"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_tasks(tmp_path / name)


def test_values_that_json_lacks_are_named(tmp_path: Path) -> None:
    for value, name in ((float("nan"), "float nan"), (b"x", "bytes b'x'")):
        datasets.Dataset.from_list([{"q": value}]).to_parquet(tmp_path / "a.parquet")
        with pytest.raises(DataError, match=f"row 0, column 'q': a task is a JSON value, and {name} is none"):
            load_tasks(tmp_path / "a.parquet")


def test_a_parquet_file_of_two_columns_of_one_name_or_of_dates_beyond_python_is_named(tmp_path: Path) -> None:
    far = pyarrow.array([2**40]).cast(pyarrow.timestamp("s"))
    for table, told in (
        (pyarrow.table([[1], [2]], names=["a", "a"]), "two columns are named 'a'"),
        (pyarrow.table({"a": far}), "holds a value that cannot be read"),
    ):
        parquet.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(DataError, match=rf"a\.parquet.* {told}"):
            load_tasks(tmp_path / "a.parquet")


def test_a_file_that_is_not_there_is_named_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("1\n")
    with pytest.raises(DataError, match=f"there is no file {tmp_path}/task.jsonl; did you mean 'tasks.jsonl'"):
        load_tasks(tmp_path / "task.jsonl")


def test_a_folder_that_is_no_dataset_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no dataset that `save_to_disk` has written"):
        load_tasks(tmp_path)


def test_without_the_library_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("datasets", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "a.parquet").touch()
    for path in (tmp_path / "a.parquet", tmp_path):
        with pytest.raises(DataError, match=r"pip install 'lightning-rl\[data\]'"):
            load_tasks(path)


def test_codes_and_telephone_numbers_stay_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("zip,phone,big,point,mixed\n 007,+4930,123456789012345678901,.5,1\n8,1,2,5.,\n")
    first, second = load_tasks(tmp_path / "a.csv")
    assert first == {"zip": " 007", "phone": "+4930", "big": "123456789012345678901", "point": 0.5, "mixed": 1}
    assert second == {"zip": "8", "phone": "1", "big": "2", "point": 5.0, "mixed": None}


@pytest.mark.parametrize("text", ["1_000", "٣", "0x10", "1e999", "nan", "1 2", "True", "--1", "1,5", "9" * 5000])
def test_what_is_no_number_stays_text(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f'q,n\n"{text}",1\n', encoding="utf-8")
    assert load_tasks(tmp_path / "a.csv") == [{"q": text, "n": 1}]


def test_csv_from_a_spreadsheet_reads_as_it_shows(tmp_path: Path) -> None:
    (tmp_path / "A.CSV").write_bytes(b'\xef\xbb\xbfq,n\r\n"two\r\nlines, ""quoted""",1\r\n\r\nc,2\r\n')
    assert load_tasks(tmp_path / "A.CSV") == [{"q": 'two\r\nlines, "quoted"', "n": 1}, {"q": "c", "n": 2}]


def test_a_csv_field_may_be_as_long_as_a_prompt(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    (tmp_path / "a.csv").write_text("q\n" + "x" * 300_000 + "\n")
    assert load_tasks(tmp_path / "a.csv") == [{"q": "x" * 300_000}]
    assert csv.field_size_limit() == limit


def test_integers_of_any_size_are_exact(tmp_path: Path) -> None:
    numbers = [2**63, 2**64 + 1, -(10**40)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(str, numbers)))
    assert load_tasks(tmp_path / "a.jsonl") == numbers


def test_parquet_values_become_json(tmp_path: Path) -> None:
    noon = datetime(2024, 2, 29, 12, tzinfo=UTC)
    columns = {"when": [noon], "price": [Decimal("12.50")], "vectors": [[[1.5, 2.5], []]], "none": [None]}
    columns |= {"map": pyarrow.array([[("k", 1)]], MAP), "of_days": pyarrow.array([[(noon.date(), 1)]], OF_DAYS)}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    [task] = load_tasks(tmp_path / "a.parquet")
    assert task == {
        "when": noon.isoformat(), "price": "12.50", "vectors": [[1.5, 2.5], []], "none": None, "map": {"k": 1},
        "of_days": [["2024-02-29", 1]],
    }  # fmt: skip
    assert json.loads(json.dumps(task)) == task


def test_images_become_data_urls(tmp_path: Path) -> None:
    content = seeing.picture(1)
    paths = [{"bytes": None, "path": "b.png"}]
    rows = [{"images": [{"bytes": content, "path": "a.png"}], "n": 1}, {"images": paths, "n": 2}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    assert load_tasks(tmp_path / "a.parquet") == [
        {"images": [seeing.data_url(content)], "n": 1},
        {"images": paths, "n": 2},
    ]
    features = datasets.Features({"image": datasets.Image()})
    datasets.Dataset.from_list([{"image": {"bytes": content, "path": None}}], features).save_to_disk(tmp_path / "set")
    assert load_tasks(tmp_path / "set") == [{"image": seeing.data_url(content)}]
    datasets.Dataset.from_list([{"sound": {"bytes": b"RIFF1234WAVE", "path": None}}]).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"row 0, column 'sound': .*; an image is a path, a URL, or what"):
        load_tasks(tmp_path / "a.parquet")


def test_a_dataset_of_arrays_and_labels(tmp_path: Path) -> None:
    features = datasets.Features({"grid": datasets.Array2D((2, 2), "int64"), "label": datasets.ClassLabel(names=["a"])})
    datasets.Dataset.from_dict({"grid": [[[1, 2], [3, 4]]], "label": [0]}, features).save_to_disk(tmp_path / "set")
    assert load_tasks(tmp_path / "set") == [{"grid": [[1, 2], [3, 4]], "label": 0}]


def test_a_saved_selection_keeps_its_order(tmp_path: Path) -> None:
    datasets.Dataset.from_list(TASKS).select([2, 0]).save_to_disk(tmp_path / "set")
    assert load_tasks(tmp_path / "set") == [TASKS[2], TASKS[0]]


def test_nothing_is_shown_or_cached_and_no_setting_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    datasets.Dataset.from_list(TASKS).to_parquet(tmp_path / "a.parquet")
    datasets.Dataset.from_list(TASKS).save_to_disk(tmp_path / "set", num_shards=3)
    capfd.readouterr()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    before = sorted(tmp_path.rglob("*"))
    assert load_tasks([tmp_path / "a.parquet", tmp_path / "set"]) == TASKS + TASKS
    assert capfd.readouterr() == ("", "")
    assert sorted(tmp_path.rglob("*")) == before
    assert not datasets.are_progress_bars_disabled()


def test_one_file_at_least_is_named() -> None:
    with pytest.raises(DataError, match="no file of tasks was named"):
        load_tasks([])


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"there is no file {tmp_path}/no/a.jsonl$"):
        load_tasks(tmp_path / "no" / "a.jsonl")
