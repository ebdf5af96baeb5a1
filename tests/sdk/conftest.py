"""One stage for a module: what was played on it is kept, so that no conversation is played twice."""

from collections.abc import Iterator

import pytest

from tests.sdk.stage import Stage, staged


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with staged(tmp_path_factory.mktemp("stage")) as stage:
        yield stage
