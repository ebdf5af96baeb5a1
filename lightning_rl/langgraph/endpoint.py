"""Where a call goes: to the endpoint that its model names, else the rollout's, else the environment's.

Invariant: only URLs of attempts are changed, and only by the tag that names the calling node; another service is asked
at the very URL that it was given.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from lightning_rl.agents.resources import LLM
from lightning_rl_proxy import address

OPENAI = "https://api.openai.com/v1"

_rollouts: ContextVar[LLM | None] = ContextVar("lightning_rl_langgraph_llm", default=None)


class ChatEndpoint(NamedTuple):
    """An OpenAI-compatible service: its URL, a key, and the model that is asked for."""

    base_url: str
    api_key: str
    model: str


@contextmanager
def answering(llm: LLM) -> Iterator[None]:
    """Inside, models that name no endpoint of their own ask `llm`."""
    token = _rollouts.set(llm)
    try:
        yield
    finally:
        _rollouts.reset(token)


def endpoint_of(model: str | None, base_url: str | None, api_key: str | None) -> ChatEndpoint:
    """The endpoint of a model with these fields; what is None is the rollout's, outside of one the environment's.

    A model with a base URL of its own takes nothing of the rollout's; one with a name alone asks the gateway for that
    name, which is a frozen helper's or else means the policy. Raises ValueError saying what is missing where nobody
    names a model or a key.
    """
    llm = _rollouts.get()
    if llm is not None and base_url is None:
        return ChatEndpoint(llm.base_url, llm.api_key, model or llm.model)
    key = api_key or os.environ.get("OPENAI_API_KEY")
    name = model or os.environ.get("OPENAI_MODEL")
    if not name:
        raise ValueError(
            "outside of a rollout ChatModel needs a model: ChatModel(model=...), or set OPENAI_MODEL. In training it "
            "asks the rollout's where agent_of runs the graph; in an agent of your own give it what that is given: "
            "ChatModel(base_url=llm.base_url, api_key=llm.api_key, model=llm.model)"
        )
    if not key:
        raise ValueError("outside of a rollout ChatModel needs a key: ChatModel(api_key=...), or set OPENAI_API_KEY")
    return ChatEndpoint(base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI, key, name)


def tagged(base_url: str, node: str | None) -> str:
    """The same door with the tag `node`; a URL that is no attempt's, or has a tag, stays as it is."""
    path = urlsplit(base_url).path.rstrip("/")
    door = address.parse(path[max(path.find("/rollout/"), 0) :] + "/chat/completions")
    if node is None or door is None or door.address is None or door.address.agent is not None:
        return base_url
    return f"{base_url.rstrip('/').removesuffix('/v1')}/agent/{node}/v1"


def node_of(metadata: Mapping[str, Any]) -> str | None:
    """The node that a call's metadata name, with those that its sub-graph is within before it: `outer.inner`.

    What a URL cannot hold becomes `-`. None outside of a graph.
    """
    node = metadata.get("langgraph_node")
    if not isinstance(node, str):
        return None
    within = str(metadata.get("langgraph_checkpoint_ns") or "")  # outer:TASK|inner:TASK
    names = [part.partition(":")[0] for part in within.split("|")[:-1]]
    path = ".".join([*(name for name in names if not name.isdigit()), node])
    return address.as_tag(path)
