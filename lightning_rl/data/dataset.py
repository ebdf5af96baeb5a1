"""What may be given as a dataset: tasks by their index, as many as its length says. Each is a JSON value.

Tables are taken as their rows. What has no length or no order is refused, with what to give instead.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_rl.errors import Explained
from lightning_rl.store.contract import body_of
from lightning_rl.store.errors import Invalid


class TaskError(Explained, TypeError):
    """A task that is no JSON value, so that it could not travel to a runner; or a dataset that holds no tasks."""

    comes_again = True


def dataset_of(data: Any, name: str) -> Sequence[Any] | None:
    """The tasks of what was given as the dataset `name`; None where nothing was.

    Of a DataFrame (pandas, Polars) and a table (Arrow) they are the rows as dicts, of an array and a Series the
    values. Others are read by index, and stay as lazy as they are. Raises TaskError for what is no dataset, and naming
    its place for the first of a list's tasks that is no JSON value; of what is lazy the first task is looked at.
    """
    if data is None:
        return None
    rows = _rows(data)
    if isinstance(rows, str | bytes | os.PathLike):
        raise TaskError(
            f"{name} is the text {str(rows)[:80]!r}; tasks of a file are read by lightning_rl.data.load_tasks(path), "
            "or where the config names it"
        )
    if isinstance(rows, Mapping):
        keys = ", ".join(repr(key) for key in list(rows)[:4])
        raise TaskError(f"{name} is a {type(rows).__name__} of {keys}; give one of its values, or a list of tasks")
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        instead = "call it, and give list(...) of what it returns" if callable(rows) else "give list(...) of it"
        raise TaskError(f"{name} is a {type(rows).__name__}, which has no length or no order; {instead}")
    if isinstance(rows, list | tuple):
        for index, task in enumerate(rows):
            check_task(task, f"task {index} of {name}")
    elif len(rows):
        check_task(rows[0], f"task 0 of {name}")  # the others, which may be slow to read, when they are asked for
    return rows if hasattr(rows, "__iter__") else _ByIndex(rows)


def check_task(task: Any, where: str) -> None:
    """Raises TaskError, which says `where` it stands, for a task that is no JSON value."""
    try:
        json.dumps(task, allow_nan=False)
        body_of(task)
        _check_keys(task)
    except RecursionError:
        raise TaskError(f"{where} is no JSON value: it is nested too deeply, or holds itself") from None
    except (TypeError, ValueError, Invalid) as error:
        raise TaskError(
            f"{where} is no JSON value ({error}): {str(task)[:80]!r}; make it of dicts, lists, text, numbers, true, "
            "false and null"
        ) from error


def _check_keys(value: Any) -> None:
    """Raises TypeError for a key that JSON would make text of."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} is no text")
            _check_keys(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_keys(inner)


def _rows(data: Any) -> Any:
    if hasattr(data, "to_pylist"):  # Arrow
        return data.to_pylist()
    if hasattr(data, "to_dicts"):  # Polars
        return data.to_dicts()
    if hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas
        rows, missing = data.to_dict("records"), data.isna().to_dict("records")  # NaN is what is missing there
        return [
            {name: None if absent[name] is True else value for name, value in row.items()}
            for row, absent in zip(rows, missing, strict=True)
        ]
    return data.tolist() if hasattr(data, "tolist") else data


class _ByIndex(Sequence[Any]):
    """A dataset as torch has it, which has a length and an index, and iterated would go on for ever."""

    def __init__(self, tasks: Any) -> None:
        self._tasks = tasks

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: Any) -> Any:
        return self._tasks[index]

    def __iter__(self) -> Iterator[Any]:
        return (self._tasks[index] for index in range(len(self._tasks)))
