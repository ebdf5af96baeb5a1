"""Ray on this machine, for all tests of this folder, and teams of two and of four workers that tell stories."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_rl.training.distributed import cluster
from lightning_rl.training.distributed.group import WorkerGroup
from tests.lightning_rl.training.distributed.stories import Story, Teller, Told

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A Ray that has more cores than this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.delenv("RAY_ADDRESS", raising=False)
        assert cluster.join(16, 2**26)
        yield
        cluster.leave()


Tell = Callable[[int, Story], Told]


@pytest.fixture(scope="session")
def tell(local_ray: None) -> Iterator[Tell]:
    """Have a story told by so many workers; 1: by this process."""
    groups: dict[int, WorkerGroup] = {}

    def told(workers: int, story: Story) -> Told:
        if workers == 1:
            return Teller(None).tell(story)
        if workers not in groups:
            groups[workers] = WorkerGroup("stories", 1, workers, "cpu", Teller)
        try:
            found: Told = groups[workers].ask(None, "tell", story)
        except Exception:
            groups.pop(workers).close()  # the other tests have one that works
            raise
        return found

    yield told
    for group in groups.values():
        group.close()
