"""What is found of a prompt among the kept rows is the longest, also where only what was kept since is looked at."""

import numpy as np
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
                prefixes.keep(cache, list(range(len(given_))), given_, np.full(len(given_), adapter))
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
