"""A whole gateway, store and control plane, in front of a real vLLM server, and an attempt in it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import openai

from lightning_rl.algorithms.base import Endpoint
from lightning_rl.control_plane.launch import launch
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Claim, Finish, RolloutRequest
from lightning_rl_adapters.call import Call, calls_of
from lightning_rl_adapters.span import Span
from tests.vllm.server import CHECKPOINT, MODEL

QUESTION: Any = {"role": "user", "content": "TABLE users (id, name)\nHow many users?"}


class Listens(Protocol):
    """A vLLM server, or whoever knows where it is."""

    url: str


@dataclass
class Attempt:
    """One attempt: an agent's client, and what was recorded of its calls."""

    store: HttpStore
    claim: Claim
    client: openai.OpenAI

    def finish(self) -> list[Call]:
        """End it, which stores all that was recorded: its calls."""
        return self.finish_with_spans()[0]

    def finish_with_spans(self) -> tuple[list[Call], list[Span]]:
        """The same, and the spans that they were read from."""
        rollout_id = self.claim.rollout.rollout_id
        self.store.finish(rollout_id, self.claim.attempt.attempt_id, Finish(status="succeeded", reward=1.0))
        (trace,) = self.store.traces([rollout_id])[rollout_id].attempts
        return calls_of(trace.spans), trace.spans


@contextlib.contextmanager
def attempt(folder: Path, server: Listens, mode: str = "train", *, tokenizer: Path = CHECKPOINT) -> Iterator[Attempt]:
    """An open attempt behind a gateway of its own, which renders as the model in `tokenizer` says."""
    engine = {"model": MODEL, "kind": "vllm", "url": server.url, "policy_version": 3}
    policy = Endpoint(model=MODEL, tokenizer=str(tokenizer), renderer="auto", engines=[engine])
    with launch(folder, policy, admin_key="a", runner_key="r") as serving:
        store = HttpStore(serving.url, "a")
        store.enqueue([RolloutRequest(task=1, rollout_id="r1", mode=mode)])
        (claim,) = store.claim("w")
        llm = claim.resources["main_llm"]
        with openai.OpenAI(base_url=llm["base_url"], api_key=llm["api_key"], max_retries=0) as client:
            yield Attempt(store, claim, client)


def full_prompt(calls: list[Call], call: Call) -> list[int]:
    """The tokens that the engine was given for a call."""
    by_id = {each.call_id: each for each in calls}
    if call.parent_id is None:
        return call.prompt_ids
    parent = by_id[call.parent_id]
    return [*full_prompt(calls, parent), *parent.response_ids, *call.prompt_ids]
