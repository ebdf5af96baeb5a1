"""Padding to a fixed length: the mask says what is real, and what is too long is cut at the right end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.training.padding import (
    get_left_padded_ids_and_attention_mask,
    get_right_padded_ids_and_attention_mask,
)

IDS = st.lists(st.integers(0, 9), max_size=12)  # the pad id too is a real token somewhere
LENGTHS = st.integers(0, 15)
PAD = 7


def real(ids: list[int], mask: list[int]) -> list[int]:
    return [token for token, is_real in zip(ids, mask, strict=True) if is_real]


@given(IDS, LENGTHS)
def test_prompts_stand_at_the_right_end_and_keep_their_last_ids(ids: list[int], length: int) -> None:
    padded, mask = get_left_padded_ids_and_attention_mask(ids, length, PAD)
    assert len(padded) == len(mask) == length
    assert mask == sorted(mask)
    assert real(padded, mask) == (ids[-length:] if length else [])
    assert padded[: length - sum(mask)] == [PAD] * (length - sum(mask))


@given(IDS, LENGTHS)
def test_responses_stand_at_the_left_end_and_keep_their_first_ids(ids: list[int], length: int) -> None:
    padded, mask = get_right_padded_ids_and_attention_mask(ids, length, PAD)
    assert len(padded) == len(mask) == length
    assert mask == sorted(mask, reverse=True)
    assert real(padded, mask) == ids[:length]
    assert padded[sum(mask) :] == [PAD] * (length - sum(mask))


@given(IDS, LENGTHS)
def test_the_ids_that_were_given_are_left_alone(ids: list[int], length: int) -> None:
    given_ids = list(ids)
    for pad in (get_left_padded_ids_and_attention_mask, get_right_padded_ids_and_attention_mask):
        padded, _ = pad(given_ids, length, PAD)
        padded.append(99)
    assert given_ids == ids


def test_too_long_input_by_example() -> None:
    assert get_left_padded_ids_and_attention_mask([1, 2, 3], 2, 0) == ([2, 3], [1, 1])
    assert get_right_padded_ids_and_attention_mask([1, 2, 3], 2, 0) == ([1, 2], [1, 1])
    assert get_left_padded_ids_and_attention_mask([1], 3, 0) == ([0, 0, 1], [0, 0, 1])
    assert get_right_padded_ids_and_attention_mask([1], 3, 0) == ([1, 0, 0], [1, 0, 0])


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="max_length is -1"):
        get_left_padded_ids_and_attention_mask([1], -1, 0)
