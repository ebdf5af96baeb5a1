"""Effective sampling: the algorithm's values replace the agent's, the smaller limit wins, seeds are mixed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl_proxy.sampling import Sampling, effective, mixed_seed

ALGORITHM = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "max_tokens": 32}


@given(st.none() | st.integers(1, 100))
def test_the_smaller_limit_wins(asked: int | None) -> None:
    found = effective(Sampling(max_tokens=asked), ALGORITHM, seed_key="r", number=0)
    assert found.max_tokens == min(asked or 32, 32)


def test_what_the_algorithm_leaves_open_is_the_agents() -> None:
    asked = Sampling(temperature=0.1, top_p=0.2, presence_penalty=0.5, stop=["x"])
    found = effective(asked, {"temperature": 1.0}, seed_key="r", number=0)
    assert (found.temperature, found.top_p, found.top_k, found.max_tokens) == (1.0, 0.2, -1, None)
    assert (found.presence_penalty, found.stop) == (0.5, ["x"])


@pytest.mark.parametrize(("asked", "found"), [(None, 1.0), (0.0, 0.0), (1e-40, 0.01), (0.009, 0.01), (0.02, 0.02)])
def test_a_temperature_is_what_every_engine_takes_it_for(asked: float | None, found: float) -> None:
    assert effective(Sampling(temperature=asked), {}, seed_key="r", number=0).temperature == found


@pytest.mark.parametrize("asked", [None, False, True])
def test_an_end_token_that_the_algorithm_ignores_ends_nothing(asked: bool | None) -> None:
    requested = Sampling(ignore_eos=asked)
    found = effective(requested, {"ignore_eos": True}, seed_key="k", number=0)
    assert found.ignore_eos
    assert effective(requested, {}, seed_key="k", number=0).ignore_eos == asked


def test_penalties_that_the_algorithm_turns_off_are_off() -> None:
    asked = Sampling(presence_penalty=0.5, frequency_penalty=1.0, repetition_penalty=1.3, min_p=0.1)
    off = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0}
    found = effective(asked, off, seed_key="r", number=0)
    assert [getattr(found, name) for name in off] == [None] * 4


@given(st.text(), st.none() | st.integers(), st.integers(0, 1000))
def test_seeds_can_be_repeated_and_fit_into_63_bits(key: str, asked: int | None, number: int) -> None:
    seed = mixed_seed(key, asked, number)
    assert seed == mixed_seed(key, asked, number)
    assert 0 <= seed < 2**63
    assert seed != mixed_seed(key, asked, number + 1)
    assert seed != mixed_seed(key + "x", asked, number)


def test_defaults_hold_where_a_request_says_nothing() -> None:
    defaults = {"temperature": 0.5, "max_tokens": 7, "stop": ["x"]}
    asked = Sampling(temperature=0.75)
    found = effective(asked, {"presence_penalty": 0.0}, defaults=defaults, seed_key="r", number=0)
    assert (found.temperature, found.max_tokens, found.stop) == (0.75, 7, ["x"])
    assert effective(asked, {"temperature": 1.0}, defaults=defaults, seed_key="r", number=0).temperature == 1.0


@given(st.none() | st.integers(1, 100), st.integers(1, 100))
def test_an_answer_has_no_more_room_than_is_left(asked: int | None, room: int) -> None:
    found = effective(Sampling(max_tokens=asked), ALGORITHM, room=room, seed_key="r", number=0)
    assert found.max_tokens == min(asked or 32, 32, room)
