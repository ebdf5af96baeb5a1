"""Agents that do everything wrong, in one run: each is counted and told, none stops the others."""

import time
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest

import lightning_rl as lrl
from lightning_rl.store.sql import SqlStore
from lightning_rl.telemetry.metrics.jsonl import read

pytestmark = [pytest.mark.e2e, pytest.mark.smoke]

KINDS = ["right", "nan", "text", "nothing", "dict", "raise", "hang", "no call", "long", "key", "json", "memory", "exit"]


@lrl.rollout
def agent(task: dict[str, str], llm: lrl.LLM) -> Any:
    """Does what its task says."""
    kind = task["kind"]
    if kind == "no call":
        return 1.0
    key = "lrl-wrong" if kind == "key" else llm.api_key
    with openai.OpenAI(base_url=llm.base_url, api_key=key, max_retries=0) as client:
        words = "number " * (4000 if kind == "long" else 1)
        client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": words}])
    if kind == "json":
        headers = {"authorization": f"Bearer {llm.api_key}"}
        urllib.request.urlopen(urllib.request.Request(f"{llm.base_url}/chat/completions", b'{"messages": [', headers))
    if kind == "raise":
        raise RuntimeError("this agent has a bug")
    if kind == "hang":
        time.sleep(1000)
    if kind == "memory":
        bytearray(10**15)
    if kind == "exit":
        raise SystemExit("the agent ends itself")
    return {"right": 1.0, "nan": float("nan"), "text": "good", "nothing": None, "dict": {"speed": 1.0}}[kind]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def told(run: Path) -> str:
    """All warnings of the run."""
    import logging

    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    config = {
        "data": {"train_batch_size": len(KINDS), "max_response_length": 8},
        "actor_rollout_ref": {"rollout": {"n": 2, "agent": {"timeout_seconds": 5.0}}},
        "trainer": {"logger": ["jsonl"]},
    }
    try:
        lrl.Trainer(agent, n_runners=4, run_dir=run).fit(lrl.PPO(config), [{"kind": kind} for kind in KINDS])
    finally:
        logging.getLogger().removeHandler(handler)
    return "\n".join(texts)


@pytest.mark.parametrize(
    "text",
    [
        "a reward must be a finite number, got nan",
        "a reward must be a finite number, got 'good'",
        "without one named 'reward'",
        "2 of 26 rollouts ended without a reward: return a number, or call emit_reward",
        "RuntimeError: this agent has a bug",
        "DeadlineExceeded: the attempt ran longer than 5 s",
        "2 of 26 rollouts made no call to the model: the agent must use llm.base_url and llm.api_key",
        "maximum context length is 512 tokens. However, your messages resulted in",
        "AuthenticationError: Error code: 401",
        "HTTPError: HTTP Error 400",
        "MemoryError",
        "SystemExit: the agent ends itself",
    ],
)
def test_it_is_told_where_the_user_looks(text: str, told: str) -> None:
    assert text in told


def test_it_is_counted_and_the_run_goes_on(told: str, run: Path) -> None:
    [row] = read(run / "metrics.jsonl")
    wrong = len(KINDS) - 2  # `right` and `no call` have a reward
    assert row["rollouts/agent_failed"] == 2 * wrong
    assert row["critic/rewards/mean"] == pytest.approx(2 / len(KINDS))
    assert row["tokens/received"] == row["tokens/trained"] > 0
    assert (run / "checkpoints" / "step-1" / "model.safetensors").exists()


def test_what_was_recorded_before_a_failure_is_kept(told: str, run: Path) -> None:
    rollouts, _ = SqlStore(f"sqlite:///{run / 'store.db'}").page(limit=100)
    store = SqlStore(f"sqlite:///{run / 'store.db'}")
    calls = {}
    for rollout in rollouts:
        trace = store.traces([rollout.rollout_id])[rollout.rollout_id]
        calls[rollout.task["kind"]] = sum(len(attempt.spans) for attempt in trace.attempts)
    without = {"no call", "long", "key"}
    assert {kind: n for kind, n in calls.items() if n != 1} == dict.fromkeys(without, 0)
