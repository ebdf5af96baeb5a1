"""A program's own requests are tagged by what they ask for, and nothing that an agent is asked is."""

from typing import Any

import openai
import pytest

from lightning_rl_proxy.http.housekeeping import RULES, Housekeeping
from tests.proxy.conftest import MODEL, Served

TITLE = {"role": "system", "content": "You are a title generator. You output ONLY a thread title. Nothing else."}
TASK = {"role": "user", "content": "mend the test"}


@pytest.mark.parametrize("text", [text for texts in RULES.values() for text in texts])
def test_each_rule_tags_a_system_message_and_the_message_to_be_answered(text: str) -> None:
    tagged = Housekeeping({}).tagged
    words = f"Before it.\n{text} And behind it."
    assert tagged(None, [{"role": "system", "content": words}, TASK]) == "housekeeping"
    assert tagged("writer", [TASK, {"role": "user", "content": words}]) == "writer.housekeeping"
    assert tagged(None, [{"role": "user", "content": [{"type": "text", "text": words}]}]) == "housekeeping"
    assert tagged(None, [{"role": "user", "content": words}, TASK]) is None
    assert tagged(None, [TASK, {"role": "tool", "content": words}]) is None, "a tool may show the program's own source"


@pytest.mark.parametrize("messages", [[], [TASK], [{"role": "user", "content": None}], [{"role": "tool"}]])
def test_other_requests_keep_their_tag(messages: list[dict[str, Any]]) -> None:
    assert Housekeeping({}).tagged(None, messages) is None
    assert Housekeeping({}).tagged("writer", messages) == "writer"


def test_a_users_rules_come_beside_the_known_ones_or_in_their_place() -> None:
    mine = [{"role": "user", "content": "Name this conversation"}]
    assert Housekeeping({"mine": ["Name this"]}).tagged(None, mine) == "housekeeping"
    assert Housekeeping({"mine": ["Name this"]}).tagged(None, [TITLE, TASK]) == "housekeeping"
    assert Housekeeping({"opencode": []}).tagged(None, [TITLE, TASK]) is None
    assert Housekeeping({"mine": [""]}).tagged(None, mine) is None


def test_the_tag_is_recorded(served: Served) -> None:
    sdk = openai.OpenAI(base_url=served.base_url(), api_key=served.key(), max_retries=0)
    for messages in ([TITLE, TASK], [TASK]):
        sdk.chat.completions.create(model=MODEL, messages=messages)  # type: ignore[arg-type]
    served.seal()
    assert [call.agent for call in served.ledger.calls()] == ["housekeeping", None]
