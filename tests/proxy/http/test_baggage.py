"""OpenTelemetry's own propagation names the calling agent where the door does not."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest
from opentelemetry import baggage, context, propagate

from lightning_rl_proxy.http.baggage import agent_of
from tests.proxy.conftest import MODEL, Served


@contextmanager
def named(agent: str) -> Iterator[None]:
    """As an application says who acts; its instrumented clients send it along."""
    token = context.attach(baggage.set_baggage("lightning_rl.agent", agent))
    try:
        yield
    finally:
        context.detach(token)


def instrumented(kind: Any) -> Any:
    """An SDK's HTTP client that propagates, as an instrumentation makes it."""
    return kind(event_hooks={"request": [lambda request: propagate.inject(request.headers)]})


def ask(served: Served, text: str, **where: Any) -> None:
    """One call by OpenAI's SDK."""
    sdk = openai.OpenAI(
        base_url=served.base_url(**where),
        api_key=served.key(),
        http_client=instrumented(openai.DefaultHttpxClient),
        max_retries=0,
    )
    sdk.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": text}])


def test_a_call_within_an_agents_context_carries_its_name(served: Served) -> None:
    ask(served, "one")
    with named("planner"):
        ask(served, "two")
        with named("SQL writer, ö"):
            ask(served, "three")
        with named("other"):
            ask(served, "four", agent="the-door")
    served.seal()
    assert [call.agent for call in served.ledger.calls()] == [None, "planner", "SQL-writer---", "the-door"]


def test_it_is_so_for_anthropics_sdk_and_by_key_alone(served: Served) -> None:
    sdk = anthropic.Anthropic(
        base_url=served.url,
        api_key=served.key(),
        http_client=instrumented(anthropic.DefaultHttpxClient),
        max_retries=0,
    )
    with named("writer"):
        sdk.messages.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=8)
    served.seal()
    assert [call.agent for call in served.ledger.calls()] == ["writer"]


def test_equal_requests_of_two_agents_are_two_calls(served: Served) -> None:
    """Also where the second is marked as a retry: it is not one of the other agent's."""
    for agent in ("one", "two"):
        headers = {"authorization": f"Bearer {served.key()}", "x-stainless-retry-count": "1"}
        with named(agent):
            propagate.inject(headers)
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        httpx.post(served.base_url() + "/chat/completions", json=body, headers=headers).raise_for_status()
    served.seal()
    assert [call.agent for call in served.ledger.calls()] == ["one", "two"]


@pytest.mark.parametrize(
    ("sent", "agent"),
    [
        ([], None),
        (["user=alice"], None),
        (["user=alice,lightning_rl.agent=planner;ttl=1"], "planner"),
        (["user=alice", "lightning_rl.agent=planner"], "planner"),
        (["lightning_rl.agent=%C3%A9%20t"], "--t"),
        (["lightning_rl.agent="], None),
        (["no baggage; at all, =,%"], None),
    ],
)
def test_headers_are_read_as_the_standard_says(sent: list[str], agent: str | None) -> None:
    headers = [(b"host", b"x"), *((b"baggage", text.encode()) for text in sent)]
    assert agent_of(headers) == agent


def test_a_password_in_the_url_opens_the_door(served: Served) -> None:
    """Clients send what stands before the host as a password, whatever key they are given besides."""
    base_url = served.base_url().replace("://", f"://attempt:{served.key().replace(':', '%3A')}@")
    sdk = openai.OpenAI(base_url=base_url, api_key="token-of-no-use", max_retries=0)
    sdk.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=served.base_url(), api_key="token-of-no-use", max_retries=0).models.list()
