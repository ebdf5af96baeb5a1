"""A real SIGKILL of the server at every named step: the first time with whole answers, later with streams."""

from pathlib import Path

import pytest

from tests.lightning_rl.control_plane.test_killed import STEPS, check_survives

pytestmark = pytest.mark.chaos


@pytest.mark.long
@pytest.mark.parametrize(("number", "stream"), [(1, False), (4, True)], ids=["first, whole", "fourth, stream"])
@pytest.mark.parametrize("step", STEPS)
def test_no_call_of_a_finished_attempt_is_lost_by_a_kill(tmp_path: Path, step: str, number: int, stream: bool) -> None:
    check_survives(tmp_path, step, number, stream=stream)
