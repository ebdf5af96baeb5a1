"""Ids: nobody else's, in the order of their milliseconds, and of the characters that URLs and stores take."""

import multiprocessing
import re
import time
from collections.abc import Callable

import pytest

from lightning_rl_adapters import ids


def test_ids_differ_and_are_short() -> None:
    made = {ids.new_id("r") for _ in range(20_000)} | {ids.new_call_id() for _ in range(20_000)}
    assert len(made) == 40_000
    assert all(re.fullmatch(r"r[0-9a-v]{20}|[0-9a-f]{32}", one) for one in made)


@pytest.mark.parametrize("make", [lambda: ids.new_id("a"), ids.new_call_id])
def test_what_is_made_later_is_greater(make: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns()
    made = []
    for milliseconds in (0, 1, 2, 1000, 40 * 365 * 86_400_000):
        monkeypatch.setattr(time, "time_ns", lambda passed=milliseconds: now + passed * 1_000_000)
        made.append(make())
    assert made == sorted(made)


def _make(_: int) -> list[str]:
    return [ids.new_id("r") for _ in range(200)]


def test_processes_that_were_forked_make_others() -> None:
    ids.new_id("r")
    with multiprocessing.get_context("fork").Pool(4) as pool:
        made = [one for part in pool.map(_make, range(4), chunksize=1) for one in part]
    assert len({one[10:] for one in made}) == 800  # also where they drew in the same millisecond
