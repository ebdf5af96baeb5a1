"""Programs that take a URL alone: the key stands in its path, is believed before any header, and is never shown."""

import asyncio
import logging
from typing import Any

import aiohttp
import httpx
import openai
import pytest

from tests.proxy.conftest import MODEL, Served

MESSAGES: Any = [{"role": "user", "content": "hi"}]


def url_of(served: Served, behind: str = "/v1") -> str:
    root = served.base_url().partition("/rollout/")[0]
    return f"{root}/key/{served.key()}{behind}"


def test_the_key_in_the_path_opens_the_door_whatever_key_is_sent(served: Served) -> None:
    sdk = openai.OpenAI(base_url=url_of(served), api_key="token-of-no-use", max_retries=0)
    sdk.chat.completions.create(model=MODEL, messages=MESSAGES)
    tagged = openai.OpenAI(base_url=url_of(served, "/agent/planner/v1"), api_key="token-of-no-use", max_retries=0)
    tagged.chat.completions.create(model=MODEL, messages=MESSAGES)
    served.seal()
    assert [call.agent for call in served.ledger.calls()] == [None, "planner"]


def test_aiohttp_sends_it(served: Served) -> None:
    """It takes no URL with a password in it, beside an authorization header."""

    async def ask() -> int:
        headers = {"authorization": "Bearer token-of-no-use"}
        async with aiohttp.ClientSession(headers=headers) as session:
            body = {"model": MODEL, "messages": MESSAGES}
            async with session.post(url_of(served) + "/chat/completions", json=body) as response:
                return response.status

    assert asyncio.run(ask()) == 200


@pytest.mark.parametrize("behind", ["/v1/chat/completions", "/nothing", "/v1/nothing"])
def test_a_key_in_the_path_is_neither_logged_nor_told(
    served: Served, behind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    forged = url_of(served, behind).replace("lrl-attempt", "lrl-forged")
    for url in (forged, url_of(served, behind)):
        answer = httpx.post(url, json={})
        assert answer.status_code >= 400
        assert served.key().rpartition(":")[2] not in answer.text
    told = [f"{record.getMessage()} {vars(record)}" for record in caplog.records if "lightning_rl" in record.name]
    assert told
    assert served.key().rpartition(":")[2] not in "".join(told)


@pytest.mark.parametrize("method", ["HEAD", "GET"])
@pytest.mark.parametrize("behind", ["", "/", "/v1", "/v1/", "/api/hello"])
def test_a_base_url_answers_who_asks_whether_somebody_is_there(served: Served, method: str, behind: str) -> None:
    root, _, rest = served.base_url().partition("/rollout/")
    for base in (root, f"{root}/rollout/{rest.removesuffix('/v1')}", url_of(served, "")):
        answer = httpx.request(method, base + behind)
        assert (answer.status_code, bool(answer.content)) == (200, method == "GET")


def test_head_is_get_without_the_body(served: Served) -> None:
    with httpx.Client(headers={"x-api-key": served.key()}) as client:
        url = served.base_url() + "/models"
        got, head = client.get(url), client.head(url)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == got.headers["content-length"]
