"""What may be given as a dataset, and what is refused by name before anything is begun."""

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lightning_rl as lrl
from lightning_rl.data.dataset import TaskError, dataset_of


class ByIndex:
    """As torch's datasets are: an index that is too large is no error of its own."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index * 10


def nested(levels: int) -> Any:
    task: Any = None
    for _ in range(levels):
        task = [task]
    return task


def test_a_dataset_without_an_iterator_ends_where_its_length_says() -> None:
    found: Any = dataset_of(ByIndex(), "train_dataset")
    assert (list(found), list(enumerate(found))[-1], len(found), found[1]) == ([0, 10, 20], (2, 20), 3, 10)


def test_tables_are_their_rows_and_arrays_their_values() -> None:
    arrow = pytest.importorskip("pyarrow")
    pandas = pytest.importorskip("pandas")
    rows = [{"a": 1, "b": None}, {"a": 2, "b": "x"}]
    assert dataset_of(pandas.DataFrame(rows), "x") == dataset_of(arrow.Table.from_pylist(rows), "x") == rows
    assert dataset_of(pandas.DataFrame({"n": [1.5, None]}), "x") == [{"n": 1.5}, {"n": None}]
    assert dataset_of(np.array([1.5, 2.0]), "x") == [1.5, 2.0]
    assert dataset_of(None, "x") is None


def test_a_list_is_itself_and_what_is_lazy_stays_so() -> None:
    tasks = [{"question": "how many?", "é": None}, [1, 2.5, True], "text", 2**64 - 1]
    datasets = pytest.importorskip("datasets")
    lazy = datasets.Dataset.from_list([{"a": 1}, {"a": 2}])
    assert dataset_of(tasks, "x") is tasks
    assert dataset_of(lazy, "x") is lazy
    dated = datasets.Dataset.from_list([{"when": datetime.date(2026, 1, 2)}])
    with pytest.raises(TaskError, match="task 0 of x is no JSON value"):
        dataset_of(dated, "x")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("tasks.jsonl", r"val_dataset is the text 'tasks.jsonl'; .*load_tasks"),
        (Path("tasks.jsonl"), r"val_dataset is the text 'tasks.jsonl'; .*load_tasks"),
        (nested, r"val_dataset is a function, .*; call it, and give list"),
        ([nested(10_000)], r"task 0 of val_dataset is no JSON value: it is nested too deeply"),
        ({"train": [1], "test": [2]}, r"val_dataset is a dict of 'train', 'test'; give one of its values"),
        ((i for i in range(3)), r"val_dataset is a generator, which has no length or no order"),
        ({1, 2}, r"val_dataset is a set, which has no length or no order"),
        ([1, {"a": float("nan")}], r"task 1 of val_dataset is no JSON value"),
        ([datetime.date(2026, 1, 1)], r"task 0 of val_dataset is no JSON value \(Object of type date"),
        ([1, 2**64], r"task 1 of val_dataset is no JSON value \(int holds a whole number of more than 64 bits"),
        (["half an emoji: \ud83d"], r"task 0 of val_dataset is no JSON value .*surrogates not allowed"),
        ([{"a": [{1: "x"}]}], r"task 0 of val_dataset is no JSON value \(key 1 is no text"),
        ([object()], r"task 0 of val_dataset is no JSON value"),
    ],
)
def test_what_is_no_dataset_is_refused_before_there_is_a_run(given: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=message):
        lrl.Trainer(lambda task, llm: 1.0, run_dir=tmp_path / "run").fit(lrl.Baseline(), [1], given)
    assert not (tmp_path / "run").exists()
