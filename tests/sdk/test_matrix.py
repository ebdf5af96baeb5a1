"""Official SDKs are the judges: whichever plays, its author sees the same, and the same forest is stored."""

import gc
import time
from types import GeneratorType

import pytest

from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from tests.proxy.conftest import TOKENIZER
from tests.sdk.matrix import COLUMNS, HERE, PAGE, Plays, features, fields, reference, section, verdict, written
from tests.sdk.players import CONVERSATIONS, MODES, PLAYERS, Mode
from tests.sdk.stage import DOORS, Stage, Stored, amiss

pytestmark = pytest.mark.filterwarnings("ignore:The model 'claude:DeprecationWarning")
HERE_PLAYERS = [column.player for column in COLUMNS if column.environment == HERE]
# litellm takes three quarters of the time of all, most of it to be imported; make test-sdk plays a newer one.
EACH = [pytest.param(one, marks=pytest.mark.long if one.startswith("litellm") else ()) for one in HERE_PLAYERS]


@pytest.fixture(scope="module")
def plays(stage: Stage) -> Plays:
    return Plays(stage)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("player", EACH)
def test_whichever_sdk_asks_and_however_the_forest_is_the_same(plays: Plays, player: str, conversation: str) -> None:
    expected = plays.of(reference(player), MODES[0], conversation)
    for mode in MODES:
        outcome = plays.of(player, mode, conversation)
        said = verdict(player, conversation, outcome)
        assert said != "no", f"{mode}: {amiss(player, conversation, outcome)}"
        if said != "-":
            assert outcome.forest == expected.forest, mode


@pytest.mark.long
@pytest.mark.parametrize("player", [player for player in HERE_PLAYERS if player.startswith("litellm")])
def test_no_stream_is_left_open_for_the_collector(stage: Stage, player: str) -> None:
    def answers_being_read() -> set[int]:
        generators = [found for found in gc.get_objects() if isinstance(found, GeneratorType)]
        return {id(one) for one in generators if one.gi_frame and "httpcore" in one.gi_code.co_filename}

    gc.collect()
    gc.disable()
    try:
        before = answers_being_read()
        Plays(stage).of(player, Mode(asynchronous=False, streamed=True), "talk")
        for _ in range(50):  # what other threads read just now ends by itself
            if not answers_being_read() - before:
                return
            time.sleep(0.1)
        raise AssertionError("an answer stays open")
    finally:
        gc.enable()


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_the_reference_plays_everything_that_its_api_has(plays: Plays, conversation: str) -> None:
    """Else an SDK that asks for nothing would agree with one that gets nothing."""
    outcome = plays.of("openai-chat", MODES[0], conversation)
    assert verdict("openai-chat", conversation, outcome) in ("yes", "400", "409")


@pytest.mark.parametrize("conversation", [name for name, asked in CONVERSATIONS.items() if asked.seen])
def test_a_forest_holds_what_the_engine_said(plays: Plays, conversation: str) -> None:
    tokenizer = FastTokenizer(TOKENIZER)
    forest = plays.of("openai-chat", MODES[0], conversation).forest
    for call, said in zip(forest, CONVERSATIONS[conversation].said, strict=True):
        text = tokenizer.decode(call.response_ids).removesuffix("<|im_end|>")
        assert said.startswith(text)
        assert text == said or conversation in ("stop", "one_call")
        assert call.delivered


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("player", EACH)
def test_every_door_leads_to_the_same_attempt_and_only_the_tagged_one_names_the_agent(
    plays: Plays, player: str, mode: Mode
) -> None:
    conversation = "talk" if PLAYERS[player].dialect == "completions" else "tools"
    expected = plays.of(reference(player), MODES[0], conversation).forest
    for door in DOORS:
        outcome = plays.of(player, mode, conversation, door)
        assert amiss(player, conversation, outcome) is None
        agents: list[Stored] = [call._replace(agent="solver" if door == "tagged" else None) for call in expected]
        assert outcome.forest == agents, door


@pytest.mark.parametrize("player", EACH)
def test_the_page_says_what_was_played(plays: Plays, player: str) -> None:
    played = plays.cells(player)
    page = written(PAGE.read_text())
    assert {cell: page.get(cell) for cell in played} == played, "python -m tests.sdk.matrix rewrites the page"
    assert len(page) == len(COLUMNS) * len(CONVERSATIONS)


def test_the_pages_tables_are_the_generated_ones() -> None:
    page = PAGE.read_text()
    assert section(page, "features") == features(written(page))
    assert section(page, "fields") == fields()


def test_a_cell_that_differs_is_seen(plays: Plays) -> None:
    """The outcome of a play is judged, not taken for granted."""
    outcome = plays.of("openai-chat", MODES[0], "tools")
    wrong = outcome._replace(forest=[call._replace(parent=None) for call in outcome.forest])
    assert verdict("openai-chat", "tools", wrong) == "no"
    unseen = outcome._replace(played=outcome.played._replace(seen=outcome.played.seen[:1]))
    assert verdict("openai-chat", "tools", unseen) == "no"
