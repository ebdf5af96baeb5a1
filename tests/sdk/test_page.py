"""docs/gateway.md is true: its code runs as it stands, and what it says of doors, errors and sampling holds."""

import os
import re
import subprocess
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest

from lightning_rl.agents.resources import LLM
from lightning_rl_adapters import semconv
from lightning_rl_proxy import errors
from lightning_rl_proxy.http.limits import RequestLimits
from tests.sdk.matrix import PAGE
from tests.sdk.players import litellm
from tests.sdk.stage import Stage, StagedEngine

TEXT = PAGE.read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
SHELL = re.findall(r"^```bash\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
CHAT: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "How many?"}], "max_tokens": 8}
PATHS = {"OpenAI's dialects": "/v1/chat/completions", "Messages": "/v1/messages"}
# Each row of the page's table of errors, and how to come by it.
ERRORS: dict[str, dict[str, Any]] = {
    "the request is wrong, or cannot be honoured": {"body": {"messages": 3}},
    "the prompt is too long": {"too_long": True},
    "no key, or not one of ours": {"key": "sk-none"},
    "another attempt's key": {"key_of": "a2"},
    "an unknown path, or a model that is refused": {"method": "GET"},
    "the attempt is closed": {"closed": True},
    "another gateway has the attempt": {"elsewhere": True},
    "the body is over 64 MiB, or, for models of text, over 1 MiB and 64 bytes a token of the context": {"max_body": 8},
    "no engine, or it failed": {"fail": 1},
}


def llm_of(stage: Stage, rollout: str) -> LLM:
    served = stage.served
    base = served.base_url(rollout, "a1")
    return LLM(
        model="policy",
        base_url=base,
        anthropic_base_url=base.removesuffix("/v1"),
        api_key=served.key(rollout, "a1"),
    )


def dialects(stage: Stage, rollout: str) -> set[str]:
    stage.served.seal(rollout, "a1")
    return {span.attributes[semconv.DIALECT] for span in stage.served.ledger.spans if span.rollout_id == rollout}


@pytest.mark.long
def test_the_pages_code_runs_as_it_stands(stage: Stage) -> None:
    litellm()  # quiet
    used: list[str] = []
    for number, block in enumerate(PYTHON):
        rollout = f"block{number}"
        stage.served.engine.script.clear()
        stage.served.engine.script.extend(["Three.", "Three."])
        scope: dict[str, Any] = {}
        exec(block, scope)
        answer = scope["agent"]("How many cats?", llm_of(stage, rollout))
        assert answer == "Three.", block
        used += dialects(stage, rollout)
    assert sorted(used) == ["chat_completions", "chat_completions", "completions", "messages", "responses"]


def test_the_pages_commands_run_as_they_stand(stage: Stage) -> None:
    [block] = SHELL
    stage.served.engine.script.clear()
    stage.served.engine.script.append("Three.")
    done = subprocess.run(
        ["bash", "-c", block],
        env=os.environ | llm_of(stage, "shell").env(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert '"content":"Three."' in done.stdout, done.stderr
    assert dialects(stage, "shell") == {"chat_completions"}


def rows() -> list[list[str]]:
    table = TEXT[TEXT.index("| what happened |") :].split("\n\n")[0].strip().splitlines()[2:]
    return [[word.strip() for word in line.split("|")[1:-1]] for line in table]


@pytest.mark.parametrize("column", PATHS)
@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_an_error_is_what_the_page_says(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, row: list[str], column: str
) -> None:
    what, status, openai, anthropic = row
    how, served = ERRORS[what], stage.served
    rollout = re.sub(r"\W", "-", what)
    attempt = f"{rollout}-{column[0]}"
    assert isinstance(served.engine, StagedEngine)
    monkeypatch.setattr(served.engine, "too_long", "too_long" in how)
    monkeypatch.setattr(served.engine, "fail", how.get("fail", 0))
    if "max_body" in how:
        monkeypatch.setattr(served.gateway, "limits", RequestLimits(body_bytes=how["max_body"]))
    if "closed" in how:
        served.ledger.closed.add(attempt)
    if "elsewhere" in how:
        owned = AsyncMock(side_effect=errors.elsewhere(attempt, "http://127.0.0.1:1"))
        monkeypatch.setattr(served.ledger, "attempt", owned)
    door = served.base_url(rollout, attempt).removesuffix("/v1")
    key = how.get("key") or served.key(rollout, how.get("key_of", attempt))
    answer = httpx.request(
        how.get("method", "POST"),
        door + PATHS[column],
        json=CHAT | how.get("body", {}),
        headers={"authorization": f"Bearer {key}"},
    )
    assert answer.status_code == int(status[:3])
    said = answer.json()["error"]
    told = re.findall(r"`([^`.]+?):?(?: \.\.\.)?`", openai if column != "Messages" else anthropic)
    assert any(word in (said["type"], said.get("code")) or said["message"].startswith(word) for word in told), said
    assert answer.headers["x-should-retry"] == (
        "true" if "to be retried" in status and "not" not in status else "false"
    )
    assert ("retry-after" in answer.headers) == (answer.headers["x-should-retry"] == "true")


def test_a_group_of_an_agent_with_a_fixed_seed_is_diverse(stage: Stage) -> None:
    engine = stage.served.engine
    engine.samplings.clear()
    for rollout in range(8):
        for path, seeded in PATHS.items():
            llm = llm_of(stage, f"group{rollout}")
            url = llm.anthropic_base_url + seeded
            body = CHAT | {"temperature": 0, "seed": 42}
            answer = httpx.post(url, json=body, headers={"authorization": f"Bearer {llm.api_key}"})
            assert answer.status_code == 200, path
    assert {sampling.temperature for sampling in engine.samplings} == {1.0}
    assert len({sampling.seed for sampling in engine.samplings}) == len(engine.samplings) == 16


def test_the_pings_are_as_often_as_the_page_says(stage: Stage) -> None:
    assert f"{stage.served.gateway.patience.ping_seconds:.0f} s gets a ping" in TEXT.replace("\n", " ")


def test_what_is_no_call_leaves_nothing(stage: Stage) -> None:
    llm = llm_of(stage, "nothing")
    headers = {"x-api-key": llm.api_key}
    counted = httpx.post(f"{llm.base_url}/messages/count_tokens", json=CHAT, headers=headers)
    assert counted.json()["input_tokens"] > 0
    assert httpx.get(f"{llm.base_url}/models", headers=headers).json()["data"][0]["id"] == "policy"
    refused = httpx.post(f"{llm.base_url}/embeddings", json={"model": "policy", "input": "x"}, headers=headers)
    assert refused.status_code == 400
    assert dialects(stage, "nothing") == set()
