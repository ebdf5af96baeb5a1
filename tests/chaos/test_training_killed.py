"""A training run whose processes are killed at random comes to its end, and nothing is there twice or missing.

`CHAOS_SEEDS=50` tries that many seeds, by default one for each kind of victim; `LIGHTNING_RL_CHAOS_SEED` says where
they begin.
"""

import os
import random
from pathlib import Path

import pytest

from tests.chaos.killing import EVENTS, VICTIMS, check, check_weights, kills, survive, training

FIRST = int(os.environ.get("LIGHTNING_RL_CHAOS_SEED", "0"))
SEEDS = range(FIRST, FIRST + int(os.environ.get("CHAOS_SEEDS", len(VICTIMS))))

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]


@pytest.mark.smoke
def test_the_first_seeds_have_every_victim() -> None:
    first = [{kill.victim for kill in kills(seed)} for seed in range(len(VICTIMS))]
    assert set(VICTIMS) == set().union(*first)


@pytest.mark.smoke
@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_killed_is_not_lost(tmp_path: Path, seed: int) -> None:
    told = survive(tmp_path, seed)
    print(f"seed {seed}: killed {dict(told.killed)}, attempts {dict(told.attempts)}")


@pytest.mark.long
def test_a_killed_run_ends_with_the_weights_of_one_that_nobody_disturbs(tmp_path: Path) -> None:
    """The undisturbed one has the same recorded rollouts, and so samples nothing."""
    moments = random.Random(FIRST)
    with training(tmp_path / "killed") as run:
        for victim in ("trainer", "machine"):
            run.until(run.events + moments.randrange(EVENTS // 3))
            run.kill(victim)
        run.finish()
        check(run)
        check_weights(run, tmp_path / "unbroken")
