"""All tests of this folder need a GPU that torch uses; where there is none they are skipped, and say why."""

from pathlib import Path

import pytest
import torch

from tests.gpu.machine import without_gpu


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here, missing = Path(__file__).parent, without_gpu()
    for item in items:
        if here in item.path.parents:
            item.add_marker("gpu")
            item.add_marker(pytest.mark.timeout(900))  # the first call of a kernel compiles it
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture
def free_gpu() -> None:
    """Nothing of the tests before is left on it."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
