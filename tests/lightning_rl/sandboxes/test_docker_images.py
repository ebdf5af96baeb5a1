"""An image is built once, by whichever event loop asks, and anew where a build was broken off or failed."""

import asyncio

import pytest

from lightning_rl.sandboxes import SandboxError, docker


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The builds so far; the second and the third end badly."""
    found: list[str] = []

    async def build(folder: str) -> str:
        found.append(folder)
        if len(found) == 2:
            await asyncio.sleep(600)
        if len(found) == 3:
            raise SandboxError("no such base image")
        await asyncio.sleep(0)
        return f"image {len(found)}"

    monkeypatch.setattr(docker, "_build", build)
    return found


def test_a_build_is_shared_by_those_who_ask_on_one_loop(builds: list[str], tmp_path: object) -> None:
    async def ask() -> list[str]:
        return list(await asyncio.gather(*(docker._built(str(tmp_path)) for _ in range(3))))

    assert asyncio.run(ask()) == ["image 1"] * 3
    assert len(builds) == 1


def test_another_loop_and_whoever_comes_after_a_broken_build_has_its_own(builds: list[str], tmp_path: object) -> None:
    async def ask() -> str:
        return await docker._built(str(tmp_path))

    async def broken_off_and_asked_again() -> str:
        first = asyncio.create_task(ask())
        while len(builds) < 2:
            await asyncio.sleep(0)
        next(iter(docker._building[asyncio.get_running_loop()].values())).cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        with pytest.raises(SandboxError, match="no such base image"):
            await ask()
        return await ask()

    assert asyncio.run(ask()) == "image 1"
    assert asyncio.run(broken_off_and_asked_again()) == "image 4"
