"""Who joins which batch: nobody waits where there is room, and a batch takes its share and no more."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rl.inference import scheduler
from lightning_rl.inference.batch import LONG_PROMPT, Sequence
from lightning_rl.inference.scheduler import ALONE, Scheduler, room
from lightning_rl.inference.sequence import GenerationRequest
from tests.random_examples import examples

LONG = [1] * LONG_PROMPT


def sequence(name: str, *, adapter: int = 0, priority: int = 0, prompt: list[int] | None = None) -> Sequence:
    tokens = prompt or [1]
    asked = GenerationRequest(request_id=name, token_ids=tokens, adapter=adapter, priority=priority)
    return Sequence(asked, np.array(tokens), np.uint64(0), (), None)


def names(sequences: list[Sequence]) -> list[str]:
    return [one.request_id for one in sequences]


batches = st.lists(st.tuples(st.integers(0, 60), st.booleans()), min_size=1, max_size=6)


@settings(max_examples=examples(200))
@given(batches, st.integers(0, 200), st.integers(1, 8))
def test_whoever_can_be_written_joins_some_batch(batches: list[tuple[int, bool]], waiting: int, each: int) -> None:
    most = len(batches) * max(each * ALONE, max(rows for rows, _ in batches))
    free = [most // len(batches) - rows for rows, _ in batches]
    rows, going = [rows for rows, _ in batches], [rows > 0 and goes for rows, goes in batches]
    joins = [min(space, room(waiting, rows, going, number, most)) for number, space in enumerate(free)]
    assert all(0 <= one <= waiting for one in joins)
    assert bool(sum(joins)) == bool(waiting and sum(rows) < most)


@pytest.mark.parametrize(
    ("waiting", "rows", "joins"),
    [
        (1, [0, 0], [1, 1]),  # whoever comes first
        (ALONE, [0, 0], [ALONE, ALONE]),
        (ALONE + 1, [0, 0], [13, 13]),  # more than one batch writes alone: half of them each
        (1, [5, 0], [1, 0]),  # few are better written together
        (1, [0, 5], [0, 1]),
        (1, [ALONE, 0], [0, 1]),
        (10, [30, 2], [0, 10]),
        (10, [30, 26], [3, 7]),
        (100, [50, 50], [28, 28]),  # 128 are written at most
        (100, [63, 63], [2, 2]),
    ],
)
def test_the_share_of_a_batch(waiting: int, rows: list[int], joins: list[int]) -> None:
    going = [count > 0 for count in rows]
    assert [room(waiting, rows, going, number, 128) for number in (0, 1)] == joins


def test_the_lowest_priority_is_first_and_of_equal_ones_the_first_to_come() -> None:
    one = Scheduler(1, 8, copies_prompts=True)
    one.add([sequence("a"), sequence("b", priority=2), sequence("c", priority=-1)])
    one.add([sequence("d"), sequence("e", priority=-1)])
    assert names(one.take(0, 2)) == ["c", "e"]
    assert names(one.take(0, 8)) == ["a", "d", "b"]
    assert one.waiting == 0


def test_a_long_prompt_that_another_batch_reads_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "ALONE", 1)
    two = Scheduler(2, 8, copies_prompts=True)
    two.add(
        [sequence("a", prompt=LONG), sequence("b", prompt=LONG), sequence("c"), sequence("d", prompt=[*LONG[1:], 2])]
    )
    first = two.take(0, 1)
    assert names(first) == ["a"]
    assert names(two.take(1, 2)) == ["c", "d"]
    assert (names(two.take(1, 1)), two.waiting) == ([], 1)
    two.read(first)
    assert names(two.take(1, 1) + two.take(0, 1)) == ["b"]


def test_where_nothing_is_copied_a_long_prompt_is_read_by_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "ALONE", 1)
    two = Scheduler(2, 8, copies_prompts=False)
    two.add([sequence("a", prompt=LONG), sequence("b", prompt=LONG)])
    assert names(two.take(0, 1) + two.take(1, 1)) == ["a", "b"]


def test_a_pause_holds_those_with_its_adapter_alone() -> None:
    one = Scheduler(2, 8, copies_prompts=True)
    assert (one.add_adapter(), one.adapters) == (1, 2)
    one.add([sequence("a"), sequence("b", adapter=1)])
    taken = one.take(0, 8)
    one.add([sequence("c", adapter=1)])
    one.pause(1, freeze=False)
    one.add([sequence("d"), sequence("e", adapter=1)])
    assert (one.paused(0), one.paused(1), one.quiet(1), one.going) == (False, True, False, [True, False])
    taken += one.take(0, 8)
    assert names(taken) == ["a", "b", "d"]
    one.leave(0, taken[1])
    assert one.quiet(1)
    one.pause(0, freeze=True)
    assert (one.quiet(0), one.going, one.frozen.tolist()) == (True, [False, False], [True, False])
    one.resume(1)
    assert names(one.take(1, 8)) == ["c", "e"]  # what stands still in batch 0 keeps nobody waiting
    one.resume(0)
    assert one.going == [True, True]


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=60))
def test_batches_that_come_and_go_write_everyone_once(turns: list[tuple[int, int]]) -> None:
    several = Scheduler(3, 3 * ALONE, copies_prompts=True)
    written: list[list[Sequence]] = [[], [], []]
    told: Counter[str] = Counter()
    for turn, (arrive, number) in enumerate(turns):
        several.add(sequence(f"{turn}-{each}") for each in range(20 * arrive))
        written[number] += several.take(number, ALONE - len(written[number]))
        ended, written[number] = written[number][:7], written[number][7:]
        for one in ended:
            several.leave(number, one)
        told.update(names(ended))
    while several.waiting or any(written):
        for number in range(3):
            written[number] += several.take(number, ALONE - len(written[number]))
            assert len(written[number]) <= ALONE
            for one in written[number]:
                several.leave(number, one)
            told.update(names(written[number]))
            written[number] = []
    assert set(told.values()) <= {1}
    assert told.total() == 20 * sum(arrive for arrive, _ in turns)
