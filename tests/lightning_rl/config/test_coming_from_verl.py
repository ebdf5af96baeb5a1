"""`docs/coming-from-verl.md` is true: every key in its tables is what the page says it is."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from lightning_rl.config import compose, keys
from lightning_rl.config.schema import TrainConfig
from lightning_rl.rl.advantages import ESTIMATORS
from lightning_rl.rl.losses import LOSSES

PAGE = (Path(__file__).parents[3] / "docs" / "coming-from-verl.md").read_text()
OURS = {key.name: key for key in keys(TrainConfig)}
KINDS = {"same": "effect", "no effect": "no_effect"}


class Row(NamedTuple):
    """A line of the key tables. `defaults` are verl's and ours, or none."""

    key: str
    here: str
    defaults: list[Any]


def rows() -> list[Row]:
    lines = re.findall(
        r"^\| `([^`]+)` \| ([^|]+) \| ([^|]*) \| [^|]*\|$", PAGE.partition("## The keys")[2], re.MULTILINE
    )
    return [
        Row(key, here.strip("`"), [json.loads(default) for default in re.findall("`([^`]*)`", defaults)])
        for key, here, defaults in lines
    ]


def wrong(row: Row) -> str | None:
    """What is not as the page says; None where all is."""
    if row.key not in OURS or OURS[row.key].kind != KINDS.get(row.here):
        return f"{row.key} is not a key that is {row.here}"
    if row.defaults and (len(row.defaults) != 2 or row.defaults[1] != OURS[row.key].default):
        return f"the default of {row.key} is {OURS[row.key].default!r}"
    return None


def test_every_key_is_what_the_page_says() -> None:
    assert {row.key: why for row in rows() if (why := wrong(row)) is not None} == {}


def test_keys_that_are_the_same_are_taken_together() -> None:
    """As a configuration of verl's has them; what they do is in `test_effects.py`."""
    told: dict[str, Any] = {}
    for row in rows():
        if row.here in KINDS:
            inner = told
            *groups, leaf = row.key.split(".")
            for group in groups:
                inner = inner.setdefault(group, {})
            inner[leaf] = msgspec.to_builtins(OURS[row.key].default)
    assert compose(told, schema=TrainConfig) == compose(schema=TrainConfig)


def test_every_line_of_the_tables_is_read() -> None:
    lines = [line for line in PAGE.partition("## The keys")[2].splitlines() if line.startswith("| `")]
    named = [row.key for row in rows()]
    assert len(named) == len(lines) == len(set(named))
    assert len(named) > 100


def test_keys_that_are_here_for_verls_sake_are_on_the_page() -> None:
    taken = {name for name, key in OURS.items() if key.kind != "effect"}
    assert taken - {row.key for row in rows()} == set()


def test_the_estimators_and_losses_are_those_that_there_are() -> None:
    told = PAGE.partition("## Estimators and losses")[2].partition("\n\n")[2].partition("\n\n")[0]
    estimators, _, losses = told.partition("So are its losses")
    assert set(re.findall("`(.+?)`", estimators)) == ESTIMATORS.keys()
    assert set(re.findall("`(.+?)`", losses)) == LOSSES.keys() - {"ppo_clip"} | {"bypass_mode"}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (Row("data.seed", "no effect", []), "is not a key that is no effect"),
        (Row("data.seed", "absent", []), "is not a key that is absent"),
        (Row("data.prompt_key", "same", []), "is not a key"),
        (Row("data.seed", "same", [None, 1]), "the default of data.seed is 0"),
    ],
)
def test_a_line_that_is_wrong_is_found(row: Row, why: str) -> None:
    assert why in str(wrong(row))
