"""The OpenAPI document: it is one, it knows every field of the dialects, and what our own examples send fits it."""

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema_rs
import pytest
import urllib3
from schemathesis.specs.openapi.definitions import OPENAPI_31

from lightning_rl_proxy.dialects import chat_completions, completions, messages, responses
from lightning_rl_proxy.http import openapi
from tests.proxy import test_streaming
from tests.proxy.conftest import Served

DOCUMENT = openapi.document()
DIALECTS: dict[str, tuple[str, ModuleType]] = {
    "chat": ("ChatCompletionsRequest", chat_completions),
    "completions": ("CompletionsRequest", completions),
    "responses": ("ResponsesRequest", responses),
    "messages": ("MessagesRequest", messages),
}
HI = {"role": "user", "content": "hi"}


def validator(name: str) -> Any:
    components = {"components": DOCUMENT["components"]}
    return jsonschema_rs.validator_for({"$ref": f"#/components/schemas/{name}"} | components)


def test_the_document_is_an_openapi_document() -> None:
    jsonschema_rs.validator_for(OPENAPI_31).validate(DOCUMENT)


def test_every_reference_leads_somewhere_and_no_name_is_private() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    for name in re.findall(r'"#/components/schemas/([^"]*)"', openapi.encoded().decode()):
        assert name in schemas
    assert not [name for name in schemas if "_proxy" in name or name.startswith("_") or "._" in name]


@pytest.mark.parametrize("name", DIALECTS)
def test_every_field_of_a_dialects_tables_is_told_of(name: str) -> None:
    schema, dialect = DIALECTS[name]
    told = DOCUMENT["components"]["schemas"][schema]["properties"]
    assert dialect.TABLES.honoured | dialect.TABLES.hints | set(dialect.TABLES.off) | set(
        dialect.TABLES.relaxed
    ) == set(told)
    assert all(told[hint]["description"].startswith("A hint") for hint in dialect.TABLES.hints)
    assert all("refused" in told[off]["description"] for off in dialect.TABLES.off)


def test_every_operation_is_behind_every_door() -> None:
    ids = [operation["operationId"] for path in DOCUMENT["paths"].values() for operation in path.values()]
    assert len(ids) == len(set(ids)) == 1 + 5 * 8
    doors = {path.removesuffix("/messages") for path in DOCUMENT["paths"] if path.endswith("/messages")}
    attempt = "/rollout/{rollout}/attempt/{attempt}"
    key = "/key/{key}"
    tags = {f"{door}/agent/{{agent}}/v1" for door in (attempt, key)}
    assert doors == {"/v1", f"{attempt}/v1", f"{key}/v1"} | tags


@pytest.mark.parametrize("name", DIALECTS)
def test_what_the_tests_of_streams_send_fits(name: str) -> None:
    schema, dialect = DIALECTS[name]
    _, _, fields = test_streaming.DIALECTS[name]
    validator(schema).validate(fields)
    dialect.parse(fields)


EXAMPLES: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"messages": [{"role": "assistant", "content": None, "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "x"}]}], "user": "me"}),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
    ("completions", {"prompt": [1, 2, 3], "echo": False}),
    ("responses", {"input": [
        HI, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"type": "reasoning", "id": "r", "summary": []},
        HI | {"type": "message", "content": [{"type": "input_text", "text": "x"}]}], "include": None}),
    ("messages", {"max_tokens": 1, "messages": [
        HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]}], "system": "x"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields"), EXAMPLES)
def test_what_a_dialect_takes_fits(name: str, fields: dict[str, Any]) -> None:
    schema, dialect = DIALECTS[name]
    fields = {"model": "policy"} | fields
    validator(schema).validate(fields)
    dialect.parse(fields)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("chat", {"messages": [{"role": "king", "content": "x"}]}),
        ("chat", {"messages": [{"role": [], "content": "x"}]}),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "video"}]}]}),
        ("chat", {"messages": [HI], "tools": [{"type": "web_search"}]}),
        ("chat", {"messages": [HI], "audio": {}}),
        ("completions", {"prompt": ""}),
        ("responses", {"input": [{"type": "web_search_call"}]}),
        ("responses", {"input": "x", "tools": [{"name": "f"}]}),
        ("responses", {"input": "x", "background": True}),
        ("messages", {"messages": [HI]}),
        ("messages", {"messages": [{"role": "robot", "content": "x"}], "max_tokens": 1}),
    ],
)  # fmt: skip
def test_what_a_dialect_refuses_does_not_fit(name: str, fields: dict[str, Any]) -> None:
    schema, dialect = DIALECTS[name]
    fields = {"model": "policy"} | fields
    assert not validator(schema).is_valid(fields)
    with pytest.raises(dialect.GatewayError):
        dialect.parse(fields)


def test_the_shell_examples_send_what_fits() -> None:
    """The bodies that the example's `jq` makes, as far as they are written out."""
    streamed = (Path(__file__).parents[3] / "examples/any_language/stream.sh").read_text()
    [body] = re.findall(r"'(\{model: .*\})'", streamed)
    text = re.sub(r"\$(\w+)", r'"\1"', re.sub(r"(\w+):", r'"\1":', body))
    validator("MessagesRequest").validate(json.loads(text))


def test_the_gateway_hands_the_document_out_without_a_key(served: Served) -> None:
    answer = urllib3.request("GET", served.url + "/openapi.json", retries=False)
    assert (answer.status, answer.json()) == (200, json.loads(openapi.encoded()))
    assert urllib3.request("POST", served.url + "/openapi.json", retries=False).status == 404
