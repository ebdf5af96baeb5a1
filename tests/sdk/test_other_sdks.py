"""SDKs that cannot stand beside ours: each plays from an environment of its own, and must leave the same forest.

`make test-sdk` builds the environments; without them these tests fail.
"""

from collections.abc import Iterator

import pytest

from tests.sdk.matrix import COLUMNS, HERE, PAGE, ROOT, Plays, reference, verdict, written
from tests.sdk.players import CONVERSATIONS, MODES
from tests.sdk.stage import Environment, Stage, amiss

pytestmark = pytest.mark.sdk
ELSEWHERE = [column for column in COLUMNS if column.environment != HERE]
IDS = [f"{column.environment}-{column.player}" for column in ELSEWHERE]


@pytest.fixture(scope="module")
def here(stage: Stage) -> Plays:
    return Plays(stage)


@pytest.fixture(scope="module")
def plays(stage: Stage) -> Iterator[dict[str, Plays]]:
    names = {column.environment for column in ELSEWHERE}
    environments = {name: Environment(ROOT / name / "bin" / "python") for name in names}
    yield {name: Plays(stage, environment) for name, environment in environments.items()}
    for environment in environments.values():
        environment.close()


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize(("player", "environment"), ELSEWHERE, ids=IDS)
def test_the_forest_is_the_one_that_the_sdk_here_leaves(
    plays: dict[str, Plays], here: Plays, player: str, environment: str, conversation: str
) -> None:
    expected = here.of(reference(player), MODES[0], conversation)
    for mode in MODES:
        outcome = plays[environment].of(player, mode, conversation)
        said = verdict(player, conversation, outcome)
        assert said != "no", f"{mode}: {amiss(player, conversation, outcome)}"
        if said != "-":
            assert outcome.forest == expected.forest, mode


@pytest.mark.parametrize(("player", "environment"), ELSEWHERE, ids=IDS)
def test_the_page_says_what_was_played(plays: dict[str, Plays], player: str, environment: str) -> None:
    played = plays[environment].cells(player)
    page = written(PAGE.read_text())
    assert {cell: page.get(cell) for cell in played} == played, "make docs rewrites the page"
