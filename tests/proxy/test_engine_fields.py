"""Fields of vLLM's and SGLang's own that change the answer: done, or refused by name, and never passed over."""

from typing import Any

import httpx
import pytest

from lightning_rl_proxy.dialects.wire.engine_fields import ENGINE_OFF
from lightning_rl_proxy.sampling import SPECIFIC, Sampling
from tests.proxy.conftest import MODEL, Served

SCHEMA = {"type": "object"}
BODIES = {
    "chat/completions": {"messages": [{"role": "user", "content": "q"}]},
    "responses": {"input": "q"},
    "messages": {"messages": [{"role": "user", "content": "q"}], "max_tokens": 9},
    "completions": {"prompt": "q"},
}
DOORS = pytest.mark.parametrize("door", list(BODIES))
FIELDS = [
    ({"stop_token_ids": [5]}, {"stop_token_ids": [5]}),
    ({"min_tokens": 3}, {"min_tokens": 3}),
    ({"min_tokens": 0}, {}),
    ({"bad_words": ["no"]}, {"bad_words": ["no"]}),
    ({"allowed_token_ids": [4, 5]}, {"allowed_token_ids": [4, 5]}),
    ({"priority": -3}, {"priority": -3}),
    ({"priority": 0}, {}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
    ({"structured_outputs": {"json": '{"type": "object"}'}}, {"json_schema": SCHEMA}),
    ({"structured_outputs": {"json_object": True}}, {"json_schema": {}}),
    ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
    ({"structured_outputs": {"grammar": "root ::= x"}}, {"grammar": "root ::= x"}),
    ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
    ({"guided_json_object": True}, {"json_schema": {}}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a"]}, {"choice": ["a"]}),
    ({"guided_grammar": "g"}, {"grammar": "g"}),
    ({"regex": "a+"}, {"regex": "a+"}),
    ({"ebnf": "g"}, {"grammar": "g"}),
]


def ask(served: Served, door: str, fields: dict[str, Any], status: int) -> Any:
    body = {"model": MODEL} | BODIES[door] | fields
    got = httpx.post(f"{served.base_url()}/{door}", json=body, headers={"x-api-key": served.key()})
    assert got.status_code == status, got.text
    return got.json()


@DOORS
def test_an_engine_that_can_is_asked(served: Served, door: str) -> None:
    served.engine.abilities = frozenset(SPECIFIC)
    for fields, wanted in FIELDS:
        ask(served, door, fields, 200)
        asked = served.engine.samplings[-1]
        found = {
            name: getattr(asked, name) for name in (*SPECIFIC, "stop_token_ids", "priority") if getattr(asked, name)
        }
        assert found == {name: value for name, value in wanted.items() if value}, fields
        assert (asked.json_schema is None) == ("json_schema" not in wanted)
    served.seal()
    assert not any("lightning_rl.ignored_fields" in span.attributes for span in served.ledger.spans)


@DOORS
def test_of_one_that_cannot_the_field_is_refused_by_its_name(served: Served, door: str) -> None:
    served.engine.abilities = frozenset()
    for fields, wanted in FIELDS:
        [field] = fields
        if wanted and field not in ("stop_token_ids", "priority"):  # which every engine takes
            said = ask(served, door, fields, 400)["error"]
            assert f"{field} is not supported by the engine of model" in said["message"]


@DOORS
@pytest.mark.parametrize("field", [*ENGINE_OFF])
def test_what_no_engine_does_here_is_refused_by_its_name(served: Served, door: str, field: str) -> None:
    if (door == "completions" and field == "ignore_eos") or (door == "chat/completions" and "final" in field):
        return
    other: Any = False if field == "add_generation_prompt" else "x" if field == "chat_template" else 7
    assert field in ask(served, door, {field: other}, 400)["error"]["message"]
    for value in ENGINE_OFF[field]:
        ask(served, door, {field: value}, 200)


def test_a_prompt_of_one_s_own_may_go_on_behind_the_end_of_text(served: Served) -> None:
    ask(served, "completions", {"ignore_eos": True}, 400)
    served.engine.abilities = frozenset({"ignore_eos"})
    ask(served, "completions", {"ignore_eos": True}, 200)
    assert served.engine.samplings[-1].ignore_eos


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "one constraint"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "one constraint"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "one constraint"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"choice": 3}}, "structured_outputs.choice"),
        ({"guided_json": "no JSON"}, "guided_json is no JSON"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"min_tokens": 2, "stop": "x"}, "min_tokens"),
    ],
)
def test_what_says_two_things_or_none_is_refused(served: Served, fields: dict[str, Any], says: str) -> None:
    served.engine.abilities = frozenset(SPECIFIC)
    assert says in ask(served, "chat/completions", fields, 400)["error"]["message"]


def test_the_least_length_is_no_more_than_the_longest(served: Served) -> None:
    served.engine.abilities = frozenset(SPECIFIC)
    ask(served, "chat/completions", {"min_tokens": 99, "max_tokens": 7}, 200)
    asked: Sampling = served.engine.samplings[-1]
    assert (asked.min_tokens, asked.max_tokens) == (7, 7)
