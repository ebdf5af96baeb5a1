"""What is found of a prompt among the kept rows is the longest, also where only what was kept since is looked at, and
where a sequence took the row of the one that it goes on from."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rl.inference import cache as cache_module
from lightning_rl.inference.cache import NOTHING, Prefixes, SlotCache
from tests.random_examples import examples

SIZE = 3
TEXTS = st.lists(st.integers(1, 2), min_size=2, max_size=6).map(lambda ids: np.array(ids, np.int64))
ADAPTERS = st.integers(0, 1)
DONE = st.one_of(
    st.tuples(st.just("keep"), st.lists(TEXTS, min_size=1, max_size=2), ADAPTERS),
    st.tuples(st.just("find"), st.integers(0, 3), ADAPTERS),
    st.tuples(st.just("clear"), ADAPTERS, ADAPTERS),
)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(TEXTS, min_size=4, max_size=4), st.lists(DONE, max_size=12))
def test_what_was_found_before_leads_to_what_is_found_anew(prompts: list, done: list) -> None:
    before, cache_module.SHORTEST_PREFIX = cache_module.SHORTEST_PREFIX, 1
    try:
        prefixes, cache = Prefixes(SIZE, 0, 8), SlotCache(0, SIZE, 8)
        known = {}
        for what, given_, adapter in done:
            if what == "keep":
                found = [prefixes.find(np.append(text, 0), adapter) for text in given_]
                prefixes.keep(cache, list(range(len(given_))), given_, np.full(len(given_), adapter), found)
            elif what == "clear":
                prefixes.clear(given_)
            else:
                prompt = prompts[given_]
                anew = prefixes.find(prompt, adapter)
                found = known[given_, adapter] = prefixes.find(prompt, adapter, known.get((given_, adapter), NOTHING))
                assert found.shared == anew.shared
                if found.shared:
                    row = prefixes._tokens[found.row, : found.shared]
                    assert (row == prompt[: found.shared]).all()
                    assert prefixes._adapters[found.row] == adapter
    finally:
        cache_module.SHORTEST_PREFIX = before


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(TEXTS, min_size=4, max_size=4), st.lists(DONE, max_size=12))
def test_nothing_is_lost_that_there_is_room_for(prompts: list, done: list) -> None:
    before, cache_module.SHORTEST_PREFIX = cache_module.SHORTEST_PREFIX, 1
    try:
        prefixes, cache = Prefixes(30, 0, 8), SlotCache(0, 30, 8)
        kept: list[tuple[int, np.ndarray]] = []
        for what, given_, adapter in done:
            if what == "keep":
                found = [prefixes.find(np.append(text, 0), adapter) for text in given_]
                prefixes.keep(cache, list(range(len(given_))), given_, np.full(len(given_), adapter), found)
                kept += [(adapter, text) for text in given_]
            elif what == "clear":
                prefixes.clear(given_)
                kept = [each for each in kept if given_ and each[0] != given_]
            else:
                prompt = prompts[given_]
                longest = max((_shared(text, prompt) for by, text in kept if by == adapter), default=0)
                assert prefixes.find(prompt, adapter).shared == longest
    finally:
        cache_module.SHORTEST_PREFIX = before


def test_the_turns_of_a_conversation_take_one_row() -> None:
    prefixes, cache = Prefixes(30, 0, 2000), SlotCache(0, 30, 2000)
    for turn in range(1, 9):
        talks = [np.arange(100 * turn) % 7 + 10 * talk for talk in range(3)]
        found = [prefixes.find(talk, 0) for talk in talks]
        assert [each.shared for each in found] == [100 * (turn - 1)] * 3
        prefixes.keep(cache, [0, 1, 2], talks, np.zeros(3), found)
    assert prefixes._used == 3


def _shared(text: np.ndarray, prompt: np.ndarray) -> int:
    most = min(len(text), len(prompt) - 1)
    return next((n for n in range(most) if text[n] != prompt[n]), most)


def test_a_cache_takes_memory_for_the_rows_that_are_written() -> None:
    cache, tokens = SlotCache(1, 256, 4096), 3000
    cache.place(0, np.arange(tokens)[None].repeat(4, axis=0))
    cache.allocate(2, 8, torch.zeros(1))
    assert cache._memory is not None
    needed = 4 * tokens * 2 * 2 * 8
    assert needed < cache._memory.numel() <= 1.5 * needed
