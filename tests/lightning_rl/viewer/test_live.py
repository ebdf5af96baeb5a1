"""When the doctor looks at a run that goes on: seldom, each change once, and at its end at once."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rl.inspect.recorded import NotRecorded
from lightning_rl.viewer import live
from lightning_rl.viewer.live import Doctor


class Run:
    """A run that the doctor looks at, and how often it did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step, self.ended, self.looks = 0, False, list[int]()
        self.damaged = False
        monkeypatch.setattr(live, "_REST", 1e9)  # after a look of no time at all, too
        monkeypatch.setattr(live, "diagnose", lambda _: SimpleNamespace(findings=[], looked_at={"step": self.step}))
        self.doctor = Doctor(self._evidence, lambda: self.step, lambda: self.ended)

    def _evidence(self) -> Any:
        self.looks.append(self.step)
        if self.damaged:
            raise NotRecorded("it is damaged")

    def ask(self) -> dict[str, Any]:
        """What is found, when the looks that this began are over."""
        self.doctor.findings()
        for thread in threading.enumerate():
            if thread.name == "viewer-doctor":
                thread.join()
        return self.doctor.findings()


def test_a_run_that_goes_on_is_looked_at_seldom_and_once_more_as_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    assert run.ask()["looked_at"] == {"step": 0}
    run.step = 1
    assert run.ask()["looked_at"] == {"step": 0}
    run.ended = True
    assert run.ask()["looked_at"] == {"step": 1}
    run.ask()
    assert run.looks == [0, 1]


def test_a_run_that_has_ended_and_cannot_be_read_is_not_read_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.ended = run.damaged = True
    assert [run.ask().get("problem") for _ in range(3)] == ["it is damaged"] * 3
    assert run.looks == [0]


def test_who_waits_for_a_look_has_one_that_is_his_own(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    assert run.doctor.findings(wait=True)["looked_at"] == {"step": 0}
    run.step = 1
    assert run.doctor.findings(wait=True)["looked_at"] == {"step": 1}
