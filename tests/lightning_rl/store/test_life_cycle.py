"""The tables of the life cycle: what may follow what, and nothing else."""

from itertools import product
from typing import get_args

import pytest

from lightning_rl.store.life_cycle import (
    ATTEMPT_TRANSITIONS,
    ENDED,
    ROLLOUT_TRANSITIONS,
    AttemptStatus,
    IllegalTransition,
    RolloutStatus,
    next_attempt_status,
    next_rollout_status,
)


def test_the_tables_name_every_status() -> None:
    assert set(ROLLOUT_TRANSITIONS) == set(get_args(RolloutStatus))
    assert set(ATTEMPT_TRANSITIONS) == set(get_args(AttemptStatus))


@pytest.mark.parametrize(
    ("table", "follow"),
    [(ROLLOUT_TRANSITIONS, next_rollout_status), (ATTEMPT_TRANSITIONS, next_attempt_status)],
)
def test_a_status_follows_another_exactly_when_the_table_says_so(table, follow) -> None:
    for old, new in product(table, repeat=2):
        if new in table[old]:
            assert follow(old, new) == new
        else:
            with pytest.raises(IllegalTransition, match=f"from {old} to {new}"):
                follow(old, new)


def test_what_has_ended_stays() -> None:
    assert {"succeeded", "failed", "cancelled"} == ENDED
    assert not any(ROLLOUT_TRANSITIONS[status] for status in ENDED)


def test_a_rollout_that_nobody_has_claimed_ends_only_where_it_is_cancelled() -> None:
    assert ROLLOUT_TRANSITIONS["queued"] & ENDED == {"cancelled"}
