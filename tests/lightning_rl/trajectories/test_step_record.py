"""A step's record that cannot be read is named, whoever reads it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_rl.trajectories import step_record
from tests.lightning_rl.inspect.runs import rollout_record, step_of

READERS: list[Callable[[Path], Any]] = [
    lambda run: list(step_record.read_all(run)),
    lambda run: list(step_record.read_all(run, policy="")),
    lambda run: step_record.find(run, "r", 2),
]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("content", [b"", b"\x81\xa4step", b"\x81\xa4step\xa1\xff"])
def test_a_record_that_is_damaged_is_named(read: Callable[[Path], Any], content: bytes, tmp_path: Path) -> None:
    step_record.write(tmp_path, step_of(1, rollout_record("r", "g", 1.0)))
    (tmp_path / "steps" / "000002.msgpack").write_bytes(content)
    with pytest.raises(step_record.UnreadableRecord, match=r"000002\.msgpack cannot be read .*: it is damaged, or of"):
        read(tmp_path)
