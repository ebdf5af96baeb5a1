"""A run whose teacher is its own average, in several processes."""

from pathlib import Path

import pytest

from tests.lightning_rl.ppo.test_privileged import averaged

pytestmark = [pytest.mark.cluster, pytest.mark.long]


def test_two_workers_have_the_teacher_of_one_and_keep_it(tmp_path: Path) -> None:
    one = averaged(tmp_path / "one", [3])
    assert averaged(tmp_path / "two", [2, 3], workers=2) == pytest.approx(one, rel=1e-3)
