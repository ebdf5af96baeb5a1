"""Machines of E2B, Modal and Daytona, with their SDKs played: the contract, and what is missing is said."""

import asyncio
import sys
from pathlib import Path

import pytest

from lightning_rl.sandboxes import Sandbox, SandboxError, sandbox_class
from tests.lightning_rl.sandboxes import services
from tests.lightning_rl.sandboxes.contract import SandboxContract, ran

IMAGE = "python:3.12"


class _Played(SandboxContract):
    kind = ""

    @pytest.fixture(autouse=True)
    def service(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        getattr(services, f"play_{self.kind}")(monkeypatch)
        monkeypatch.setattr(sandbox_class(self.kind), "home", str(tmp_path))  # all are on this machine here

    def make(self) -> Sandbox:
        box = sandbox_class(self.kind)(IMAGE, [])
        assert not box.shares_network
        return box


class TestE2B(_Played):
    kind = "e2b"


class TestModal(_Played):
    kind = "modal"

    def test_a_sandbox_whose_own_time_is_over_is_an_error_and_no_status(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def over(*_: object, **__: object) -> tuple[None, str]:
            return None, ""

        monkeypatch.setattr(services.Machine, "run", over)
        with pytest.raises(SandboxError, match="the sandbox ended"):
            self.inside(lambda box: ran(box, "true"))


class TestDaytona(_Played):
    kind = "daytona"


del _Played


@pytest.mark.parametrize("kind", ["e2b", "modal", "daytona"])
def test_an_sdk_that_is_missing_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    monkeypatch.setitem(sys.modules, f"{kind}.exception", None)
    with pytest.raises(SandboxError, match=f"pip install {kind}"):
        asyncio.run(sandbox_class(kind)(IMAGE, []).open())
